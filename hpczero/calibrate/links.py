"""Measured links: messages and collectives of hpczero's groups, inside a node and between nodes.

Inside a node the group of all its ranks counts, on all nodes at once: a training job never leaves
its neighbours alone. Between nodes one rank of each node gives what a rank alone gets, and all of
them at once what the node's adapters carry. Nodes that `ranks_per_node` makes of one computer have
no network between them: it is not measured, and said.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import get_args

import torch

from hpczero.calibrate.findings import Moved, Sending, Timing
from hpczero.calibrate.turns import Action, Turns
from hpczero.comm.group import Group
from hpczero.comm.mpi_backend import shard
from hpczero.comm.shared_memory import NodeWindow
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.planner.cluster import OperationName

OPERATIONS = get_args(OperationName)
_SIZES = (1 << 12, 1 << 23, 1 << 17, 1 << 20, 1 << 25, 1 << 15, 1 << 28)  # bytes, in turns
_LARGEST_ON_CPU = 1 << 25
_LARGE = 1 << 22  # bytes, to see how groups hold each other up
_WINDOW = 32 << 20


def inside(turns: Turns, dtype: torch.dtype) -> list[Sending]:
    """Time the operations of each node's ranks, on all nodes at once. Collective."""
    world = turns.world
    group = world.group("node", _neighbours(world)) if _fewest(world) > 1 else None
    return _operations(turns, group, dtype) if group else []


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
    groups = _fewest(world) if at_once else 1
    group = None
    if world.local_rank < groups:
        nodes = range(max(world.node_of_rank) + 1)
        ranks = [_ranks_of(world, node)[world.local_rank] for node in nodes]
        group = world.group("nodes", ranks)
    return _operations(turns, group, dtype)


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
    elements = size // dtype.itemsize
    whole = torch.ones(elements, dtype=dtype, device=group.device.torch)
    cut = shard(elements, group.size, group.rank)
    part = torch.ones(cut.stop - cut.start, dtype=dtype, device=group.device.torch)

    def pass_on() -> None:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sending = group.start_send(whole, after)
        group.receive(arriving, before)
        sending.wait()

    arriving = torch.empty_like(whole) if operation == "send" else whole
    actions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole),
        "all_gather": lambda: group.all_gather(whole, part),
        "send": pass_on,
    }
    return actions[operation]


def _neighbours(world: World) -> Sequence[int]:
    return _ranks_of(world, world.node)


def _ranks_of(world: World, node: int) -> list[int]:
    return [rank for rank, at in enumerate(world.node_of_rank) if at == node]


def _fewest(world: World) -> int:
    """Return the ranks of the emptiest node."""
    return min(map(world.node_of_rank.count, set(world.node_of_rank)))
