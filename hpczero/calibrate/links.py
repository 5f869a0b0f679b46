"""Measured links: messages and collectives of hpczero's groups, inside a node and between nodes.

Inside a node the group of all its ranks counts, on all nodes at once: a training job never leaves
its neighbours alone. Between nodes one rank of each node gives what a rank alone gets, and all of
them at once what the node's adapters carry. Nodes that `ranks_per_node` makes of one computer have
no network between them: it is not measured, and said.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import get_args

import torch

from hpczero.calibrate.findings import Beside, Moved, Sending, Timing
from hpczero.calibrate.turns import Action, Turns
from hpczero.comm.group import Group
from hpczero.comm.mpi_backend import shard
from hpczero.comm.progress import Work
from hpczero.comm.shared_memory import NodeWindow
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.planner.cluster import OperationName

OPERATIONS = get_args(OperationName)
_SIZES = (1 << 12, 1 << 23, 1 << 17, 1 << 20, 1 << 25, 1 << 15, 1 << 28)  # bytes, in turns
_LARGEST_ON_CPU = 1 << 25
_LARGE = 1 << 22  # bytes, to see how groups hold each other up
_WINDOW = 32 << 20
_EXCHANGED = 1 << 20  # bytes, beside computing, or more
_WIDTH = {"cpu": 256, "cuda": 2048}  # of the products meanwhile
_FEWEST_PRODUCTS = 8  # that take as long as an exchange
_LONGER = 2  # times as an exchange


def inside(turns: Turns, dtype: torch.dtype) -> list[Sending]:
    """Time the operations of each node's ranks, on all nodes at once. Collective."""
    group = _of_node(turns.world)
    return _operations(turns, group, dtype) if group else []


def beside_inside(turns: Turns, dtype: torch.dtype) -> list[Beside]:
    """Time exchanges of each node's ranks beside their computing. Collective."""
    group = _of_node(turns.world)
    return _beside(turns, group, dtype) if group else []


def pairs(turns: Turns, dtype: torch.dtype) -> tuple[Timing, Timing] | None:
    """Time a pair of neighbours alone, and all pairs of the nodes at once. Collective.

    None if a node has fewer than four ranks.
    """
    world = turns.world
    if _fewest(world) < 4:
        return None
    mine = _neighbours(world)
    first = world.local_rank // 2 * 2
    of_pair = mine[first : first + 2]
    group = world.group("pair", of_pair) if len(of_pair) == 2 else None
    action = _action(group, "all_gather", _LARGE, dtype) if group else None
    paired = [rank for rank, has in enumerate(world.all_gather_objects(bool(group))) if has]
    alone = world.broadcast_object(list(of_pair))
    return turns.of(action, alone, together=True), turns.of(action, paired, together=True)


def between(turns: Turns, dtype: torch.dtype, at_once: bool) -> list[Sending]:
    """Time one rank of each node, or as many groups of such ranks as there can be. Collective."""
    world = turns.world
    if not has_network(world):
        return []
    return _operations(turns, _of_nodes(world, _fewest(world) if at_once else 1), dtype)


def beside_between(turns: Turns, dtype: torch.dtype) -> list[Beside]:
    """Time exchanges of ranks on all nodes beside their computing, as many at once. Collective."""
    world = turns.world
    return _beside(turns, _of_nodes(world, _fewest(world)), dtype) if has_network(world) else []


def has_network(world: World) -> bool:
    """Return True if the nodes are different hosts."""
    return max(world.node_of_rank) > 0 and not is_simulated(world)


def is_simulated(world: World) -> bool:
    """Return True if two nodes are parts of one host."""
    places = set(zip(world.hosts, world.node_of_rank, strict=True))
    return len(places) > len({host for host, _ in places})


def window(turns: Turns) -> Moved | None:
    """Time reads of a neighbour's memory through a window. Collective.

    None where ranks have no neighbours, or the node has too little memory to share.
    """
    world = turns.world
    if _fewest(world) < 2 or world.device.has_queues:
        return None
    shared = None
    with suppress(InputError):
        shared = NodeWindow.allocate(world, _neighbours(world), _WINDOW)
    moved = None
    if all(world.all_gather_objects(shared is not None)):
        assert shared
        moved = Moved(_WINDOW, turns.of(_reading(shared)))
    if shared:
        shared.close()
    return moved


def _reading(shared: NodeWindow) -> Action:
    """Write this rank's part, and return a copy of its neighbour's to its own memory."""
    shared.part(shared.index).fill_(1)
    shared.post(0, 1)
    shared.wait(0, 1)
    theirs = shared.part((shared.index + 1) % len(shared.ranks))
    own = torch.empty_like(theirs)
    return lambda: own.copy_(theirs)


