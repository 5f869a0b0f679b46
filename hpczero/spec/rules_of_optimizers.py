"""Keys of [optimizer] and [schedule] that are each allowed, but not together (pure)."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from hpczero.spec.keys import Contradiction
from hpczero.spec.optimizer import Optimizer, Schedule
from hpczero.spec.schema import Spec
from hpczero.text import matches_nothing, toml_repr

_OF_MUON = ("momentum", "not_muon")
_UNREAD = {"lion": ("eps",)}  # by others


def _not_adamw(spec: Spec) -> Iterator[Contradiction]:
    """Refuse beside other optimizers the settings that are for AdamW alone."""
    name = spec.optimizer.name
    if name in ("adamw", "one_bit_adam"):
        return
    said = f"optimizer.name = {toml_repr(name)}"
    if spec.zero.offload != "none":
        yield Contradiction(
            ("zero.offload", "optimizer.name"),
            f"zero.offload = {toml_repr(spec.zero.offload)} steps states where they lie, which is "
            f'for "adamw" only, and {said}: zero.offload = "none", or that optimizer',
        )
    if spec.optimizer.outer.every:
        yield Contradiction(
            ("optimizer.name", "optimizer.outer.every"),
            f"optimizer.outer.every = {spec.optimizer.outer.every} is for replicas that step by "
            f'"adamw", and {said}: take that one, or optimizer.outer.every = 0',
        )


def _power(spec: Spec) -> Iterator[Contradiction]:
    schedule = spec.schedule
    if schedule.power != Schedule().power and schedule.name != "polynomial":
        yield Contradiction(
            ("schedule.power", "schedule.name"),
            f'schedule.power = {schedule.power} is for "polynomial" only, and schedule.name = '
            f"{toml_repr(schedule.name)}: leave it out, or take that one",
        )


RULES = (_not_adamw, _power)


def without_parameters(optimizer: Optimizer, names: Sequence[str]) -> list[str]:
    """Return complaints about patterns of `not_muon` that match none of the parameters' names.

    The default's are for any model.
    """
    if optimizer.name != "muon":
        return []
    return [
        f"optimizer.not_muon: {matches_nothing(pattern, names)}: write it as one of them, or leave "
        "it out"
        for pattern in optimizer.not_muon
        if pattern not in Optimizer().not_muon
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def without_effect_of_optimizers(spec: Spec) -> list[str]:
    """Return the settings of an optimizer that another one does not read."""
    optimizer = spec.optimizer
    unread = [*(_OF_MUON if optimizer.name != "muon" else ()), *_UNREAD.get(optimizer.name, ())]
    return [
        f"optimizer.{key} = {toml_repr(getattr(optimizer, key))} has no effect with "
        f"optimizer.name = {toml_repr(optimizer.name)}, which does not read it"
        for key in unread
        if getattr(optimizer, key) != getattr(Optimizer(), key)
    ]
