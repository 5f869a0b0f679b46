"""Sizes of the messages in which weights are gathered between nodes (pure).

With comm.compress a shard travels as integers of 8 bits with their scales. What tensor ranks hold
in common must stay equal to the bit: a block's scale would depend on what else lies in the block,
so these elements follow in half precision. All messages of a unit have one size.
"""

from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.replicas.sizes import FORMS

FORM = FORMS["int8"]
HALF = 2  # bytes of a weight
_SCALE = 4


def message_size(unit: UnitLayout, tensor_ranks: int) -> int:
    """Return the bytes of the message of each shard; 0 if the shards are no longer than that."""
    exact = max(
        sum(part.stop - part.start for part in exact_parts(unit, number, tensor_ranks))
        for number in range(unit.shards)
    )
    size = FORM.message(unit.shard_size) + HALF * exact
    size = -(-size // _SCALE) * _SCALE
    return size if size < HALF * unit.shard_size else 0


def exact_parts(unit: UnitLayout, number: int, tensor_ranks: int) -> list[slice]:
    """Return the elements of a shard that follow in half precision."""
    if tensor_ranks == 1:
        return []
    shard = unit.shard(number)
    return [
        slice(part.start - shard.start, part.stop - shard.start)
        for part in unit.held_by_all(shard.start, shard.stop)
    ]
