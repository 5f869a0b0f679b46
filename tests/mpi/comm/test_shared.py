"""Windows that the ranks of a node share: one memory, counters in order, nothing taken before it
is written, nothing left.
"""

import time
from pathlib import Path

import pytest
import torch

from hpczero import machine
from hpczero.comm.node_axis import NodeAxis
from hpczero.comm.progress import Limits
from hpczero.comm.shared_memory import NodeWindow, shortage
from hpczero.comm.world import World
from hpczero.errors import InputError

pytestmark = [pytest.mark.mpi, pytest.mark.many_ranks]

_MEGABYTE = 1 << 20


def test_every_rank_sees_what_each_has_written(world: World) -> None:
    window = NodeWindow.allocate(
        world, range(world.size), 1000 * world.rank
    )  # rank 0 contributes nothing
    own = window.part(window.index)
    own.copy_(torch.arange(own.numel()) % 251 + world.rank)
    window.post(0, 1)
    window.wait(0, 1)
    for rank in range(world.size):
        assert window.part(rank).numel() == 1000 * rank
        assert torch.equal(
            window.part(rank), (torch.arange(1000 * rank) % 251 + rank).to(torch.uint8)
        )
        assert window.part(rank).numel() == 0 or window.part(rank).data_ptr() % 4096 == 0
    window.post(1, 1)
    window.wait(1, 1)
    window.close()


def test_what_one_rank_writes_others_may_change(world: World) -> None:
    window = NodeWindow.allocate(world, range(world.size), 64)
    for step in range(world.size):
        if step == world.rank:
            for rank in range(world.size):
                window.part(rank)[world.rank] = 100 + world.rank
        window.post(2, step + 1)
        window.wait(2, step + 1)
    assert window.part(world.rank)[: world.size].tolist() == [
        100 + rank for rank in range(world.size)
    ]
    window.close()


def test_counters_are_apart_and_start_at_zero(world: World) -> None:
    window = NodeWindow.allocate(world, range(world.size), 0, counters=5)
    assert [window.seen(rank, counter) for rank in range(world.size) for counter in range(5)] == [
        0
    ] * 5 * world.size
    assert window.reached(4, 0)
    world.everyone.barrier()
    window.post(4, 1 << 40)
    window.wait(4, 1 << 40)
    assert window.missing(3, 1) == list(range(world.size))
    assert [window.seen(rank, 4) for rank in range(world.size)] == [1 << 40] * world.size
    window.close()


def test_a_wait_sees_all_that_was_written_before_the_post(world: World) -> None:
    """Many rounds of: every rank writes its part, posts, waits, and finds the round's values in
    all parts.
    """
    window = NodeWindow.allocate(world, range(world.size), 8 * 64)
    parts = [window.part(rank).view(torch.int64) for rank in range(world.size)]
    for number in range(1, 200):
        parts[world.rank].fill_(number)
        window.post(0, number)
        window.wait(0, number)
        assert all(int(part[0]) == int(part[-1]) == number for part in parts)
        window.post(1, number)
        window.wait(1, number)
    window.close()


def test_messages_go_on_while_a_counter_is_waited_for(world: World) -> None:
    """Rank 0 waits for a counter that the others post only once they have its message, which
    must not need rank 0 to wait for it.
    """
    window = NodeWindow.allocate(world, range(world.size), 0)
    tensor = torch.full((1_000_000,), float(world.rank))
    work = world.everyone.start_broadcast(tensor)
    if world.rank > 0:
        work.wait()
    window.post(0, 1)
    window.wait(0, 1)
    work.wait()
    assert tensor[-1] == 0
    window.close()


def test_ranks_of_a_tried_out_node_share_a_window(whole: World) -> None:
    tried = whole.part(range(whole.size), ranks_per_node=2)
    ranks = [rank for rank, node in enumerate(tried.node_of_rank) if node == tried.node]
    window = NodeWindow.allocate(tried, ranks, 16)
    window.part(window.index).fill_(tried.rank)
    window.post(0, 1)
    window.wait(0, 1)
    assert [int(window.part(index)[0]) for index in range(len(ranks))] == ranks
    window.close()
    tried.close()


