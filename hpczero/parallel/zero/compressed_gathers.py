"""Weights that are gathered in 8 bits (comm.compress).

All ranks, a shard's owner too, have what the messages say: weights are equal everywhere. What is
rounded are the master weights, which stay as they are: nothing adds up.
"""

from collections.abc import Sequence

from torch import Tensor

from hpczero.comm.group import Group
from hpczero.parallel.replicas.codecs import codec_of
from hpczero.parallel.zero.gather_sizes import FORM, exact_parts, message_sizes
from hpczero.parallel.zero.unit import Unit
from hpczero_kernels.cpu import Pool


class UnitMessages:
    """The messages of one unit's shards (a `ShardMessages`)."""

    def __init__(self, unit: Unit, size: int, tensor_ranks: int, pool: Pool) -> None:
        self.size = size
        self._unit = unit
        self._codec = codec_of(FORM, pool)
        self._length = FORM.message(unit.layout.shard_size)  # without the exact elements
        self._exact_of = exact_parts(unit.layout, tensor_ranks)

    def write(self, message: Tensor, rank: int) -> None:
        values = self._unit.master
        exact = self._exact_of.get(rank, [])
        for elements, part in zip(self._exact(message, exact), exact, strict=True):
            elements.copy_(values[part])
        if exact:
            values = values.clone()
        for part in exact:
            values[part] = 0
        self._codec.encode(values, None, None, message[: self._length])

    def read(self, message: Tensor, rank: int, shard: Tensor) -> None:
        self._codec.decode(message[: self._length], None, shard)
        exact = self._exact_of.get(rank, [])
        for elements, part in zip(self._exact(message, exact), exact, strict=True):
            shard[part] = elements

    def _exact(self, message: Tensor, parts: Sequence[slice]) -> Sequence[Tensor]:
        """Return the message's elements in half precision, of each part."""
        lengths = [part.stop - part.start for part in parts]
        dtype = self._unit.weights.dtype
        end = self._length + sum(lengths) * dtype.itemsize
        return message[self._length : end].view(dtype).split(lengths) if parts else []


def messages_of_units(
    units: Sequence[Unit], tensor: Group | None, pool: Pool, are_wanted: bool
) -> dict[Unit, UnitMessages]:
    """Return the messages of those units whose shards are longer."""
    if not are_wanted:
        return {}
    ranks = tensor.size if tensor else 1
    sizes = message_sizes([unit.layout for unit in units], ranks)
    return {
        unit: UnitMessages(unit, sizes[unit.layout.size], ranks, pool)
        for unit in units
        if unit.layout.size in sizes
    }
