"""Every collective equals bit for bit what one process computes, so no two runs and no two MPI
libraries can differ.
"""

import time
import zlib

import pytest
import torch

from hpczero.comm.group import shard
from hpczero.comm.world import World
from tests.support.collectives import HALF, assert_same, everyones, reduced, shares_memory, values

pytestmark = [pytest.mark.mpi, pytest.mark.many_ranks]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
LENGTHS = (0, 1, 5, 64, 301)
MIDDLE = 20_011  # elements: in two phases through the node's memory, or in messages
LONG = 300_001  # elements: beyond what is gathered whole, and divided by no number of ranks here


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_all_reduce_is_the_sum_in_rank_order(
    world: World, narrow: World, dtype: torch.dtype
) -> None:
    for where, lengths in ((world, (*LENGTHS, MIDDLE, LONG)), (narrow, LENGTHS)):
        for length in lengths:
            parts = everyones(where.everyone, length, dtype)
            found = parts[where.rank].clone()
            where.everyone.all_reduce(found)
            assert_same(found, reduced(parts).to(dtype))


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_all_reduce_of_extremes(world: World, narrow: World, dtype: torch.dtype, op: str) -> None:
    for where in (world, narrow):
        parts = everyones(where.everyone, 301, dtype)
        found = parts[where.rank].clone()
        where.everyone.all_reduce(found, op)
        assert_same(found, reduced(parts, op).to(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_reduce_scatter_gives_each_rank_its_shard(
    world: World, narrow: World, dtype: torch.dtype
) -> None:
    for where, lengths in ((world, (*LENGTHS, MIDDLE, LONG)), (narrow, LENGTHS)):
        group = where.everyone
        for length in lengths:
            parts = everyones(group, length, dtype)
            whole = parts[group.rank].clone()
            mine = shard(length, group.size, group.rank)
            output = torch.empty(mine.stop - mine.start, dtype=dtype)
            group.reduce_scatter(output, whole)
            assert_same(output, reduced(parts).to(dtype)[mine])
            assert_same(whole, parts[group.rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reduce_scatter_in_place_changes_the_own_shard_only(
    world: World, narrow: World, dtype: torch.dtype
) -> None:
    for where in (world, narrow):
        group = where.everyone
        parts = everyones(group, 301, dtype)
        whole, mine = parts[group.rank].clone(), shard(301, group.size, group.rank)
        expected = whole.clone()
        expected[mine] = reduced(parts).to(dtype)[mine]
        group.reduce_scatter(whole[mine], whole)
        assert_same(whole, expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_reduce_scatter_of_half_precision_into_fp32_is_not_rounded(
    world: World, narrow: World, dtype: torch.dtype
) -> None:
    for where in (world, narrow):
        group = where.everyone
        parts = everyones(group, 301, dtype)
        mine = shard(301, group.size, group.rank)
        output = torch.empty(mine.stop - mine.start, dtype=torch.float32)
        group.reduce_scatter(output, parts[group.rank])
        assert_same(output, reduced(parts).float()[mine])


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_all_gather_puts_the_shards_in_rank_order(
    world: World, narrow: World, dtype: torch.dtype
) -> None:
    for where, lengths in ((world, (*LENGTHS, MIDDLE, LONG)), (narrow, LENGTHS)):
        group = where.everyone
        for length in lengths:
            expected = values(7, length, dtype)
            mine = shard(length, group.size, group.rank)
            output = torch.zeros(length, dtype=dtype)
            group.all_gather(output, expected[mine].clone())
            assert_same(output, expected)
            output.zero_()
            output[mine] = expected[mine]
            group.all_gather(output, output[mine])
            assert_same(output, expected)


def test_many_short_ones_under_way_through_memory_and_messages(world: World) -> None:
    """They are waited for in another order than they were started, among long ones, on two axes."""
    groups = [world.group(axis, range(world.size)) for axis in ("data", "tensor")]
    assert all((group.window is not None) == shares_memory(world) for group in groups)
    for lengths in ([5, MIDDLE, LONG, 64, 5, MIDDLE], [64] * 40):
        expected, works = [], []
        for number, length in enumerate(lengths):
            parts = [values(rank + number, length, torch.float32) for rank in range(world.size)]
            for group in groups:
                found, scattered = parts[world.rank].clone(), parts[world.rank].clone()
                mine = shard(length, world.size, world.rank)
                works.append(group.start_all_reduce(found))
                works.append(group.start_reduce_scatter(scattered[mine], scattered))
                total = reduced(parts)
                expected += [(found, total), (scattered[mine], total[mine])]
        for work in reversed(works):
            work.wait()
        for found, total in expected:
            assert_same(found, total)


@pytest.mark.parametrize("late", [0, -1])
def test_who_has_waited_for_short_ones_may_block_outside(world: World, late: int) -> None:
    """A rank that has waited moves no more data; the others wait, and then make the same call."""
    group = world.group("data", range(world.size))
    everyone = range(world.size)
    for lengths in ([64], [MIDDLE], [64, MIDDLE, 5, MIDDLE]):
        tensors = [values(world.rank, length, torch.float32) for length in lengths]
        works = [group.start_all_reduce(tensor) for tensor in tensors]
        if world.rank == everyone[late]:
            time.sleep(0.1)
        for work in works:
            work.wait()
        world.unshare_memory(world.share_memory(everyone, "a test's memory", 64, 64), everyone)
        for length, tensor in zip(lengths, tensors, strict=True):
            assert_same(tensor, reduced(everyones(group, length, torch.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_broadcast_from_every_root(world: World, narrow: World, dtype: torch.dtype) -> None:
    for where in (world, narrow):
        for root in range(where.size):
            for length in (0, 1, 301):
                tensor = values(where.rank, length, dtype)
                where.everyone.broadcast(tensor, root)
                assert_same(tensor, values(root, length, dtype))


def test_broadcast_in_pieces(world: World) -> None:
    length = 700_001  # more than two pieces of the tree's pipeline
    tensor = values(world.rank, length, torch.float32)
    world.everyone.broadcast(tensor, world.size - 1)
    assert_same(tensor, values(world.size - 1, length, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_all_to_all_with_sizes_of_all_kinds(
    world: World, narrow: World, dtype: torch.dtype
) -> None:
    for where in (world, narrow):
        size, rank = where.size, where.rank
        lengths = [(rank * 3 + to * 5) % 17 for to in range(size)]  # some are 0
        inputs = [values(rank * size + to, length, dtype) for to, length in enumerate(lengths)]
        outputs = [torch.zeros((source * 3 + rank * 5) % 17, dtype=dtype) for source in range(size)]
        where.everyone.all_to_all(outputs, inputs)
        for source, output in enumerate(outputs):
            assert_same(output, values(source * size + rank, (source * 3 + rank * 5) % 17, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_messages_arrive_in_the_order_in_which_they_were_started(
    world: World, narrow: World, dtype: torch.dtype
) -> None:
    for where in (world, narrow):
        group = where.everyone
        if group.size == 1:
            continue
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        lengths = (301, 0, 3, 40)
        received = [torch.zeros(length, dtype=dtype) for length in lengths]
        works = [group.start_receive(tensor, before) for tensor in received]
        works += [
            group.start_send(values(group.rank + number, length, dtype), after)
            for number, length in enumerate(lengths)
        ]
        for work in reversed(works):
            work.wait()
        for number, tensor in enumerate(received):
            assert_same(tensor, values(before + number, lengths[number], dtype))


def test_blocking_send_and_receive(world: World) -> None:
    group, tensor = world.everyone, torch.zeros(LONG)
    for receiver in range(1, group.size):
        if group.rank == 0:
            group.send(values(receiver, LONG, torch.float32), receiver)
        elif group.rank == receiver:
            group.receive(tensor, 0)
            assert_same(tensor, values(receiver, LONG, torch.float32))


@pytest.mark.ranks(2)
def test_a_small_message_is_not_done_before_its_receiver_has_come(world: World) -> None:
    group, tensor = world.everyone, torch.arange(3.0)
    if group.rank == 0:
        work = group.start_send(tensor, 1)
        for _ in range(200):
            group.connection.progress.advance()
        assert not work.done
    group.barrier()
    if group.rank == 0:
        work.wait()
    else:
        group.receive(tensor.zero_(), 0)
    assert tensor.tolist() == [0, 1, 2]


def test_nan_and_infinity_arrive(world: World, narrow: World) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    for where in (world, narrow):
        for dtype in FLOATS:
            for length in (4, 80_000):
                tensor = (
                    special.to(dtype).repeat(length // 4)
                    if where.rank == where.size - 1
                    else torch.ones(length, dtype=dtype)
                )
                where.everyone.all_reduce(tensor)
                assert tensor[0].isnan()
                assert tensor[1] == float("inf")
                assert tensor[-2] == -float("inf")
                assert tensor[-1] == where.size
                if where is narrow:
                    break


def test_half_precision_is_rounded_once(world: World) -> None:
    """1 + 2^-9 + 2^-9 + ...: summed in bf16 the small parts would all be lost."""
    for length in (1, LONG):
        tensor = torch.full((length,), 1.0 if world.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
        world.everyone.all_reduce(tensor)
        assert tensor[0] == torch.tensor(1 + (world.size - 1) * 2.0**-9).bfloat16()


def test_the_same_bits_in_every_run_and_under_every_library(world: World) -> None:
    """The checksums were computed by one process without MPI."""
    known = {1: 1562103883, 2: 2215577548, 3: 2681625937, 4: 914340126}
    for _ in range(3):
        tensor = values(world.rank, LONG, torch.float32)
        world.everyone.all_reduce(tensor)
        if world.size in known:
            assert zlib.crc32(tensor.numpy().tobytes()) == known[world.size]


def test_a_large_all_reduce_does_not_wait_behind_what_others_start_later(world: World) -> None:
    """Rank 0 has both in flight; the others finish the first before they start the second."""
    everyone = world.everyone
    summed, own = torch.ones(300_000), torch.full((100_000,), float(world.rank))
    gathered = torch.empty(100_000 * world.size)
    if world.rank == 0:
        works = [everyone.start_all_reduce(summed), everyone.start_all_gather(gathered, own)]
        for work in works:
            work.wait()
    else:
        everyone.all_reduce(summed)
        everyone.all_gather(gathered, own)
    assert bool((summed == world.size).all())
    assert all(bool((part == rank).all()) for rank, part in enumerate(gathered.split(100_000)))


def test_many_operations_of_many_groups_under_way(world: World, narrow: World) -> None:
    """Every rank waits in another order; more reductions are started than there are buffers for."""
    for where in (world, narrow):
        pairs = [
            tuple(range(first, min(first + 2, where.size))) for first in range(0, where.size, 2)
        ]
        groups = [
            where.everyone,
            where.group("data", next(pair for pair in pairs if where.rank in pair)),
        ]
        length = 20_000 if where is world else 500
        tensors, expected, works = [], [], []
        for number in range(8):
            group = groups[number % 2]
            parts = [values(rank + number, length, torch.float32) for rank in group.ranks]
            tensors.append(parts[group.rank].clone())
            expected.append(reduced(parts))
            works.append(group.start_all_reduce(tensors[-1]))
            works.append(group.start_barrier())
        for step in range(len(works)):
            works[(step * 5 + where.rank * 3) % len(works)].wait()
        for tensor, sum_of_all in zip(tensors, expected, strict=True):
            assert_same(tensor, sum_of_all)


def test_tensors_of_any_shape_and_parameters(world: World) -> None:
    tensor = torch.nn.Parameter(torch.full((3, 5, 7), float(world.rank)))
    world.everyone.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3, 5, 7), float(sum(range(world.size)))))


def test_misuse_is_said(world: World) -> None:
    group = world.everyone
    with pytest.raises(AssertionError, match="only contiguous"):
        group.all_reduce(torch.zeros(4, 4).t())
    with pytest.raises(AssertionError, match="unknown; there are sum, max, min"):
        group.all_reduce(torch.zeros(4), "mean")
    with pytest.raises(AssertionError, match="booleans have no sum"):
        group.all_reduce(torch.zeros(4, dtype=torch.bool))
    with pytest.raises(AssertionError, match="of 10 elements over"):
        group.all_gather(torch.zeros(10), torch.zeros(11))
    with pytest.raises(AssertionError, match="cannot be written to"):
        group.reduce_scatter(torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    with pytest.raises(AssertionError, match="to itself"):
        group.send(torch.zeros(1), group.rank)
    with pytest.raises(AssertionError, match="this one is on meta"):
        group.all_reduce(torch.zeros(1, device="meta"))
    group.barrier()  # nothing of the above is under way


def test_the_ledger_counts_by_the_convention(world: World) -> None:
    tried = world.part(range(world.size), ranks_per_node=2)
    group, size = tried.everyone, tried.size
    tensor = torch.zeros(size * 1000)
    mine = shard(tensor.numel(), size, group.rank)
    group.all_reduce(tensor)
    group.reduce_scatter(tensor[mine], tensor)
    group.all_gather(tensor, tensor[mine])
    group.all_to_all([torch.zeros(10) for _ in range(size)], [torch.zeros(10) for _ in range(size)])
    found = tried.ledger.as_dict()["world"]
    sent = (size - 1) * 4000
    assert {name: entry["bytes"] for name, entry in found.items()} == {
        "all_reduce": 2 * sent,
        "reduce_scatter": sent,
        "all_gather": sent,
        "all_to_all": (size - 1) * 40,
    }
    neighbours = tried.local_size - 1
    for entry in found.values():
        assert entry["count"] == 1
        assert entry["inside"] * max(1, size - 1) == entry["bytes"] * neighbours
        assert entry["inside"] + entry["between"] == entry["bytes"]
    tried.close()


def test_the_ledger_enters_messages_at_the_sender(world: World) -> None:
    tried = world.part(range(world.size), ranks_per_node=1)
    if tried.size > 1 and tried.rank < 2:
        pair = tried.group("pipeline", [0, 1])
        pair.send(torch.zeros(10), 1) if pair.rank == 0 else pair.receive(torch.zeros(10), 0)
        operation, sent = ("send", 40) if pair.rank == 0 else ("receive", 0)
        entry = tried.ledger.as_dict()["pipeline"][operation]
        assert (entry["bytes"], entry["between"], entry["count"]) == (sent, sent, 1)
        assert entry["seconds"] > 0
    tried.close()


def test_collectives_that_differ_in_anything_have_codes_of_their_own(world: World) -> None:
    """By which ranks that do not fit together are found; made once, and told apart ever after."""
    kinds = [
        (operation, torch.ones(length, dtype=dtype), detail)
        for operation in ("all_reduce", "broadcast")
        for length, dtype in ((8, torch.float32), (4, torch.float32), (4, torch.float64))
        for detail in ("sum", "max")
    ]
    codes = [[world.everyone._next(*kind)[1] for kind in kinds] for _ in range(2)]
    assert codes[0] == codes[1]
    assert len(set(codes[0])) == len(kinds)
