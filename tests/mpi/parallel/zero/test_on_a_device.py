"""Tensors in a device's memory: a GPU where there is one (several ranks may have it together),
else one that is late in the computer's own.
"""

import random
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from hpczero import device
from hpczero.comm.group import Group, shard
from hpczero.comm.mpi_backend import Order
from hpczero.comm.progress import Work
from hpczero.comm.torch_backend import Rendezvous, TorchCarrier
from hpczero.comm.world import World
from hpczero.device import CPU, Device, device_of_rank
from tests.support.collectives import assert_same, everyones, reduced, values
from tests.support.covering import Case
from tests.support.grids import PLAIN, Serial, assert_agrees, spec_of
from tests.support.training import train

pytestmark = pytest.mark.mpi

LENGTHS = (0, 1, 301, 300_001)
LONG = 3_000_000  # elements: several pieces of pinned memory
GRIDS = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 3: [(1, 1)], 4: [(2, 2)]}


def put(own: Device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(own.torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_collectives_are_those_of_the_cpu(world: World, there: World, dtype: torch.dtype) -> None:
    group, own = there.everyone, there.device
    for length in LENGTHS:
        parts, mine = everyones(group, length, dtype), shard(length, group.size, group.rank)
        found = put(own, parts[group.rank].clone())
        group.all_reduce(found)
        assert_same(found.cpu(), reduced(parts).to(dtype))
        output = put(own, torch.zeros(mine.stop - mine.start, dtype=dtype))
        group.reduce_scatter(output, put(own, parts[group.rank].clone()))
        assert_same(output.cpu(), reduced(parts).to(dtype)[mine])
        gathered = put(own, torch.zeros(length, dtype=dtype))
        group.all_gather(gathered, put(own, parts[0][mine].clone()))
        assert_same(gathered.cpu(), parts[0])
        told = put(own, parts[group.rank].clone())
        group.broadcast(told, group.size - 1)
        assert_same(told.cpu(), parts[-1])


def test_messages_pass_each_other(world: World, there: World) -> None:
    group, own = there.everyone, there.device
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    received = [put(own, torch.zeros(LONG)) for _ in range(2)]
    works = [group.start_receive(tensor, before) for tensor in received]
    works += [
        group.start_send(put(own, values(group.rank + number, LONG, torch.float32)), after)
        for number in range(2)
    ]
    for work in works:
        work.wait()
    for number, tensor in enumerate(received):
        assert_same(tensor.cpu(), values(before + number, LONG, torch.float32))


def test_what_is_asked_of_the_device_before_and_after_stays_before_and_after(
    world: World, there: World
) -> None:
    """Without a word from the host: long computations, a sum of their result, and computing with
    that.
    """
    group, own = there.everyone, there.device
    mixed = put(own, torch.eye(400) * 0.5)
    works, sums = [], []
    for number in range(6):
        result = put(own, torch.full((400, 400), float(2**20)))
        for _ in range(20):
            result = result @ mixed  # halves it
        result += group.rank + number
        works.append(group.start_all_reduce(result))
        sums.append(result)
    for work, total in zip(works, sums, strict=True):
        work.wait()
        total *= 2.0
    ranks = group.size
    for number, total in enumerate(sums):
        expected = 2.0 * (ranks * (1 + number) + sum(range(ranks)))
        assert bool((total.cpu() == expected).all()), (
            number,
            expected,
            total.cpu().unique().tolist(),
        )


def test_tensors_of_the_cpu_are_moved_as_well(world: World, there: World) -> None:
    assert there.everyone.stack(torch.tensor(there.rank)).tolist() == list(range(there.size))


@pytest.mark.parametrize(
    "kind",
    [
        "gloo",
        pytest.param(
            "nccl", marks=pytest.mark.skipif(not device.visible(), reason="NCCL wants a GPU")
        ),
    ],
)
def test_what_torchs_backends_are_asked_for_they_can_do(world: World, kind: str) -> None:
    """Each rank alone, as NCCL refuses ranks that share a GPU: what is called is the same."""
    own = device_of_rank("cuda", world.local_rank, world.local_size) if kind == "nccl" else CPU
    alone = world.part([world.rank])
    alone.use(own, "mpi")
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    native = Rendezvous(kind, store, "127.0.0.1", own).group("alone", [0], 0, 1 << 16, Order(None))
    group = Group("alone", [0], 0, alone.node_of_rank, alone.everyone.connection, native)
    for length in LENGTHS:
        given = values(1, length, torch.bfloat16)
        mine, output = put(own, given.clone()), put(own, torch.zeros_like(given))
        group.all_reduce(mine)
        group.broadcast(mine)
        group.reduce_scatter(output, mine)
        assert_same(output.cpu(), given)
        group.all_gather(output.zero_(), mine)
        assert_same(output.cpu(), given)
        group.all_to_all([output.zero_()], [mine])
        assert_same(output.cpu(), given)
    assert native.buffered
    native.close()
    alone.close()


def test_two_groups_of_the_same_ranks_hand_on_their_operations_in_one_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order each rank starts them in, and waits for them in: NCCL would hang else."""
    part = world.part(range(world.size))
    part.use(CPU, "gloo")
    start, handed_on = TorchCarrier._start, []

    def start_noted(self: TorchCarrier, operation: Callable[..., object], *rest: object) -> object:
        handed_on.append(
            [operation.__name__, [one.numel() for one in rest if torch.is_tensor(one)]]
        )
        return start(self, operation, *rest)

    monkeypatch.setattr(TorchCarrier, "_start", start_noted)
    everyone = range(part.size)
    sums, gathers = part.group("data", everyone), part.group("data", everyone, "gathers")
    chance = random.Random(part.rank)
    for turn in range(10):
        lengths = [part.size * (400 * turn + number + 1) for number in range(6)]
        summed = [values(part.rank, length, torch.float32) for length in lengths]
        gathered = [values(9, length, torch.float32) for length in lengths]
        order = [sums, gathers] * 6
        chance.shuffle(order)
        left = {sums: list(summed), gathers: list(gathered)}
        works = [started_on(group, left[group].pop(0), group is sums) for group in order]
        chance.shuffle(works)
        for work in works:
            work.wait()
        for length, total, whole in zip(lengths, summed, gathered, strict=True):
            assert_same(total, reduced(everyones(sums, length, torch.float32)))
            assert_same(whole, values(9, length, torch.float32))
    orders = world.broadcast_object(world.gather_objects(handed_on))
    assert all(order == orders[0] for order in orders)
    assert bool(orders[0]) == (part.size > 1)
    part.close()


def started_on(group: Group, tensor: torch.Tensor, is_sum: bool) -> Work:
    if is_sum:
        return group.start_all_reduce(tensor)
    own = tensor[shard(tensor.numel(), group.size, group.rank)].clone()
    tensor.zero_()
    return group.start_all_gather(tensor, own)


def on_device(ranks: int, everything: bool) -> list[Case]:
    grids = GRIDS.get(ranks, [])
    stages = ((0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"))
    return [
        PLAIN | {"grid": grid, "stage": stage, "precision": precision}
        for grid in grids
        for stage, precision in stages
    ]


@pytest.mark.cases(of=on_device)
@pytest.mark.few(2)
def test_a_run_is_that_of_one_cpu(world: World, there: World, case: Case) -> None:
    spec = spec_of(case)
    assert_agrees(train(there, spec), Serial(), world, spec)


def test_a_bad_gradient_is_skipped_and_its_tensor_named(
    world: World, there: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks, and on each alone, where the rank is known, too."""
    from hpczero.parallel.zero.unit import Unit

    complete, calls = Unit.complete, []

    def spoil(unit: Unit) -> None:
        if unit.layout.name == "blocks.1":
            calls.append(1)
            if trying.rank == trying.size - 1 and len(calls) == 2:
                assert unit.buffer is not None
                unit.part(unit.buffer, unit.layout.slots[4]).view(-1)[3] = float("inf")
        complete(unit)

    monkeypatch.setattr(Unit, "complete", spoil)
    alone = there.part([there.rank])
    for trying in (there, alone):
        calls.clear()
        record = train(trying, spec_of(PLAIN | {"grid": (1, 1), "batch": (trying.size, 1)}))
        assert [metrics.get("skipped", False) for metrics in record.metrics_seen] == [
            False,
            True,
            False,
        ]
        which = " of data rank 0" if trying.size == 1 else ""
        assert {found["where"] for name, found in record.events if name == "WARN"} == {
            f"first in blocks.1.attention.output.weight{which}"
        }
    alone.close()
