"""The loss scale of fp16: small gradients do not vanish, and a step that overflows is skipped."""

from dataclasses import dataclass, replace

from hpczero.spec.schema import Train

_GROWTH_INTERVAL = 1000  # steps without overflow after which the scale doubles
_LARGEST = 2.0**24
_SMALLEST = 2.0**-14


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018); bf16 and fp32 keep scale 1.

    A large scale keeps small gradients from vanishing. A step that overflows is skipped and halves
    it. `good_steps`: steps since it last changed.
    """

    value: float
    dynamic: bool
    good_steps: int = 0

    @classmethod
    def first(cls, train: Train) -> "LossScale":
        fp16 = train.precision == "fp16"
        return cls(train.loss_scale if fp16 else 1.0, dynamic=fp16)

    def after(self, overflow: bool) -> "LossScale":
        if not self.dynamic:
            return self
        if overflow:
            return replace(self, value=max(_SMALLEST, self.value / 2), good_steps=0)
        if self.good_steps + 1 == _GROWTH_INTERVAL:
            return replace(self, value=min(_LARGEST, self.value * 2), good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)
