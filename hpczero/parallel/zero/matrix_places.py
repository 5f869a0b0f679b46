"""The way of matrices to the ranks that orthogonalise them, and back (pure).

Of the data and tensor ranks that hold a model, or a stage of it, each parameter has one owner. Its
elements come there in two hops: along the data axis, then along the tensor axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hpczero.optim.matrices import is_matrix, operations, owners
from hpczero.parallel.layout import ParameterSlot, Slices, UnitLayout, tensor_part
from hpczero.spec.optimizer import Optimizer

_COMPUTED = 4  # bytes of a number, at most
_TEMPORARY = 4  # matrices, beside the one that is orthogonalised


@dataclass(frozen=True)
class Place:
    """A parameter in its unit, and the ranks of the data and the tensor axis that own it."""

    slot: ParameterSlot
    data: int
    tensor: int

    @property
    def name(self) -> str:
        return self.slot.parameter.name

    def held(self, ranks: int, rank: int) -> Slices:
        """Return the rectangle of the logical tensor that a tensor rank holds."""
        return tensor_part(self.slot.parameter, ranks, rank)


@dataclass(frozen=True)
class Ranks:
    """`data` ranks, `shards` of which have one copy of the states, and `tensor` ranks of each.

    `sharded`: a data rank steps its shard alone, not all elements.
    """

    data: int
    shards: int
    tensor: int
    sharded: bool

    def sends(self, rank: int, owner: int) -> bool:
        """Return True if a data rank sends what it steps to an owner: inside of its replica."""
        if not self.sharded:
            return rank == owner
        return rank // self.shards == owner // self.shards

    def piece(self, unit: UnitLayout, slot: ParameterSlot, rank: int) -> slice:
        """Return the elements of a parameter, in the unit's buffer, that a data rank steps."""
        if not self.sharded:
            return slice(slot.offset, slot.stop)
        shard = unit.shard(rank % self.shards)
        start = min(max(slot.offset, shard.start), slot.stop)
        return slice(start, max(start, min(slot.stop, shard.stop)))

    def length(self, unit: UnitLayout, slot: ParameterSlot, rank: int) -> int:
        piece = self.piece(unit, slot, rank)
        return piece.stop - piece.start


def places(units: Sequence[UnitLayout], optimizer: Optimizer, ranks: Ranks) -> list[list[Place]]:
    """Return the matrices of each unit; owners have about as much to do."""
    found = [
        [slot for slot in unit.slots if is_matrix(slot.parameter, optimizer)] for unit in units
    ]
    costs = [operations(slot.parameter) for slots in found for slot in slots]
    dealt = iter(owners(costs, ranks.data * ranks.tensor))
    return [[Place(slot, *divmod(next(dealt), ranks.tensor)) for slot in slots] for slots in found]


def temporary_bytes(
    units: Sequence[UnitLayout], optimizer: Optimizer, ranks: Ranks, width: int
) -> int:
    """Return the most memory that a rank needs beside its states, in a step.

    `width`: bytes of a number that is sent. That is: all that it owns, the products of the largest
    matrix, and what it sends and gets of a unit.
    """
    found = places(units, optimizer, ranks)
    of_owners: dict[tuple[int, int], int] = {}
    largest = exchanged = 0
    for unit, of_unit in zip(units, found, strict=True):
        for place in of_unit:
            owner = place.data, place.tensor
            elements = place.slot.parameter.size
            of_owners[owner] = of_owners.get(owner, 0) + elements
            largest = max(largest, elements)
        stepped = unit.shard_size if ranks.sharded else unit.size
        exchanged = max(exchanged, stepped + sum(place.slot.parameter.size for place in of_unit))
    owned = max(of_owners.values(), default=0)
    return _COMPUTED * (owned + _TEMPORARY * largest) + width * exchanged


def size(held: Slices) -> int:
    return prod(part.stop - part.start for part in held)
