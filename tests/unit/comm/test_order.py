"""One order of the operations of two groups, whatever order each rank starts them in: without
MPI.
"""

import random
from collections import deque
from typing import Any

import pytest

from hpczero.comm.mpi_backend import Order


class Status:
    rank = channel = -1

    def Get_source(self) -> int:
        return self.rank

    def Get_tag(self) -> int:
        return self.channel


class Sent:
    def Test(self) -> bool:
        return True

    Waitall = staticmethod(lambda requests: True)


class Library:
    """Ranks whose messages arrive late, in order between any two of them."""

    ANY_SOURCE = ANY_TAG = -1
    BYTE = "bytes"
    Status = Status
    Request = Sent

    def __init__(self, ranks: int, chance: random.Random) -> None:
        self.ranks, self.chance = ranks, chance
        pairs = [(source, to) for source in range(ranks) for to in range(ranks)]
        self.on_the_way: dict[tuple[int, int], deque[int]] = {pair: deque() for pair in pairs}


class Communicator:
    def __init__(self, library: Library, rank: int) -> None:
        self.library, self.rank, self.size, self.is_free = library, rank, library.ranks, False

    def Isend(self, message: list[Any], to: int, channel: int) -> Sent:
        assert not message[0]
        self.library.on_the_way[self.rank, to].append(channel)
        return Sent()

    def Iprobe(self, source: int, channel: int, status: Status) -> bool:
        for rank in range(self.size):
            if self.library.on_the_way[rank, self.rank] and self.library.chance.random() < 0.5:
                status.rank, status.channel = rank, self.library.on_the_way[rank, self.rank][0]
                return True
        return False

    def Recv(self, message: list[Any], source: int, channel: int) -> None:
        assert self.library.on_the_way[source, self.rank].popleft() == channel

    def Free(self) -> None:
        self.is_free = True


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_carry_out_the_same_order_and_none_is_stuck(seed: int) -> None:
    chance = random.Random(seed)
    ranks, channels, each = chance.choice([2, 3, 5]), chance.choice([2, 3]), 8
    library = Library(ranks, chance)
    orders, communicators = [Order(library) for _ in range(ranks)], []
    for rank, order in enumerate(orders):
        for channel in range(1, channels):
            communicators.append(Communicator(library, rank))
            assert order.add(lambda: communicators[-1]) == channel
    programs = [[channel for channel in range(channels) for _ in range(each)] for _ in orders]
    for program in programs:
        chance.shuffle(program)
    under_way: list[list[tuple[int, object]]] = [[] for _ in orders]
    carried_out: list[list[int]] = [[] for _ in orders]
    for _ in range(20_000):
        rank = chance.randrange(ranks)
        if programs[rank] and chance.random() < 0.3:
            channel = programs[rank].pop(0)
            under_way[rank].append((channel, orders[rank].start(channel)))
        for channel, turn in list(under_way[rank]):
            if orders[rank].is_next(channel, turn):
                orders[rank].done(channel, turn)
                under_way[rank].remove((channel, turn))
                carried_out[rank].append(channel)
    assert all(len(done) == channels * each for done in carried_out), carried_out
    assert all(done == carried_out[0] for done in carried_out)
    for order in orders:
        order.close()
    assert sum(communicator.is_free for communicator in communicators) == ranks


def test_one_channel_goes_in_the_order_in_which_it_starts() -> None:
    order = Order(None)
    first, second, third = (order.start(0) for _ in range(3))
    assert order.is_next(0, first)
    assert not order.is_next(0, second)
    order.done(0, second)  # it has failed
    order.done(0, first)
    assert order.is_next(0, third)
    order.close()


def test_an_operation_has_no_place_before_all_ranks_have_started_it() -> None:
    """Rank 1 may wait for an operation before it starts one that rank 0 has started long ago."""
    library = Library(2, random.Random(1))
    orders = [Order(library) for _ in range(2)]
    for rank, order in enumerate(orders):
        order.add(lambda rank=rank: Communicator(library, rank))
    early = orders[0].start(0)
    assert not any(orders[0].is_next(0, early) for _ in range(50))
    turns = [order.start(1) for order in orders]
    for rank, order in enumerate(orders):
        assert any(order.is_next(1, turns[rank]) for _ in range(50)), rank
