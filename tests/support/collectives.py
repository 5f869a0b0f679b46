"""Values that every rank can compute for all others, and what a collective must make of them."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from hpczero.comm.group import Group
from hpczero.comm.world import World

HALF = (torch.float16, torch.bfloat16)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return the values that `rank` brings: every rank can compute everyone's. Floats of very
    different size, so that the order of a sum shows.
    """
    index = torch.arange(length, dtype=torch.int64)
    mixed = (index * 2654435761 + (rank + 1) * 40503 + (index ^ rank) * 97) % 65521
    if dtype is torch.bool:
        return mixed % 3 == 0
    if not dtype.is_floating_point:
        return mixed.to(dtype)
    return ((mixed.double() / 32768 - 1) * torch.pow(2.0, (mixed % 11).double())).to(dtype)


def reduced(parts: list[Tensor], op: str = "sum") -> Tensor:
    """In rank order; half precision in fp32, unrounded."""
    wide = [part.float() if part.dtype in HALF else part for part in parts]
    return reduce(OPERATIONS[op], wide)


def everyones(group: Group, length: int, dtype: torch.dtype) -> list[Tensor]:
    return [values(rank, length, dtype) for rank in range(group.size)]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)), (
        f"{found} is not {expected}"
    )


def shares_memory(world: World) -> bool:
    """Return True if short collectives go through the node's memory, not by messages."""
    return world.size > 1 and world.backend == "mpi" and not world.device.has_queues
