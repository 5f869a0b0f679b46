"""Tensors that are away from forward to backward: how many are here, and that they come back."""

import weakref
from functools import partial

import pytest
import torch

from hpczero.comm.world import World
from hpczero.parallel.activations import away
from hpczero.parallel.activations.away import Bundle, Shards
from hpczero.parallel.activations.choice import STAY
from hpczero.parallel.zero.buffers import Stock
from hpczero.spec.schema import Memory
from tests.support.grids import PLAIN, spec_of
from tests.support.training import train

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.few(1)
def test_two_blocks_stay_of_all_micro_batches(
    there: World, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block sends one tensor, its input."""
    copies = weakref.WeakSet[away._HostCopy]()
    here: list[int] = []
    fetch = away._HostCopy.fetch

    def count() -> None:
        here.append(sum(copy._here is not None for copy in copies))

    class Counted(away._HostCopy):
        def __init__(self, host: away.HostCopies, source: torch.Tensor) -> None:
            super().__init__(host, source)
            copies.add(self)
            count()

        def fetch(self) -> None:
            fetch(self)
            count()

    monkeypatch.setattr(away, "_SMALL", 1)
    monkeypatch.setattr(away, "_HostCopy", Counted)
    spec = spec_of(PLAIN | {"grid": (1, 2), "schedule": schedule, "batch": (7, 1)})
    memory = Memory(recompute="block", offload_activations="cpu")
    train(there, spec.model_copy(update={"memory": memory}))
    assert max(here) == STAY


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_tensor_that_is_cut_comes_back(world: World, count: int) -> None:
    group = world.group("tensor", range(world.size))
    stock = Stock(partial(torch.empty, dtype=torch.uint8))
    way = Shards(group, stock)
    whole = torch.arange(count, dtype=torch.float32)
    for _ in range(3):
        bundle = Bundle(None)
        sent = way.send(whole, bundle)
        assert sent
        bundle.fetch()
        assert torch.equal(sent.parcel.values().view(torch.float32), whole)
        size = stock.size
        del sent
        assert not bundle.parcels
    assert stock.size == size <= max(1, whole.nbytes) + 4 * (count // 2 + 1)
