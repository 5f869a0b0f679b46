"""Sizes of the messages in which weights are gathered between nodes (pure).

With comm.compress a shard travels as integers of 8 bits with their scales. What tensor ranks hold
in common must stay equal to the bit: a block's scale would depend on what else lies in the block,
so these elements are left out of the blocks, and follow in half precision.
"""

from collections import defaultdict
from collections.abc import Iterable

from hpczero.comm.grid import Grid
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.replicas.sizes import FORMS
from hpczero.spec.schema import Spec

FORM = FORMS["int8"]
_HALF = 2  # bytes of a weight
_SCALE = 4


def gathers_in_8_bits(spec: Spec, grid: Grid) -> bool:
    """Return True if weights are compressed: all of them, where any are gathered between nodes."""
    if not spec.compresses_gathers:
        return False
    return grid.shards_and_replicas(spec.zero.shard_ranks).groups_across_nodes("shard") > 0


def message_sizes(units: Iterable[UnitLayout], tensor_ranks: int) -> dict[int, int]:
    """Return size of a unit -> bytes of the message of each of its shards.

    Units of one size have messages of one size. Where these are no shorter than the shards, they
    are not there.
    """
    found: dict[int, int] = {}
    for unit in units:
        exact = max(map(_count, exact_parts(unit, tensor_ranks).values()), default=0)
        size = FORM.message(unit.shard_size) + _HALF * exact
        size = -(-size // _SCALE) * _SCALE
        found[unit.size] = max(found.get(unit.size, 0), size)
    shards = {unit.size: _HALF * unit.shard_size for unit in units}
    return {unit: size for unit, size in found.items() if size < shards[unit]}


def exact_parts(unit: UnitLayout, tensor_ranks: int) -> dict[int, list[slice]]:
    """Return number of a shard -> its elements that follow in half precision."""
    found: dict[int, list[slice]] = defaultdict(list)
    length = unit.shard_size
    for slot in unit.slots if tensor_ranks > 1 else ():
        if not slot.is_split:
            for number in range(slot.offset // length, -(-slot.stop // length)):
                first, stop = max(slot.offset - number * length, 0), slot.stop - number * length
                found[number].append(slice(first, min(stop, length)))
    return found


def _count(parts: Iterable[slice]) -> int:
    return sum(part.stop - part.start for part in parts)
