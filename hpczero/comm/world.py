"""The ranks of this job: who they are, on which nodes they run, and the groups in which they talk."""

import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hpczero import env
from hpczero.comm.ledger import Entry, Ledger
from hpczero.comm.work import Progress, Steps
from hpczero.errors import InputError

if TYPE_CHECKING:
    from hpczero.comm.group import Group, Limits

_PIECE = 1 << 30  # bytes: the largest message of share and collect


class World:
    """All ranks of the job, or of a part of it (`part`).

    `.rank`, `.size`; `.node_of_rank` numbers the nodes in the order of their first ranks; `.hosts` the host name of each rank; `.node`,
    `.local_rank`, `.local_size` where this rank runs; `.everyone` the group of all ranks; `.ledger` what was sent.
    """

    def __init__(self, mpi: Any, communicator: Any, ranks_per_node: int = 0, limits: "Limits | None" = None, owns_mpi: bool = False) -> None:
        """Collective over the communicator, which the world then owns."""
        self._mpi = mpi
        self._communicator = communicator
        self._limits = limits
        self._owns_mpi = owns_mpi
        self._progress = Progress(mpi.Request)
        self._groups: dict[tuple[str, tuple[int, ...]], tuple[Group, Any]] = {}
        self.ledger = Ledger()
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self.library = " ".join(mpi.Get_library_version().rstrip("\x00").split("\n")[0].split())
        described = self.collect([mpi.Get_processor_name(), self._node_leader(ranks_per_node)])
        described = self.share(described)
        leaders = sorted({leader for _, leader in described})
        self.hosts: tuple[str, ...] = tuple(host for host, _ in described)
        self.node_of_rank: tuple[int, ...] = tuple(leaders.index(leader) for _, leader in described)
        self.node = self.node_of_rank[self.rank]
        neighbours = [rank for rank, node in enumerate(self.node_of_rank) if node == self.node]
        self.local_rank = neighbours.index(self.rank)
        self.local_size = len(neighbours)

    @classmethod
    def start(cls, ranks_per_node: int = 0, limits: "Limits | None" = None) -> "World":
        """Start MPI. `ranks_per_node` overrides the nodes found: so many neighbouring ranks count as a node."""
        import mpi4py

        mpi4py.rc.initialize = False  # we say when, and with which thread level
        mpi4py.rc.finalize = False  # not behind our back: it would make a failing rank wait for the others
        from mpi4py import MPI

        owns_mpi = not MPI.Is_initialized()
        if owns_mpi:
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        _refuse_unusable(MPI)
        return cls(MPI, MPI.COMM_WORLD.Dup(), ranks_per_node, limits, owns_mpi)

    def part(self, ranks: Sequence[int], ranks_per_node: int = 0, limits: "Limits | None" = None) -> "World":
        """A world of these ranks only, numbered in this order; called by them alone."""
        return World(self._mpi, self._subset(ranks), ranks_per_node, limits)

    @property
    def everyone(self) -> "Group":
        return self.group("world", range(self.size))

    def group(self, axis: str, ranks: Sequence[int]) -> "Group":
        """The group of these ranks, in this order. Collective over them and nobody else; asked for again, it is the same group."""
        from hpczero.comm.group import Connection, Group, Limits

        key = axis, tuple(ranks)
        if key not in self._groups:
            assert self.rank in ranks, f"rank {self.rank} asks for a group of ranks {list(ranks)} without itself"
            communicator = self._subset(ranks) if len(ranks) > 1 else None
            connection = Connection(self._mpi, communicator, self._progress, self.ledger, self._limits or Limits())
            self._groups[key] = Group(axis, ranks, ranks.index(self.rank), self.node_of_rank, connection), connection
        return self._groups[key][0]

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank: what JSON can carry, of any length (a tuple becomes a list)."""
        box: list[bytes] = [json.dumps(value).encode() if self.rank == 0 else b""]
        self._run(self._share(box))
        return json.loads(box[0])

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        received: list[bytearray] = []
        self._run(self._collect(json.dumps(value).encode(), received))
        return [json.loads(text) for text in received] if self.rank == 0 else None

    def abort(self, code: int = 1) -> None:
        """End the whole job at once, with this exit code; does not return."""
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        """The orderly end, on every rank: nothing may be under way."""
        for _, connection in self._groups.values():
            connection.close()
        self._groups.clear()
        self._communicator.Free()
        if self._owns_mpi:
            self._mpi.Finalize()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()

    def _run(self, steps: Steps) -> None:
        self._progress.start(steps, Entry()).wait()

    def _share(self, box: list[bytes]) -> Steps:
        length = bytearray(len(box[0]).to_bytes(8, "little"))
        yield [self._communicator.Ibcast([length, self._mpi.BYTE])]
        text = bytearray(box[0]) if self.rank == 0 else bytearray(int.from_bytes(length, "little"))
        for piece in _pieces(text):
            yield [self._communicator.Ibcast([piece, self._mpi.BYTE])]
        box[0] = bytes(text)

    def _collect(self, text: bytes, received: list[bytearray]) -> Steps:
        lengths = bytearray(8 * self.size) if self.rank == 0 else None
        mine = len(text).to_bytes(8, "little")
        yield [self._communicator.Igather([mine, self._mpi.BYTE], [lengths, self._mpi.BYTE] if lengths is not None else None)]
        if lengths is None:
            yield [self._communicator.Isend([piece, self._mpi.BYTE], 0) for piece in _pieces(text)]
            return
        received += [bytearray(int.from_bytes(lengths[8 * rank : 8 * rank + 8], "little")) for rank in range(self.size)]
        received[0][:] = text
        yield [
            self._communicator.Irecv([piece, self._mpi.BYTE], rank)
            for rank in range(1, self.size)
            for piece in _pieces(received[rank])
        ]

    def _node_leader(self, ranks_per_node: int) -> int:
        """The lowest rank on this rank's node."""
        if ranks_per_node:
            return self.rank // ranks_per_node * ranks_per_node
        node = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        leader = bytearray(self.rank.to_bytes(8, "little"))
        node.Bcast([leader, self._mpi.BYTE])
        node.Free()
        return int.from_bytes(leader, "little")

    def _subset(self, ranks: Sequence[int]) -> Any:
        whole = self._communicator.Get_group()
        subset = whole.Incl(list(ranks))
        communicator = self._communicator.Create_group(subset)
        subset.Free()
        whole.Free()
        return communicator


def _pieces(text: bytes | bytearray) -> list[memoryview]:
    return [memoryview(text)[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]


def _refuse_unusable(mpi: Any) -> None:
    library = mpi.Get_library_version().rstrip("\x00").split("\n")[0]
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise InputError(f"{library} offers thread level {mpi.Query_thread()}; hpczero needs MPI_THREAD_SERIALIZED ({mpi.THREAD_SERIALIZED})")
    launcher, (rank, size) = next(iter(env.launched_tasks().items()), ("", (0, 1)))
    if mpi.COMM_WORLD.size > 1 or size == 1:
        return
    if rank > 0:  # every process believes itself alone: only the launcher's first one speaks
        time.sleep(1)
        raise SystemExit(InputError.exit_code)
    raise InputError(
        f"the launcher ({launcher}) started {size} processes, but each believes itself alone: the MPI library in use is {library}, "
        f"which is not the launcher's. Use that library's own mpirun (in the same virtual environment), or point mpi4py at the launcher's library "
        f"(MPI4PY_LIBMPI=/path/to/libmpi.so); `python -m mpi4py --mpi-library` shows which one is taken"
    )
