"""Hosts and nodes of the ranks: what memory they share, how far apart their clocks are.

Every computer's monotonic clock begins when the computer was started. Rank 0 asks one rank of each
other computer for its time, several times: the answer was given between question and arrival, so
half of the shortest round trip bounds the error.
"""

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpczero import machine
from hpczero.comm.objects import ObjectCollectives
from hpczero.comm.progress import Requests
from hpczero.comm.shared_memory import SharedBlocks
from hpczero.errors import InputError

_QUESTIONS = 20
_NODES = "comm.ranks_per_node may not be more than the ranks of a host"


class Nodes(ObjectCollectives):
    """The ranks of a world and the nodes that they run on.

    `.hosts`: the host name of each rank; `.node_of_rank` numbers the nodes in the order of their
    first ranks; `.node`, `.local_rank`, `.local_size`: where this rank runs.
    """

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        ranks_per_node: int = 0,
        whole: "Nodes | None" = None,
        origin: Sequence[int] = (),
    ) -> None:
        """Collective. `ranks_per_node`: so many neighbouring ranks count as a node; 0: as found."""
        super().__init__(mpi, communicator, whole, origin)
        self._windows: list[SharedBlocks] = whole._windows if whole else []
        leader = self._node_leader(ranks_per_node)
        described = self.all_gather_objects([mpi.Get_processor_name(), leader])
        leaders = sorted({leader for _, leader in described})
        self.hosts: tuple[str, ...] = tuple(host for host, _ in described)
        self.node_of_rank = tuple(leaders.index(leader) for _, leader in described)
        self.node = self.node_of_rank[self.rank]
        self._neighbours = [rank for rank, at in enumerate(self.node_of_rank) if at == self.node]
        self.local_rank = self._neighbours.index(self.rank)
        self.local_size = len(self._neighbours)

    def share_memory(
        self, ranks: Sequence[int], name: str, size: int, cleared: int
    ) -> SharedBlocks:
        """Give each of `ranks`, which must share memory, a block that all of them see.

        Collective over `ranks`.
        """
        if len(hosts := {self.hosts[rank] for rank in ranks}) > 1:
            apart = f"ranks {', '.join(map(str, ranks))} share no memory"
            raise InputError(f"{name}: {apart}, being on {', '.join(sorted(hosts))}: {_NODES}")
        communicator = self._communicator_of(ranks, name)
        with self.progress.lock, self.status.waiting(f"making {name}", self.numbers(ranks)):
            shared = SharedBlocks(self._mpi, communicator, name, size, cleared, self._windows)
            communicator.Free()
        self._windows.append(shared)
        return shared

    def unshare_memory(self, shared: SharedBlocks, ranks: Sequence[int]) -> None:
        """Give the blocks back. Collective over their ranks."""
        self._windows.remove(shared)
        with self.progress.lock, self.status.waiting("the end of a window", self.numbers(ranks)):
            shared.close()

    def clock(self) -> "Clock":
        """Return how far this host's clock is ahead of rank 0's now. Collective."""
        computers = self.all_gather_objects(computer(self.hosts[self.rank]))
        compared: dict[int, Clock] = {0: Clock(0, 0)}
        asked = [computers.index(one) for one in dict.fromkeys(computers)][1:]
        self._run(compare_clocks(self._mpi, self._communicator, asked, compared), "clock")
        clocks = self.broadcast_object({str(rank): found for rank, found in compared.items()})
        return Clock(*clocks[str(computers.index(computers[self.rank]))])

    def _communicator_of(self, ranks: Sequence[int], name: str) -> Any:
        """Return a communicator of these ranks; collective over them and nobody else."""
        with self.progress.lock, self.status.waiting(f"making {name}", self.numbers(ranks)):
            whole = self._communicator.Get_group()
            subset = whole.Incl(list(ranks))
            communicator = self._communicator.Create_group(subset)
            subset.Free()
            whole.Free()
        return communicator

    def _node_leader(self, ranks_per_node: int) -> int:
        """Return the lowest rank on this rank's node."""
        if ranks_per_node:
            return self.rank // ranks_per_node * ranks_per_node
        node = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        leader = bytearray(self.rank.to_bytes(8, "little"))
        node.Bcast([leader, self._mpi.BYTE])
        node.Free()
        return int.from_bytes(leader, "little")


class Clock(NamedTuple):
    """Nanoseconds: what this host's clock shows more than rank 0's, give or take."""

    ahead: int
    uncertainty: int


def now() -> int:
    return time.perf_counter_ns()


def computer(host: str) -> str:
    """Equal where the same clock is read."""
    try:
        namespace = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        namespace = 0
    return f"{machine.boot_identity() or host} {namespace}"


def compare_clocks(
    mpi: Any, communicator: Any, asked: Sequence[int], compared: dict[int, Clock]
) -> Requests:
    """On rank 0 `compared` gets the clock of every rank asked."""
    question, answer = bytearray(1), bytearray(8)
    if communicator.rank in asked:
        for _ in range(_QUESTIONS):
            yield [communicator.Irecv([question, mpi.BYTE], 0)]
            yield [communicator.Isend([now().to_bytes(8, "little", signed=True), mpi.BYTE], 0)]
    for rank in asked if communicator.rank == 0 else ():
        found = []
        for _ in range(_QUESTIONS):
            begun = now()
            yield [
                communicator.Isend([question, mpi.BYTE], rank),
                communicator.Irecv([answer, mpi.BYTE], rank),
            ]
            found.append(_clock(begun, int.from_bytes(answer, "little", signed=True), now()))
        compared[rank] = min(found, key=lambda clock: clock.uncertainty)


def _clock(begun: int, answered: int, arrived: int) -> Clock:
    return Clock(answered - (begun + arrived) // 2, (arrived - begun + 1) // 2)
