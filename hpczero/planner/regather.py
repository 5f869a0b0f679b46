"""How often units are gathered in a step where parameters are sharded (pure): by the rule of `parallel.gather`, as the stage's schedule uses them.

There is room for two of the largest units. A unit that is needed and gone is gathered; what was used longest ago makes room for it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from hpczero.memory.gaps import Gaps
from hpczero.parallel.held import Chunks
from hpczero.parallel.schedule import Schedule, schedule
from hpczero.parallel.states import SLOTS
from hpczero.spec.schema import Parallel

_ONLY_FORWARD = {"embedding"}  # layers whose backward does not need their parameters: lookups


Use = tuple[int, ...]  # the units that a layer works with at the same time


def gathers_in_step(chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int) -> Counter[int]:
    """Size of a unit -> how often units of this size are gathered; `sizes` are those of the units, the layers that have parameters. Once it is
    under way, a schedule repeats itself after as many micro-batches as there are stages, so only the first ones are looked at.
    """
    period = parallel.pipeline
    looked_at = min(micro_batches, 3 * period + micro_batches % period)
    before, times = (gathers(chunks, sizes, parallel, stage, count) for count in (max(0, looked_at - period), looked_at))
    repeats = (micro_batches - looked_at) // period
    of_size = Counter[int]()
    for unit, often in times.items():
        of_size[sizes[unit]] += often + repeats * (often - before[unit])
    return of_size


def gathers(chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int) -> Counter[int]:
    """Unit -> how often it is gathered, looking at every micro-batch."""
    units = [layer for chunk in chunks for layer in chunk if layer.parameters]
    holder = {parameter.name: number for number, layer in enumerate(units) for parameter in layer.parameters}
    uses: dict[str, list[list[Use]]] = {"forward": [], "backward": []}
    for chunk in chunks:
        together = [tuple(sorted({holder[name] for name in layer.names})) for layer in chunk]
        backward = [() if layer.name in _ONLY_FORWARD else units for layer, units in zip(chunk, together, strict=True)]
        uses["forward"].append(together)
        uses["backward"].append(backward[::-1])
    kind = "1f1b" if parallel.schedule == "interleaved" and len(chunks) == 1 else parallel.schedule
    actions = _actions(kind, parallel.pipeline, len(chunks), micro_batches)[stage]
    return gathered(sizes, (use for action in actions for use in uses[action.kind][action.chunk]))


def gathered(sizes: Sequence[int], uses: Iterable[Use]) -> Counter[int]:
    """Unit -> how often, for units of these sizes."""
    gaps, times = Gaps(SLOTS * max(sizes)), Counter[int]()
    there: dict[int, int] = {}  # unit -> where it lies; least recently used first
    for use in uses:
        for unit in use:
            if unit not in there:
                times[unit] += 1
                place = gaps.take(sizes[unit])
                while place is None:
                    gaps.give_back(there.pop(next(other for other in there if other not in use)))
                    place = gaps.take(sizes[unit])
                there[unit] = place
            there[unit] = there.pop(unit)
    return times


@lru_cache(maxsize=4)
def _actions(kind: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    return schedule(kind, stages, chunks, micro_batches) if micro_batches else [()] * stages
