"""The data ranks of one node keep one copy of the weights together and read each other's gradients where they lie; only sums of a node travel.

Protocol of a reduction, for ranks with R on their node:
1. READY: every rank's tensor is complete in its block. All of the node wait for that.
2. Each rank sums slice i of R of every shard that belongs to another node (i is its place on the node) and sends it to the owner; the owner
   of a shard adds up the R pieces of its own node, in place, and the sums of the other nodes, in the order of the nodes.
3. DONE: nobody of the node reads the tensor any more.
A gather sends each shard once to every other node, one slice to each of its ranks, which write it where all of the node read it; WRITTEN ends it.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hpczero.comm.connection import BLOCK
from hpczero.comm.group import Group
from hpczero.comm.progress import Progress, Steps, Work
from hpczero.comm.shared_memory import PAGE, SharedBlocks
from hpczero.comm.status import Status, WaitPoint
from hpczero.device import CPU

if TYPE_CHECKING:
    from hpczero.comm.world import World

READY, DONE, WRITTEN = range(3)


class LocalSum(Protocol):
    """The arithmetic of a reduction. `parts` are what the ranks (places in the group) have for the same elements."""

    def into_shard(self, window: slice, parts: list[Tensor], ranks: Sequence[int]) -> None:
        """The sum for elements `window` of the own shard."""

    def of_node(self, first: int, parts: list[Tensor], ranks: Sequence[int], out: Tensor) -> None:
        """The sum for the elements of the tensor that begin at `first`, rounded to `out`."""


class NodeGroup:
    """`Group` with one copy per node. `allocate` comes first; reduced and gathered tensors lie in its blocks."""

    shared = True

    def __init__(self, world: "World", group: Group) -> None:
        self.group, self.rank, self.size, self.device = group, group.rank, group.size, CPU
        nodes = [world.node_of_rank[rank] for rank in group.ranks]
        self._world = world
        self._places = {
            node: [place for place in range(self.size) if nodes[place] == node]
            for node in sorted(set(nodes))
        }
        self.here = self._places[nodes[self.rank]]
        self.neighbours, self.local = len(self.here), self.here.index(self.rank)
        self._own_node = nodes[self.rank]
        self._elsewhere = [place for place in range(self.size) if place not in self.here]
        self._window: NodeWindow | None = None
        self._numbers, self._posted = [0, 0, 0], [0, 0, 0]

    def allocate(self, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, Tensor]:
        """Blocks in the node's memory by name: one for all ranks of the node (`once`), one for each rank (`each`)."""
        size = sum(each.values()) + (sum(once.values()) if self.local == 0 else 0)
        self._window = NodeWindow.allocate(
            self._world, [self.group.ranks[place] for place in self.here], size
        )
        parts = dict.fromkeys(each, self.local) | dict.fromkeys(once, 0)
        taken: dict[int, int] = {}
        blocks = {}
        for name, amount in chain(each.items(), once.items()):
            start = taken.get(parts[name], sum(each.values()) if name in once else 0)
            # .data: autograd watches each block for itself (it counts the writes to all views of one tensor together)
            blocks[name] = self._window.part(parts[name])[start : start + amount].data
            taken[parts[name]] = start + amount
        return blocks

    def reduce(self, tensor: Tensor, sums: LocalSum) -> Work:
        shard, width = tensor.numel() // self.size, tensor.element_size()
        windows = self._windows(shard, width) if self._elsewhere else []
        parts = [_cut(window.stop - window.start, len(self.here), self.local) for window in windows]
        between = len(self._elsewhere) * sum(part.stop - part.start for part in parts) * width
        read = (len(self.here) - 1) * (shard * width + between)
        return self.group.start_steps(
            "reduce_scatter", self._reduce(tensor, sums, self.group.next_tag()), between, read
        )

    def node_barrier(self) -> Work:
        """All of the node have written what they had to write in its memory."""
        return self.group.start_steps("barrier", self._settle(), 0, 0)

    def gather(self, tensor: Tensor, copies: bool = False, name: str = "") -> Work:
        """Every rank's own shard comes to all: once per node, or where each has a tensor of its own (`copies`), to each."""
        between = (len(self._places) - 1) * tensor.numel() // self.size * tensor.element_size()
        read = (
            (self.size - 1) * tensor.numel() // self.size * tensor.element_size() if copies else 0
        )
        return self.group.start_steps(
            "all_gather", self._gather(tensor, copies, self.group.next_tag()), between, read
        )

    def all_gather(self, values: Tensor) -> Tensor:
        return self.group.stack(values)

    def written(self, elements: int, sharded: bool) -> slice:
        """Which elements of the weights this rank writes: its shard, or its slice of all of them where every rank has all results."""
        if sharded:
            return slice(self.rank * elements // self.size, (self.rank + 1) * elements // self.size)
        return _cut(elements, len(self.here), self.local)

    def close(self) -> None:
        if self._window:
            self._window.close()

    def _reduce(self, tensor: Tensor, sums: LocalSum, tag: int) -> Steps:
        number = self._number(READY)
        yield from self._post(READY, number)
        yield from self._reached(READY, number)
        yield from self._turn(DONE, number)
        pieces = [self._theirs(index, tensor) for index in range(len(self.here))]
        if self._elsewhere:
            yield from self._reduce_between(pieces, sums, tag)
        else:
            length = tensor.numel() // self.size
            sums.into_shard(
                slice(0, length),
                [piece[self._shard(tensor, self.rank)] for piece in pieces],
                self.here,
            )
        yield from self._post(DONE, number)
        yield from self._reached(DONE, number)

    def _reduce_between(self, pieces: list[Tensor], sums: LocalSum, tag: int) -> Steps:
        length, dtype = pieces[0].numel() // self.size, pieces[0].dtype
        buffer = yield from self.group.connection.borrow(self._least(length, dtype.itemsize))
        try:
            for window in self._windows(length, dtype.itemsize):
                yield from self._round(pieces, window, buffer.view(dtype), sums, tag)
        finally:
            self.group.connection.give_back(buffer)

    def _windows(self, length: int, width: int) -> list[slice]:
        """Of each shard, what a round is about: as many elements, of this width, as a buffer of constant size has room for."""
        room = self.group.connection.room(self._least(length, width)) // width // self._pieces
        step = max(1, length if room >= length else room // BLOCK * BLOCK)
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]

    @property
    def _pieces(self) -> int:
        """That lie in the buffer in a round: sums for the other nodes' ranks, and the other nodes' sums."""
        return len(self._elsewhere) + len(self._places) - 1

    def _least(self, length: int, width: int) -> int:
        return self._pieces * min(BLOCK, length) * width

    def _round(
        self, pieces: list[Tensor], window: slice, buffer: Tensor, sums: LocalSum, tag: int
    ) -> Steps:
        length, count = pieces[0].numel() // self.size, window.stop - window.start
        free = iter(buffer[: self._pieces * count].split(count)) if count else iter(())
        mine = _cut(count, len(self.here), self.local)
        requests: list[Any] = []
        arriving = {node: next(free) for node in self._places if node != self._own_node}
        for node, whole in arriving.items():
            for index, place in enumerate(self._places[node]):
                requests += self.group.connection.receive(
                    whole[_cut(count, len(self._places[node]), index)], place, tag
                )
        for place in self._elsewhere:
            first = place * length + window.start + mine.start
            out = next(free)[: mine.stop - mine.start]
            sums.of_node(
                first, [piece[first : first + out.numel()] for piece in pieces], self.here, out
            )
            requests += self.group.connection.send(out, place, tag)
        yield requests
        own = slice(self.rank * length + window.start, self.rank * length + window.stop)
        parts: list[tuple[Tensor, int]] = []
        for node, places in self._places.items():
            parts += (
                [(arriving[node], places[0])]
                if node in arriving
                else list(zip((piece[own] for piece in pieces), places, strict=True))
            )
        sums.into_shard(window, [part for part, _ in parts], [place for _, place in parts])

    def _gather(self, tensor: Tensor, copies: bool, tag: int) -> Steps:
        number = self._number(WRITTEN)
        own, requests = tensor[self._shard(tensor, self.rank)], []
        for place in self._elsewhere:
            requests += self.group.connection.receive(
                self._slice_for(tensor, place, self.local), place, tag
            )
        for node, places in self._places.items():
            if node != self._own_node:
                for index, place in enumerate(places):
                    requests += self.group.connection.send(
                        own[_cut(own.numel(), len(places), index)], place, tag
                    )
        if requests:
            yield requests
        yield from self._post(WRITTEN, number)
        yield from self._reached(WRITTEN, number)
        if copies:
            for index, place in enumerate(self.here):
                theirs = self._theirs(index, tensor)
                if index != self.local:
                    for part in [self._shard(tensor, place), *self._foreign_slices(tensor, index)]:
                        tensor[part] = theirs[part]

    def _settle(self) -> Steps:
        number = self._number(WRITTEN)
        yield from self._post(WRITTEN, number)
        yield from self._reached(WRITTEN, number)

    def _foreign_slices(self, tensor: Tensor, index: int) -> Iterator[slice]:
        """What the node's rank `index` has received of other nodes' shards."""
        for place in self._elsewhere:
            shard = self._shard(tensor, place)
            part = _cut(shard.stop - shard.start, len(self.here), index)
            yield slice(shard.start + part.start, shard.start + part.stop)

    def _slice_for(self, tensor: Tensor, place: int, index: int) -> Tensor:
        shard = tensor[self._shard(tensor, place)]
        return shard[_cut(shard.numel(), len(self.here), index)]

    def _shard(self, tensor: Tensor, place: int) -> slice:
        length = tensor.numel() // self.size
        return slice(place * length, (place + 1) * length)

    def _theirs(self, index: int, tensor: Tensor) -> Tensor:
        """The tensor that the node's rank `index` has at the place where `tensor` lies in the own block."""
        assert self._window is not None
        start = tensor.data_ptr() - self._window.part(self.local).data_ptr()
        return self._window.part(index)[
            start : start + prod(tensor.shape) * tensor.element_size()
        ].view(tensor.dtype)

    def _number(self, counter: int) -> int:
        """Operations are numbered as they start, equally on all ranks."""
        self._numbers[counter] += 1
        return self._numbers[counter]

    def _turn(self, counter: int, number: int) -> Steps:
        """Operations under way may overtake each other, but a counter says that *all* up to its value have come so far."""
        while self._posted[counter] != number - 1:
            yield ()

    def _post(self, counter: int, number: int) -> Steps:
        assert self._window is not None
        yield from self._turn(counter, number)
        self._posted[counter] = number
        self._window.post(counter, number)

    def _reached(self, counter: int, number: int) -> Steps:
        assert self._window is not None
        while not self._window.reached(counter, number):
            yield ()


def _cut(length: int, parts: int, index: int) -> slice:
    """Part `index` of `parts`, in whole cache lines."""
    step = -(-length // (parts * 64)) * 64
    return slice(min(index * step, length), min((index + 1) * step, length))


# Memory that the ranks of one node share: every rank sees the others' blocks in place, and counters tell when something is there.
#
# The protocol: write into a block, `post` a counter of one's own; the others `wait` for the value, then read the block where it lies. Posting
# makes what was written before it visible, and what is read after a wait is what was posted. Counters start at 0 and only grow.
if TYPE_CHECKING:
    from hpczero.comm.world import World

_LINE = 64  # bytes: a counter has a cache line to itself, so that a rank that waits does not slow down one that posts another
_STRIDE = _LINE // 8
_EAGER = 0.002  # seconds of a wait in which the rank only lets others go first; then it sleeps between two looks
_NAP = 0.0001


class NodeWindow:
    """Build it with `NodeWindow.allocate`. `.ranks` share it; `.index` is this rank's place among them."""

    def __init__(
        self, name: str, world: "World", ranks: Sequence[int], shared: SharedBlocks, counters: int
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(world.rank)
        head = counters * _LINE  # each rank's counters lie before its part
        self._counters = [block[:head].cast("q") for block in shared.blocks]
        self._parts = [_tensor(block[_up(head) :]) for block in shared.blocks]
        self._shared = shared
        self._world = world
        self._status: Status = world.status
        self._progress: Progress = world.progress

    @classmethod
    def allocate(
        cls,
        world: "World",
        ranks: Sequence[int],
        size: int,
        counters: int = 64,
        name: str = "shared",
    ) -> "NodeWindow":
        """Collective over `ranks`, which share a node: each contributes a part of `size` bytes, of its own choice. InputError on all of
        them if the node has not that much to share.
        """
        head = counters * _LINE
        return cls(
            name,
            world,
            ranks,
            world.share_memory(ranks, f"window {name}", _up(head) + size, head),
            counters,
        )

    def part(self, index: int) -> Tensor:
        """The part of `ranks[index]` as bytes, beginning at a page. It takes up room only where it has been written to, by preference of
        its owner (the first to touch a page decides which memory of the node it lies in); nobody may rely on what is in it before.
        """
        return self._parts[index]

    def post(self, counter: int, value: int) -> None:
        """Set a counter of this rank."""
        self._shared.order()
        self._counters[self.index][counter * _STRIDE] = value

    def seen(self, index: int, counter: int) -> int:
        """What `ranks[index]` has posted last."""
        value = self._counters[index][counter * _STRIDE]
        self._shared.order()
        return value

    def reached(self, counter: int, value: int) -> bool:
        """Whether all ranks' counters are at `value` or beyond."""
        at = counter * _STRIDE
        for counters in self._counters:
            if counters[at] < value:
                return False
        self._shared.order()
        return True

    def wait(self, counter: int, value: int) -> None:
        """Until all have reached it. Messages under way go on meanwhile, and the core is left to others."""
        if self.reached(counter, value):
            return
        label = f"counter {counter} of window {self.name} to reach {value}"
        place = WaitPoint(label.encode()[:64], ranks=self._world.numbers(self.ranks))
        self._status.waits(place, lambda: self._world.numbers(self.missing(counter, value)))
        patience = time.monotonic() + _EAGER
        try:
            while not self.reached(counter, value):
                if not self._progress.advance():
                    os.sched_yield() if time.monotonic() < patience else time.sleep(_NAP)
        finally:
            self._status.goes_on()

    def missing(self, counter: int, value: int) -> list[int]:
        """The ranks that have not reached it."""
        return [
            rank
            for rank, counters in zip(self.ranks, self._counters, strict=True)
            if counters[counter * _STRIDE] < value
        ]

    def close(self) -> None:
        """Collective. Tensors on the parts must not be used any more."""
        self._parts.clear()
        self._counters.clear()
        self._world.unshare_memory(self._shared, self.ranks)


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _tensor(memory: memoryview) -> Tensor:
    return (
        torch.frombuffer(memory, dtype=torch.uint8)
        if len(memory)
        else torch.empty(0, dtype=torch.uint8)
    )
