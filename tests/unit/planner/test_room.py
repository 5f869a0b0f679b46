"""The memory of layouts, counted once for all that are alike, is that of `needs_on_grid`."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.comm.grid import Grid
from hpczero.model import families
from hpczero.parallel.pipeline.schedule import (
    RECEIVED_AHEAD,
    forward_only,
    most_arrived,
    schedule,
    schedule_of_stage,
    scheduled_actions,
)
from hpczero.planner.activations import arrived
from hpczero.planner.allocation import Allocation
from hpczero.planner.memory import needs_on_grid
from hpczero.planner.needs import OF_CUDA, of_account
from hpczero.planner.room import Account, Fit, Room
from hpczero.spec.schema import Parallel
from tests.support.plans import everything, on_nodes, space

VERDICTS = ("does not fit", "too close to call", "fits")


def test_bytes_are_those_of_all_ranks_on_500_random_layouts() -> None:
    choice = random.Random(1)
    for _ in range(500):
        spec, nodes, platform, node = on_nodes(choice)
        layers = families.layers(spec.model)
        grid = Grid.build(spec.parallel, nodes.node_of_rank)
        needs = needs_on_grid(spec, layers, grid, platform).values()
        fit = Room(layers, platform, node, nodes).fit(spec)
        assert {account.name for account in fit.accounts} >= {
            "device" if platform.on_gpus else "all"
        }
        for account in fit.accounts:
            ranks = nodes.ranks_per_node
            counted = node.ranks_on_gpu(ranks) if account.name == "device" else ranks
            assert account.size == max(need.of(counted, account.name) for need in needs), spec


def test_one_room_counts_many_layouts_as_each_alone() -> None:
    """What one layout leaves behind changes no other one's bytes."""
    of, machine = space(Allocation.of_nodes(1, 4))
    layers = families.layers(of.spec.model)
    choice = random.Random(2)
    specs = choice.sample(list(everything(of)), 150)
    room = Room(layers, machine.platform, machine.cluster.hardware, of.nodes)
    for spec in specs:
        alone = Room(layers, machine.platform, machine.cluster.hardware, of.nodes)
        assert room.fit(spec) == alone.fit(spec)
        assert room.may_fit(spec) in (None, room.fit(spec))
        assert (room.may_fit(spec) is None) == room.fit(spec).first.exceeds


def test_the_fullest_rank_has_the_bytes_of_the_account() -> None:
    of, machine = space(Allocation.of_nodes(1, 8), parallel__pipeline=4)
    layers = families.layers(of.spec.model)
    room = Room(layers, machine.platform, machine.cluster.hardware, of.nodes)
    for spec in random.Random(3).sample(list(everything(of)), 50):
        place, kinds = room.fullest(spec, "device")
        assert sum(kinds.values()) == room.fit(spec).first.size
        assert 0 <= place.stage < 4
        assert of_account(kinds, "device") == kinds


@given(size=st.integers(1, 10**12), available=st.integers(1, 10**12), more=st.integers(0, 10**11))
def test_more_memory_never_fits_less(size: int, available: int, more: int) -> None:
    for name in ("device", "host", "all", "files"):
        account = Account(name, size, available)
        before = VERDICTS.index(Fit((account,)).verdict)
        after = VERDICTS.index(Fit((replace(account, available=available + more),)).verdict)
        assert before <= after


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 2), st.floats(1, 3))
def test_a_layout_that_fits_does_so_with_more(seed: int, gigabytes: float, times: float) -> None:
    spec, nodes, platform, node = on_nodes(random.Random(seed))
    layers = families.layers(spec.model)
    verdicts = []
    for size in (gigabytes, gigabytes * times):
        larger = replace(node, memory_gb=size, gpu_memory_gb=size, files_gb=size)
        verdicts.append(VERDICTS.index(Room(layers, platform, larger, nodes).fit(spec).verdict))
    assert verdicts[0] <= verdicts[1]


def test_the_margin_is_that_of_the_allocator_and_of_cuda() -> None:
    device = Account("device", 10 * 10**9, 0)
    assert device.most == 11 * 10**9 + OF_CUDA
    assert not device.exceeds
    assert not device.may_exceed, "a size that is not known is never too small"
    assert Fit((replace(device, available=device.most),)).verdict == "fits"
    assert Fit((replace(device, available=device.most - 1),)).verdict == "too close to call"
    assert Fit((replace(device, available=device.size - 1),)).verdict == "does not fit"


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 7])
def test_messages_in_flight_are_those_of_the_schedule(stages: int) -> None:
    kinds = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3))
    for kind, chunks in kinds:
        parallel = Parallel(pipeline=stages, schedule=kind, chunks=chunks)  # type: ignore[arg-type]
        for micro_batches in range(1, 3 * stages + 2):
            actions = schedule(kind, stages, chunks, micro_batches)
            for stage in range(stages):
                own = schedule_of_stage(kind, stages, chunks, micro_batches, stage)
                assert own == actions[stage]
                counts = [
                    most_arrived(scheduled_actions(every, chunks, stage, RECEIVED_AHEAD))
                    for every in (actions, forward_only(actions))
                ]
                assert arrived(parallel, stage, micro_batches, evaluates=False) == counts[0]
                assert arrived(parallel, stage, micro_batches, evaluates=True) == max(counts)