def test_memory_lies_once_on_the_node_and_only_where_it_was_written(whole: World) -> None:
    if whole.size == 1:
        pytest.skip("one rank shares with nobody")
    size = 64 * _MEGABYTE
    before = _share_of_memory()
    window = NodeWindow.allocate(whole, range(whole.size), size if whole.rank == 0 else 0)
    whole.everyone.barrier()
    untouched = _share_of_memory() - before
    if whole.rank == 0:
        window.part(0)[: size // 2] = 1
    window.post(0, 1)
    window.wait(0, 1)
    assert int(window.part(0)[: size // 2].sum()) == size // 2
    window.post(1, 1)
    window.wait(1, 1)
    grown = torch.tensor([untouched, _share_of_memory() - before], dtype=torch.float64)
    whole.everyone.all_reduce(grown)
    window.close()
    assert grown[0] < 8 * _MEGABYTE
    assert grown[1] == pytest.approx(size // 2, abs=8 * _MEGABYTE)


def test_no_file_is_left_in_dev_shm_not_even_while_a_window_is_open(whole: World) -> None:
    whole.everyone.barrier()
    before = set(_own_files())
    whole.everyone.barrier()
    window = NodeWindow.allocate(whole, range(whole.size), _MEGABYTE)
    assert set(_own_files()) <= before
    whole.everyone.barrier()
    window.close()
    assert set(_own_files()) <= before


@pytest.mark.ranks(2, 3, 4, 6, 8)
def test_more_than_there_is_is_refused_by_all(world: World) -> None:
    space = machine.shared_memory()
    assert space is not None
    with pytest.raises(
        InputError,
        match=(
            r"window weights needs [\d,]+ bytes of this node's /dev/shm, of which [\d,]+ are "
            r"free"
        ),
    ):
        NodeWindow.allocate(
            world, range(world.size), space.free if world.rank == 0 else 1 << 20, name="weights"
        )
    assert world.broadcast_object(1) == 1


@pytest.mark.ranks(2, 3, 4, 6, 8)
def test_what_open_windows_were_promised_is_not_free(world: World) -> None:
    space = machine.shared_memory()
    assert space is not None
    most = space.free // 3 * 2 if world.rank == 0 else 0
    first = NodeWindow.allocate(world, range(world.size), most)
    with pytest.raises(InputError, match="promised to nobody"):
        NodeWindow.allocate(world, range(world.size), most)
    first.close()
    NodeWindow.allocate(world, range(world.size), most).close()


def test_a_long_wait_leaves_the_core_to_others(whole: World) -> None:
    """The waiting rank's own processor time stays far below the time that it waits."""
    window = NodeWindow.allocate(whole, range(whole.size), 0)
    whole.everyone.barrier()
    if whole.rank == 0 and whole.size > 1:
        time.sleep(0.5)
    worked = time.process_time()
    window.post(0, 1)
    window.wait(0, 1)
    worked = time.process_time() - worked
    window.close()
    assert worked < 0.25


def test_shortage_names_both_numbers() -> None:
    assert shortage("x", 10, 10) is None
    assert "11 bytes of this node's /dev/shm, of which 10 are" in (shortage("x", 11, 10) or "")


def _share_of_memory() -> int:
    """This process's part of the node's shared memory: a page that n processes have mapped
    counts one n-th.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Shmem:"))


def _own_files() -> list[str]:
    """Names in /dev/shm that this process has mapped."""
    mapped = machine.mapped_files(Path("/proc/self/maps").read_text())
    files = [(path.name, path.stat()) for path in Path("/dev/shm").iterdir() if path.exists()]
    return [name for name, facts in files if (facts.st_dev, facts.st_ino) in mapped]


class Sums:
    """The plain arithmetic of a reduction."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def into_shard(self, window: slice, parts: list[torch.Tensor], ranks: object) -> None:
        self.out[window] = sum(parts)

    def of_node(
        self, first: int, parts: list[torch.Tensor], ranks: object, out: torch.Tensor
    ) -> None:
        out.copy_(sum(parts))  # type: ignore[arg-type]


@pytest.mark.by_mpi_alone("what a node shares is in the CPU's memory")
@pytest.mark.ranks(3, 4)
def test_uneven_nodes_sum_what_is_larger_than_their_buffers(world: World) -> None:
    """2 + 1 and 3 + 1 ranks: every node cuts the shards into the same windows."""
    nodes = world.part(range(world.size), world.size - 1, Limits(staging=1 << 17))
    shared = NodeAxis(nodes, nodes.everyone)
    size = 200_000
    elements = world.size * size
    blocks = shared.allocate({"weights": 4}, {"gradients": 4 * elements})
    gradients = blocks["gradients"].view(torch.float32)
    gradients.copy_(torch.arange(elements) % 97 * (world.rank + 1))
    out = torch.empty(size)
    shared.reduce(gradients, Sums(out)).wait()
    everyones = sum(range(1, world.size + 1))
    first = world.rank * size
    assert torch.equal(out, torch.arange(first, first + size) % 97 * float(everyones))
    shared.node_barrier().wait()
    shared.close()
    nodes.close()


def test_nobody_goes_on_before_its_neighbours_have_read_its_part(world: World) -> None:
    """Rank 1 is late to sum; what the others write into their own gradients then comes too late."""

    class Late(Sums):
        def into_shard(self, window: slice, parts: list[torch.Tensor], ranks: object) -> None:
            time.sleep(0.3 * (world.rank == 1))
            super().into_shard(window, parts, ranks)

    node = NodeAxis(world, world.everyone)
    block = node.allocate({"weights": 4}, {"gradients": 4 * world.size})["gradients"]
    gradients = block.view(torch.float32)
    gradients.fill_(world.rank + 1)
    out = torch.empty(1)
    node.reduce(gradients, Late(out)).wait()
    gradients.fill_(float("nan"))
    assert out.item() == sum(range(1, world.size + 1))
    node.node_barrier().wait()
    node.close()
