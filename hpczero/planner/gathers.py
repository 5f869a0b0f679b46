"""All-gathers of units in a step where parameters are sharded (ZeRO-3), from the schedule.

They follow the rules of `parallel.zero.gather`. There is room for two of the largest units. A unit
that is needed and was released is gathered; the least recently used ones make room for it. A pass
is a forward and the backwards until the next one. While it follows the longest pass of the step
before, the unit that comes next is gathered ahead.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hpczero.model.shapes import Layer
from hpczero.parallel.activations.choice import recomputed
from hpczero.parallel.layout import Gaps
from hpczero.parallel.pipeline.partition import Chunks, layers_that_run
from hpczero.parallel.states import SLOTS
from hpczero.planner.activations import actions, simulated_micro_batches
from hpczero.spec.schema import Memory, Parallel

Use = tuple[int, ...]  # the units that are in use at the same time
Pass = list[Use]


_KEPT = Memory()  # of which nothing is computed again

# `gathers`
CountGathers = Callable[[Chunks, Sequence[int], Parallel, int, int, Memory], Counter[int]]


def gathers_in_step(
    chunks: Chunks,
    sizes: Sequence[int],
    parallel: Parallel,
    stage: int,
    micro_batches: int,
    memory: Memory = _KEPT,
    roughly: CountGathers | None = None,
) -> Counter[int]:
    """Return size of a unit -> all-gathers of units of this size.

    `sizes` are those of the units, the layers that have parameters. `roughly`: counts those of
    whole periods, and a part of a period has its share of them.
    """
    period = parallel.pipeline
    few = simulated_micro_batches(parallel, micro_batches)
    if roughly:
        few = min(few, 2 * period)
    count_gathers = roughly or gathers
    before = count_gathers(chunks, sizes, parallel, stage, max(0, few - period), memory)
    counts = count_gathers(chunks, sizes, parallel, stage, few, memory)
    repeats = (micro_batches - few) / period
    by_size = Counter[int]()
    for unit, count in counts.items():
        by_size[sizes[unit]] += count + round(repeats * (count - before[unit]))
    return by_size


def gathers(
    chunks: Chunks,
    sizes: Sequence[int],
    parallel: Parallel,
    stage: int,
    micro_batches: int,
    memory: Memory = _KEPT,
) -> Counter[int]:
    """Return unit -> its all-gathers, simulating every micro-batch."""
    units = [layer for chunk in chunks for layer in chunk if layer.parameters]
    holder = {
        parameter.name: number
        for number, layer in enumerate(units)
        for parameter in layer.parameters
    }
    forward = [list(_forward(chunk, holder)) for chunk in chunks]
    backward = [list(_backward(chunk, holder, memory)) for chunk in chunks]
    passes: list[Pass] = []
    for action in actions(parallel, len(chunks), stage, micro_batches):
        if action.kind == "forward":
            passes.append(list(forward[action.chunk]))
        else:
            passes[-1] += backward[action.chunk]
    return simulate_gathers(sizes, passes)


def _forward(chunk: Sequence[Layer], holder: dict[str, int]) -> Iterator[Use]:
    """Yield the units of each layer: all that it works with are gathered while it runs."""
    for layer in layers_that_run([chunk]):
        yield tuple(sorted({holder[name] for name in layer.names}))


def _backward(chunk: Sequence[Layer], holder: dict[str, int], memory: Memory) -> Iterator[Use]:
    """Yield unit by unit, as autograd asks for them: a shared one (the logits' weight) first.

    A unit with several parameters is asked for several times, before and after what comes next is
    gathered ahead; that of a block that is computed again is there until its gradients are. What
    blocks share (biases for distances) is asked for between their own.
    """
    for layer in reversed(layers_that_run([chunk])):
        asked = Counter(holder[name] for name in layer.names.difference(layer.only_forward))
        again = recomputed(memory, layer) == "block"
        units = [unit for unit in sorted(asked) for _ in range(min(asked[unit], 1 if again else 2))]
        if layer.is_block and layer.uses:
            shared = sorted({holder[name] for name in layer.uses})
            own = [unit for unit in units if unit not in shared]
            units = [*own, *shared, *own]
        yield from ((unit,) for unit in units)


def simulate_gathers(sizes: Sequence[int], passes: Sequence[Pass]) -> Counter[int]:
    """Return unit -> its all-gathers in any step but the first."""
    orders = ([unit for unit, _, is_new in _one_by_one(uses) if is_new] for uses in passes)
    expected = max(orders, key=len, default=[])
    regions = [SLOTS * max(sizes)]
    while True:
        cache = _Cache(sizes, regions)
        for uses in passes:
            index = 0
            for unit, in_use, is_new in _one_by_one(uses):
                cache.use(unit, in_use)
                if is_new and expected[index : index + 1] == [unit]:
                    cache.expect(expected[index + 1 : index + 2], unit, in_use)
                index += is_new
        if not cache.grown:
            return cache.gathers
        regions += cache.grown  # in the first step, and they stay


def _one_by_one(uses: Iterable[Use]) -> Iterator[tuple[int, Use, bool]]:
    """Yield each unit used, all in use with it, and False where it is the one used before."""
    before = None
    for use in uses:
        for unit in use:
            yield unit, use, unit != before
            before = unit


class _Cache:
    """The gathered units and their places in memory; least recently used first."""

    def __init__(self, sizes: Sequence[int], regions: Sequence[int]) -> None:
        self.grown: list[int] = []  # sizes of regions beyond those given
        self.gathers = Counter[int]()
        self._sizes = sizes
        self._regions = [Gaps(size) for size in regions]
        self._places: dict[int, tuple[Gaps, int]] = {}

    def use(self, unit: int, in_use: Use) -> None:
        if unit not in self._places and not self._gather(unit, in_use):
            # The units in use leave no gap that is large enough.
            self.grown.append(self._sizes[unit])
            self._regions.append(Gaps(self._sizes[unit]))
            self._gather(unit, in_use)
        self._places[unit] = self._places.pop(unit)

    def expect(self, coming: Sequence[int], now: int, in_use: Use) -> None:
        for unit in coming:
            if unit not in self._places:
                self._gather(unit, (*in_use, now))

    def _gather(self, unit: int, stay: Use) -> bool:
        place = self._free_place(unit)
        for other in list(self._places):
            if place is None and other not in stay:
                region, first = self._places.pop(other)
                region.give_back(first)
                place = self._free_place(unit)
        if place is None:
            return False
        self._places[unit] = place
        self.gathers[unit] += 1
        return True

    def _free_place(self, unit: int) -> tuple[Gaps, int] | None:
        for region in self._regions:
            if (first := region.take(self._sizes[unit])) is not None:
                return region, first
        return None
