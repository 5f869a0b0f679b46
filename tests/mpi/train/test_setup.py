"""Ranks and cores of a node."""

import time
from types import SimpleNamespace

import pytest
import torch

from hpczero import machine, processors
from hpczero.comm import progress
from hpczero.comm.world import World
from hpczero.train.setup import share_cores

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("cores", "quota", "crowded"),
    [
        ([{0}, {1}, {2}], None, False),
        ([{0, 1, 2}] * 3, 3.0, False),
        ([{0, 1}] * 3, None, True),
        ([{0, 1, 2, 3}] * 3, 2.5, True),
    ],
    ids=["bound", "shared", "more ranks than cores", "more ranks than the quota"],
)
def test_a_rank_that_waits_sleeps_where_ranks_are_more_than_cores(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    cores: list[set[int]],
    quota: float | None,
    crowded: bool,
) -> None:
    """In its messages, whether it waits for one of them or for several."""
    monkeypatch.setattr(processors, "usable_cores", lambda: cores[world.rank])
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    inner = world.part(range(world.size))
    share_cores(inner)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(
        monotonic=time.monotonic,
        perf_counter=time.perf_counter,
        thread_time=time.thread_time,
        sleep=sleep,
    )
    monkeypatch.setattr(progress, "time", clock)
    group = inner.group("data", range(world.size))
    for count in (1, 2):
        slept.clear()
        time.sleep(0.1 * (world.rank == 0))
        works = [group.start_all_reduce(torch.ones(100_000)) for _ in range(count)]
        for work in works:
            work.wait()
        if world.rank > 0:
            assert bool(slept) == crowded
    monkeypatch.undo()
    inner.close()
    torch.set_num_threads(1)


def test_tensor_ranks_run_equally_many_threads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what they compute in common would differ in its last bits."""
    cores = set(range(100 * world.rank, 100 * world.rank + 1 + 2 * world.rank))
    monkeypatch.setattr(processors, "usable_cores", lambda: cores)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    assert share_cores(world) == 1 + 2 * world.rank
    pair = [world.rank - world.rank % 2, world.rank + 1 - world.rank % 2]
    alike = [rank for rank in pair if rank < world.size]
    assert share_cores(world, alike) == torch.get_num_threads() == 1 + 2 * alike[0]
