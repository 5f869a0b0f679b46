"""What replicas send each other by a spec, and what they keep for it (pure).

The engine does just this (`compressed_sums`, `one_bit_adam`, `local_steps`), and the planner counts
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpczero.parallel.replicas.sizes import FORMS, Form, part_of
from hpczero.parallel.replicas.turns import fragments_of
from hpczero.spec.schema import Spec

_FP32 = 4
_MESSAGES = 3  # of an exchange: sent, arrived, and those of all averages


@dataclass(frozen=True)
class Exchanged:
    """An exchange of every unit, once in `every` steps.

    `form`: of the numbers in messages; None: an all_reduce of gradients in the weights' precision.
    `warm_up`: steps before it, with such sums; 0 may also be a number that is found by itself.
    `of`: the gradients, 1-bit Adam's steps, or the weights of local steps, `fragments` of which
    take turns.
    """

    form: Form | None
    every: int
    warm_up: int
    of: Literal["gradients", "steps", "weights"] = "gradients"
    fragments: int = 1

    @classmethod
    def by(cls, spec: Spec) -> "Exchanged":
        outer = spec.optimizer.outer
        if outer.every:
            return cls(FORMS[outer.precision], outer.every, outer.begin, "weights", outer.fragments)
        if spec.optimizer.name == "one_bit_adam":
            return cls(FORMS["1bit"], 1, spec.optimizer.freeze, "steps")
        return cls(FORMS["int8"] if spec.comm.compress == "int8" else None, 1, 0)

    @property
    def gradients_differ(self) -> bool:
        """True if replicas step by gradients of their own: their number is a matter of training."""
        return self.of != "gradients"

    @property
    def sums_at_first(self) -> bool:
        """True if some steps have an all_reduce of gradients."""
        return self.form is None or self.of == "steps" or self.warm_up > 0

    @property
    def has_errors(self) -> bool:
        """True if what a message leaves out is kept for the next one."""
        return self.gradients_differ and self.form is not None and self.form.block > 0

    def kept(self, owned: Sequence[int], replicas: int) -> int:
        """Return the bytes that the first replica keeps; `owned`: elements of each of its units.

        These are outer weights and momentum, errors (of what is sent, and of the averages that it
        makes), and room for the largest unit. The last replicas may make fewer averages.
        """
        if not self.gradients_differ or replicas == 1:
            return 0
        numbers = max(owned)
        if self.of == "weights":
            numbers += 2 * sum(owned)
        if self.has_errors:
            assert self.form
            parts = [part_of(self.form, elements, replicas, 0) for elements in owned]
            numbers += sum(owned) + sum(part.stop - part.start for part in parts)
        return _FP32 * numbers

    def messages(self, owned: Sequence[int], replicas: int) -> int:
        """Return the most bytes of messages that are on their way, or read, at the same time."""
        if self.form is None or replicas == 1:
            return 0
        sizes = [_MESSAGES * self.form.message(elements) for elements in owned]
        fragments = fragments_of(owned, self.fragments)
        return max(sum(sizes[unit] for unit in units) for units in fragments)

    def saved(self, of_update: int, replicas: int) -> tuple[int, int]:
        """Return the bytes of a checkpoint for each element: in all, and of these of each replica.

        `of_update`: those of the update without replicas. What each replica has of its own comes
        from it to the one that saves the unit.
        """
        if replicas == 1:
            return of_update, 0
        errors = _FP32 * self.has_errors
        common, own = of_update, errors
        if self.of == "weights":  # outer weights and momentum; each has weights and moments
            common, own = 2 * _FP32, 3 * _FP32 + errors
        collected = errors + own * replicas
        return common + collected, collected

    def in_words(self) -> str:
        """Return what is sent and when; "" for plain sums."""
        if self.form is None:
            return ""
        if self.of == "gradients":
            return f"sums of gradients in {self.form.name}"
        if self.of == "steps":
            when = f"{self.warm_up} steps" if self.warm_up else "a warm-up"
            return f"signs of 1-bit Adam's steps, after {when}"
        turns = f", in {self.fragments} fragments" if self.fragments > 1 else ""
        after = f", after {self.warm_up} steps" if self.warm_up else ""
        return f"weights in {self.form.name}, in one of {self.every} steps{turns}{after}"