def _operations(turns: Turns, group: Group | None, dtype: torch.dtype) -> list[Sending]:
    """Time all operations; ranks without a group wait. Collective over the world."""
    world = turns.world
    found: list[Sending] = []
    ranks = [rank for rank, has in enumerate(world.all_gather_objects(bool(group))) if has]
    largest = max(_SIZES) if world.device.has_queues else _LARGEST_ON_CPU
    of_group = world.broadcast_object(group.size if group else 0)
    for size in (each for each in _SIZES if each <= largest):
        for operation in OPERATIONS:
            if turns.is_over() and len({one.bytes for one in found}) > 1:
                return found
            action = _action(group, operation, size, dtype) if group else None
            timing = turns.of(action, ranks, together=True)
            found.append(Sending(operation, size, _sent(operation, size, of_group), timing))
    return found


def _sent(operation: str, size: int, ranks: int) -> int:
    """Return the bytes that a rank sends, by the ledger's convention (`comm/trace.py`)."""
    if operation == "send":
        return size
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) // ranks


def _action(group: Group, operation: str, size: int, dtype: torch.dtype) -> Action:
    """Return the operation on `size` bytes; a message goes round the group."""
    if operation != "send":
        return partial(_waited_for, _start(group, operation, size, dtype))
    leaving = torch.ones(size // dtype.itemsize, dtype=dtype, device=group.device.torch)
    arriving = torch.empty_like(leaving)

    def pass_on() -> None:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sending = group.start_send(leaving, after)
        group.receive(arriving, before)
        sending.wait()

    return pass_on


def _start(group: Group, operation: str, size: int, dtype: torch.dtype) -> Callable[[], Work]:
    """Return what starts the collective on `size` bytes."""
    elements = size // dtype.itemsize
    whole = torch.ones(elements, dtype=dtype, device=group.device.torch)
    cut = shard(elements, group.size, group.rank)
    part = torch.ones(cut.stop - cut.start, dtype=dtype, device=group.device.torch)
    starts: dict[str, Callable[[], Work]] = {
        "all_reduce": lambda: group.start_all_reduce(whole),
        "reduce_scatter": lambda: group.start_reduce_scatter(part, whole),
        "all_gather": lambda: group.start_all_gather(whole, part),
    }
    return starts[operation]


def _beside(turns: Turns, group: Group | None, dtype: torch.dtype) -> list[Beside]:
    """Time exchanges as an engine has them: a layer computes, then a poll. Collective.

    None where the largest exchange is shorter than a few products.
    """
    world = turns.world
    ranks = [rank for rank, has in enumerate(world.all_gather_objects(bool(group))) if has]
    width = _WIDTH[world.device.kind]
    # a processor without bf16 products takes longer for one than for the exchange
    factor = dtype if world.device.has_queues else torch.float32
    matrix = torch.ones(width, width, dtype=factor, device=world.device.torch)
    product = torch.empty_like(matrix)

    def compute(times: int, work: Work | None = None) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)
            if work:
                work.poll()
        if work:
            work.wait()

    one = turns.of(partial(compute, 1), ranks).median
    found: list[Beside] = []
    for operation in ("reduce_scatter", "all_gather"):
        if found and turns.is_over():
            break
        start, alone = _long_enough(turns, group, ranks, operation, dtype, _FEWEST_PRODUCTS * one)
        times = round(_LONGER * alone.median / one)
        if times < _FEWEST_PRODUCTS:
            break
        computing = turns.of(partial(compute, times), ranks, together=True)
        action = partial(_begun, start, partial(compute, times)) if start else None
        both = turns.of(action, ranks, together=True, own_threads=True)
        found.append(Beside(operation, alone, computing, both))
    return found


def _begun(start: Callable[[], Work], compute: Callable[[Work], None]) -> None:
    compute(start())


def _waited_for(start: Callable[[], Work]) -> None:
    start().wait()


def _long_enough(
    turns: Turns,
    group: Group | None,
    ranks: Sequence[int],
    operation: str,
    dtype: torch.dtype,
    seconds: float,
) -> tuple[Callable[[], Work] | None, Timing]:
    """Return what starts an exchange of so many seconds or more, and its time. Collective."""
    size = _EXCHANGED
    while True:
        start = _start(group, operation, size, dtype) if group else None
        alone = turns.of(partial(_waited_for, start) if start else None, ranks, together=True)
        if alone.median >= seconds or size >= _LARGEST_ON_CPU:
            return start, alone
        size *= 2


def _of_node(world: World) -> Group | None:
    """Return the group of this node's ranks, if all nodes have several. Collective."""
    return world.group("node", _neighbours(world)) if _fewest(world) > 1 else None


def _of_nodes(world: World, groups: int) -> Group | None:
    """Return the group of a rank of each node, if this rank is in one of so many. Collective."""
    if world.local_rank >= groups:
        return None
    nodes = range(max(world.node_of_rank) + 1)
    return world.group("nodes", [_ranks_of(world, node)[world.local_rank] for node in nodes])


def _neighbours(world: World) -> Sequence[int]:
    return _ranks_of(world, world.node)


def _ranks_of(world: World, node: int) -> list[int]:
    return [rank for rank, at in enumerate(world.node_of_rank) if at == node]


def _fewest(world: World) -> int:
    """Return the ranks of the emptiest node."""
    return min(map(world.node_of_rank.count, set(world.node_of_rank)))
