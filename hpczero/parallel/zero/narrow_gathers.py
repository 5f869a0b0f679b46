"""Weights that are gathered between nodes in 8 bits (comm.compress).

All ranks, the shard's owner and its neighbours too, have what the messages say: weights are equal
everywhere. What is rounded are the master weights, which stay as they are: nothing adds up.
"""

from collections.abc import Sequence

from torch import Tensor

from hpczero.comm.group import Group
from hpczero.parallel.replicas.codecs import codec_of
from hpczero.parallel.zero.gather_sizes import FORM, exact_parts, message_size
from hpczero.parallel.zero.unit import Unit
from hpczero_kernels.cpu import Pool


class UnitMessages:
    """The messages of one unit's shards (a `ShardMessages`)."""

    def __init__(self, unit: Unit, size: int, tensor_ranks: int, pool: Pool) -> None:
        self.size = size
        self._unit = unit
        self._codec = codec_of(FORM, pool)
        self._length = FORM.message(unit.layout.shard_size)  # without the exact elements
        self._number = unit.shard.start // unit.layout.shard_size
        numbers = range(unit.layout.shards)
        self._exact = [exact_parts(unit.layout, number, tensor_ranks) for number in numbers]

    def write(self, message: Tensor) -> None:
        master = self._unit.master
        self._codec.encode(master, None, None, message[: self._length])
        exact = self._exact[self._number]
        for place, part in zip(self._places(message, exact), exact, strict=True):
            place.copy_(master[part])

    def read(self, message: Tensor, rank: int, shard: Tensor) -> None:
        self._codec.decode(message[: self._length], None, shard)
        exact = self._exact[rank]
        for place, part in zip(self._places(message, exact), exact, strict=True):
            shard[part] = place

    def _places(self, message: Tensor, exact: Sequence[slice]) -> Sequence[Tensor]:
        """Return where the message has these parts, in half precision."""
        if not exact:
            return []
        lengths = [part.stop - part.start for part in exact]
        dtype = self._unit.weights.dtype
        end = self._length + sum(lengths) * dtype.itemsize
        return message[self._length : end].view(dtype).split(lengths)


def messages_of_units(
    units: Sequence[Unit], tensor: Group | None, pool: Pool
) -> dict[Unit, UnitMessages]:
    """Return the messages of those units whose shards are longer."""
    ranks = tensor.size if tensor else 1
    sizes = {unit: message_size(unit.layout, ranks) for unit in units}
    return {unit: UnitMessages(unit, size, ranks, pool) for unit, size in sizes.items() if size}
