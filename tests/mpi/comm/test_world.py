"""World: ranks, nodes, small values, parts of the world."""

import time
from pathlib import Path
from typing import Any

import pytest

from hpczero.comm import torch_backend
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.device import CPU

pytestmark = [pytest.mark.mpi, pytest.mark.many_ranks]


def test_ranks_and_nodes_of_this_machine(world: World) -> None:
    assert world.node_of_rank == (0,) * world.size
    assert (world.node, world.local_rank, world.local_size) == (0, world.rank, world.size)
    assert len(world.hosts) == world.size
    assert len(set(world.hosts)) == 1


def test_simulated_nodes_may_be_of_unequal_size(world: World) -> None:
    tried = world.part(range(world.size), ranks_per_node=2)
    assert tried.node_of_rank == tuple(rank // 2 for rank in range(world.size))
    assert tried.local_rank == world.rank % 2
    assert tried.local_size == min(2, world.size - world.rank // 2 * 2)
    tried.close()


@pytest.mark.parametrize(
    "value",
    [None, 0, "ä", [1.5, {"a": [True, None]}], {}, "x" * 3_000_000],
    ids=lambda value: repr(value)[:12],
)
def test_share(world: World, value: object) -> None:
    assert world.broadcast_object(value if world.rank == 0 else "not this") == value


def test_collect_keeps_rank_order_and_takes_any_length(world: World) -> None:
    collected = world.gather_objects(["é" * (world.rank * 100_000), world.rank])
    expected = [["é" * (rank * 100_000), rank] for rank in range(world.size)]
    assert collected == (expected if world.rank == 0 else None)


def test_share_of_what_json_cannot_carry_is_an_error(world: World) -> None:
    if world.rank == 0:
        with pytest.raises(TypeError):
            world.broadcast_object(object())
    assert world.broadcast_object(1 if world.rank == 0 else None) == 1


def test_a_part_numbers_its_ranks_in_the_given_order(world: World) -> None:
    order = list(reversed(range(world.size)))
    part = world.part(order)
    assert part.rank == world.size - 1 - world.rank
    assert part.broadcast_object(world.rank if part.rank == 0 else None) == world.size - 1
    part.close()


def test_no_rank_has_a_group_of_gloo_before_all_are_connected(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has, and closes it, takes the connection from under those that are not."""
    connect = torch_backend._process_group

    def connect_late(*arguments: Any) -> Any:
        processes = connect(*arguments)
        time.sleep(0.5 * (world.rank == world.size - 1))
        connected.append(time.monotonic())
        return processes

    monkeypatch.setattr(torch_backend, "_process_group", connect_late)
    connected: list[float] = []
    part = world.part(range(world.size))
    part.use(CPU, "gloo")
    part.group("data", range(part.size))
    begun = time.monotonic()
    part.close()
    last = world.all_gather_objects([max(connected, default=0.0), begun])
    assert min(begun for _, begun in last) >= max(connected for connected, _ in last)


def test_the_group_asked_for_again_is_the_same(world: World) -> None:
    assert world.everyone is world.everyone
    assert world.group("data", range(world.size)) is not world.everyone
    assert world.group("data", [world.rank]).size == 1


def test_a_group_without_the_own_rank_is_refused(world: World) -> None:
    with pytest.raises(AssertionError, match="without itself"):
        world.group("data", [world.rank + 1])


def test_what_fails_beside_work_on_files_leaves_the_ranks_in_step(world: World) -> None:
    def fails() -> None:
        if world.rank == 0:
            raise OSError("nothing of this kind")

    try:
        assert (
            run_while_polling(world, lambda: world.rank + 1, meanwhile=fails) == world.rank + 1 > 1
        )
    except OSError:
        assert world.rank == 0
    assert world.broadcast_object(world.gather_objects(world.rank)) == list(range(world.size))


def test_work_on_files_has_ended_everywhere_when_it_ends_anywhere(
    world: World, shared_folder: str
) -> None:
    written = Path(shared_folder) / "written"

    def write() -> None:
        if world.rank == world.size - 1:
            time.sleep(0.5)
            written.touch()

    run_while_polling(world, write)
    assert written.exists()


def test_the_library_is_named(world: World) -> None:
    assert any(name in world.library for name in ("MPICH", "Open MPI", "Intel", "MVAPICH", "CRAY"))
    assert "\n" not in world.library
