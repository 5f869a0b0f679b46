"""Operations in flight: what they do by themselves, and what they hold on to."""

import time

import pytest
import torch

from hpczero.comm.group import shard
from hpczero.comm.world import World
from tests.support.collectives import assert_same, everyones, reduced, values

pytestmark = [pytest.mark.mpi, pytest.mark.many_ranks]

LONG = 300_001  # elements


def test_polling_alone_finishes_an_operation(world: World) -> None:
    tensor = values(world.rank, LONG, torch.float32)
    work = world.everyone.start_all_reduce(tensor)
    while not work.poll():
        pass
    work.wait()
    assert_same(tensor, reduced(everyones(world.everyone, LONG, torch.float32)))


def uses(*tensors: torch.Tensor) -> list[int]:
    """Return how often the memory of each is held."""
    return [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in tensors]


def test_what_has_been_waited_for_keeps_no_tensors(world: World) -> None:
    """The device may still be at it: what takes their memory comes later there, too."""
    group = world.everyone
    for length in (64, LONG):
        parts = everyones(group, length, torch.float32)
        cut = shard(length, group.size, group.rank)
        output, mine = torch.empty(length, dtype=torch.float32), reduced(parts)[cut].clone()
        before = uses(output, mine)
        group.start_all_gather(output, mine).wait()
        patience = time.monotonic() + (10 if world.backend == "gloo" else 0)
        while uses(output, mine) != before and time.monotonic() < patience:
            time.sleep(0.001)  # gloo's thread lets go of them a moment after it is through
        assert uses(output, mine) == before
        assert_same(output, reduced(parts))


def test_what_has_ended_is_forgotten(world: World) -> None:
    """Also by those who watch over what goes to other nodes."""
    nodes = world.part(range(world.size), 1)
    values = [torch.ones(5000) for _ in range(3)]
    works = [nodes.everyone.start_all_reduce(tensor) for tensor in values]
    for work in works:
        work.wait()
        work.host_sync()
    progress = nodes.progress
    assert not progress._in_flight
    assert not progress._far
    assert [tensor.mean().item() for tensor in values] == [world.size] * 3
    nodes.close()
