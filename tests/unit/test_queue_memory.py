"""An operation on a device's tensors makes what else it needs in its queue: memory that was made
beside the computing would be given to others while the queue still uses it.
"""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpczero.comm.connection import Connection, ConnectionSettings
from hpczero.comm.mpi_backend import MpiCarrier, Order, combine_into
from hpczero.comm.progress import Limits
from hpczero.comm.status import WaitPoint
from hpczero.comm.torch_backend import TorchCarrier
from tests.support.carriers import FakeMpi, Silent
from tests.support.queued import Queued

RANKS = 3
LENGTH = 3 * 4096  # elements: more than an all_reduce takes for a tiny tensor
POINT = WaitPoint(b"")


class Allocations(TorchDispatchMode):
    """Notes what makes a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        given = {
            one.untyped_storage().data_ptr() for one in arguments if isinstance(one, torch.Tensor)
        }
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.made.append(str(function))
        return result


class Processes:
    """A process group of torch.distributed that is asked for nothing here."""

    def size(self) -> int:
        return RANKS


class Meeting:
    kind = "nccl"
    device = Queued()


def carriers() -> list[Any]:
    means = ConnectionSettings(FakeMpi(), Silent(), None, Limits(), Queued())  # type: ignore[arg-type]
    messages = MpiCarrier(Connection(means, None, "data", range(RANKS)), "data", range(RANKS), 1)
    return [TorchCarrier(Processes(), Meeting(), 1, 1 << 12, Order(None)), messages]  # type: ignore[arg-type]


@pytest.mark.parametrize("carrier", carriers(), ids=["torch.distributed", "MPI"])
def test_starting_an_operation_makes_nothing_outside_of_its_queue(carrier: Any) -> None:
    whole, shard, one = torch.zeros(LENGTH), torch.zeros(LENGTH // RANKS), torch.zeros(2)
    parts = list(torch.zeros(RANKS, 4).unbind())
    combine = combine_into(shard, "sum")
    with Allocations() as found:
        carrier.all_reduce(one, "sum", POINT, 0)
        carrier.all_reduce(whole, "sum", POINT, 0)
        carrier.reduce_scatter(whole, combine, POINT, 0)
        carrier.all_gather(whole, shard, POINT, 0)
        carrier.exchange(parts, parts, POINT, 0)
        carrier.broadcast(whole, 0, POINT, 0)
    assert not found.made


def test_what_counts_as_made_is_seen() -> None:
    with Allocations() as found:
        torch.zeros(2).view(-1)[1:].new_empty(3)
    assert len(found.made) == 2, found.made
