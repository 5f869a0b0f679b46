"""How often units are gathered in a step where parameters are sharded (pure): by the rules of `parallel.gather`, as the stage's schedule uses them.

There is room for two of the largest units. A unit that is needed and gone is gathered; what was used longest ago makes room for it. A pass is a
forward and the backwards until the next one; while it goes the way that the longest one of the step before went, what comes next is gathered ahead.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hpczero.memory.gaps import Gaps
from hpczero.model.shapes import Layer
from hpczero.parallel.held import Chunks, layers_that_run
from hpczero.parallel.states import SLOTS
from hpczero.planner.under_way import actions, looked_at
from hpczero.spec.schema import Parallel

_ONLY_FORWARD = {"embedding"}  # layers whose backward does not need their parameters: lookups

Use = tuple[int, ...]  # the units that are in use at the same time
Pass = list[Use]


def gathers_in_step(chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int) -> Counter[int]:
    """Size of a unit -> how often units of this size are gathered; `sizes` are those of the units, the layers that have parameters."""
    period, few = parallel.pipeline, looked_at(parallel, micro_batches)
    before, times = (gathers(chunks, sizes, parallel, stage, count) for count in (max(0, few - period), few))
    repeats = (micro_batches - few) // period
    of_size = Counter[int]()
    for unit, often in times.items():
        of_size[sizes[unit]] += often + repeats * (often - before[unit])
    return of_size


def gathers(chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int) -> Counter[int]:
    """Unit -> how often it is gathered, looking at every micro-batch."""
    units = [layer for chunk in chunks for layer in chunk if layer.parameters]
    holder = {parameter.name: number for number, layer in enumerate(units) for parameter in layer.parameters}
    forward, backward = ([list(uses(chunk, holder)) for chunk in chunks] for uses in (_forward, _backward))
    passes: list[Pass] = []
    for action in actions(parallel, len(chunks), stage, micro_batches):
        if action.kind == "forward":
            passes.append(list(forward[action.chunk]))
        else:
            passes[-1] += backward[action.chunk]
    return gathered(sizes, passes)


def _forward(chunk: Sequence[Layer], holder: dict[str, int]) -> Iterator[Use]:
    """All that a layer works with is whole while it runs."""
    for layer in layers_that_run([chunk]):
        yield tuple(sorted({holder[name] for name in layer.names}))


def _backward(chunk: Sequence[Layer], holder: dict[str, int]) -> Iterator[Use]:
    """One after the other, as autograd asks for them: what a layer shares (the logits' weight) is what its forward uses last."""
    for layer in reversed(layers_that_run([chunk])):
        if layer.name not in _ONLY_FORWARD:
            for unit in sorted({holder[name] for name in layer.names}):
                yield (unit,)


def gathered(sizes: Sequence[int], passes: Sequence[Pass]) -> Counter[int]:
    """Unit -> how often, for units of these sizes, in any step but the first."""
    expected = max(([unit for unit, _ in _one_by_one(uses)] for uses in passes), key=len, default=[])
    room = _Room(sizes)
    for uses in passes:
        for place, (unit, in_use) in enumerate(_one_by_one(uses)):
            room.use(unit, in_use)
            if expected[place : place + 1] == [unit]:
                room.expect(expected[place + 1 : place + 2], unit, in_use)
    return room.gathers


def _one_by_one(uses: Iterable[Use]) -> Iterator[tuple[int, Use]]:
    """What is used, and what is in use meanwhile; the same unit twice in a row is one use."""
    before = None
    for use in uses:
        for unit in use:
            if unit != before:
                yield unit, use
            before = unit


class _Room:
    """What is whole now, and where it lies; least recently used first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.gathers = Counter[int]()
        self._sizes = sizes
        self._regions = [Gaps(SLOTS * max(sizes))]
        self._there: dict[int, tuple[Gaps, int]] = {}

    def use(self, unit: int, in_use: Use) -> None:
        if unit not in self._there and not self._gather(unit, in_use):
            self._regions.append(Gaps(self._sizes[unit]))  # what is in use leaves no gap that is large enough
            self._gather(unit, in_use)
        self._there[unit] = self._there.pop(unit)

    def expect(self, coming: Sequence[int], now: int, in_use: Use) -> None:
        for unit in coming:
            if unit not in self._there:
                self._gather(unit, (*in_use, now))

    def _gather(self, unit: int, stay: Use) -> bool:
        place = self._free_place(unit)
        for other in list(self._there):
            if place is None and other not in stay:
                region, first = self._there.pop(other)
                region.give_back(first)
                place = self._free_place(unit)
        if place is None:
            return False
        self._there[unit] = place
        self.gathers[unit] += 1
        return True

    def _free_place(self, unit: int) -> tuple[Gaps, int] | None:
        return next(((region, first) for region in self._regions if (first := region.take(self._sizes[unit])) is not None), None)
