"""Dynamic loss scaling for fp16: small gradients are kept from vanishing, overflows halve the scale and skip the step (Micikevicius et al. 2018)."""

from dataclasses import dataclass, replace

_GROWTH_INTERVAL = 1000  # steps without overflow after which the scale doubles
_LARGEST = 2.0**24
_SMALLEST = 2.0**-14


@dataclass(frozen=True)
class LossScale:
    """The scale, and how many steps in a row went well. bf16 and fp32 have the constant scale 1."""

    value: float
    dynamic: bool
    good_steps: int = 0

    def after(self, overflow: bool) -> "LossScale":
        if not self.dynamic:
            return self
        if overflow:
            return replace(self, value=max(_SMALLEST, self.value / 2), good_steps=0)
        if self.good_steps + 1 == _GROWTH_INTERVAL:
            return replace(self, value=min(_LARGEST, self.value * 2), good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)
