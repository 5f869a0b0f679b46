"""The ranks of this job: who they are, on which nodes they run, and the groups in which they talk."""

import atexit
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpczero import env, machine
from hpczero.comm import clock
from hpczero.comm.clock import Clock
from hpczero.comm.mpi_backend import Order
from hpczero.comm.mpi_library import HEAD_START, library, refuse_foreign_launcher, refuse_unusable
from hpczero.comm.progress import Limits, Progress, Steps
from hpczero.comm.shared_memory import SharedBlocks
from hpczero.comm.status import CLEARED, SLOT, Signature, Status, WaitPoint
from hpczero.comm.trace import Entry, Ledger, Trace
from hpczero.comm.watchdog import Member, Watch
from hpczero.errors import HpczeroError, InputError, Stopped

if TYPE_CHECKING:
    from hpczero.comm.connection import Connection
    from hpczero.comm.group import Group
    from hpczero.comm.shared_memory import ByWindow
    from hpczero.comm.torch_backend import Native, Rendezvous
    from hpczero.device import Device

_NODES = "comm.ranks_per_node may not be more than the ranks of a host"
_PLENTY = 64  # times what short messages of a group take: so large must /dev/shm be
_PIECE = 1 << 30  # bytes: the largest message of share and collect
_LAST_WORDS = 0.3  # seconds that the launcher gets to pass on what was printed: MPICH's drops the rest when it ends the job

Result = TypeVar("Result")


class World:
    """All ranks of the job, or of a part of it (`part`). Without torch everything works but the groups.

    `.rank`, `.size`; `.hosts` the host name of each rank; `.node_of_rank` numbers the nodes in the order of their first ranks; `.node`,
    `.local_rank`, `.local_size`: where this rank runs; `.everyone` the group of all; `.ledger` what was sent; `.trace` what
    happened when; `.library` which MPI.

    As a context: an orderly end closes it; an error in it is said with its rank and ends the whole job (`fail`).
    """

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        ranks_per_node: int = 0,
        limits: Limits | None = None,
        whole: "World | None" = None,
        origin: Sequence[int] = (),
    ) -> None:
        """Collective over the communicator, which the world then owns. It may be part of a `whole`, where its ranks have the numbers `origin`."""
        self._mpi = mpi
        self._communicator = communicator
        self._limits = limits or Limits()
        self._finalizes = False
        self.status: Status = whole.status if whole else Status()
        self._windows: list[SharedBlocks] = whole._windows if whole else []
        self.progress: Progress = Progress(mpi, self.status, whole.progress.lock if whole else None)
        self._groups: dict[
            tuple[str, tuple[int, ...], str], tuple[Group, Connection, Native | None]
        ] = {}
        self._device: Device | None = whole._device if whole else None
        self._direct: bool = whole._direct if whole else False
        self.backend: str = whole.backend if whole else "mpi"  # what carries the collectives
        self._rendezvous: Rendezvous | None = whole._rendezvous if whole else None
        self.ledger = Ledger()
        self.library = library(mpi)
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self._origin = tuple(origin or range(self.size))
        self._entry = self.status.enter("world", self._origin)
        self._number = 0
        self._is_part = whole is not None
        self._watch: Watch | None = None
        self._slots: SharedBlocks | None = None
        described = self.broadcast_object(
            self.gather_objects([mpi.Get_processor_name(), self._node_leader(ranks_per_node)])
        )
        nodes = {
            leader: node for node, leader in enumerate(sorted({leader for _, leader in described}))
        }
        self.hosts: tuple[str, ...] = tuple(host for host, _ in described)
        self.node_of_rank: tuple[int, ...] = tuple(nodes[leader] for _, leader in described)
        self.node = self.node_of_rank[self.rank]
        self._neighbours = [rank for rank, at in enumerate(self.node_of_rank) if at == self.node]
        self.local_rank = self._neighbours.index(self.rank)
        self.local_size = len(self._neighbours)

    @classmethod
    def start(cls, ranks_per_node: int = 0, limits: Limits | None = None) -> "World":
        """Start MPI. `ranks_per_node` overrides the nodes found: so many neighbouring ranks count as a node."""
        import mpi4py

        mpi4py.rc.initialize = False  # here, with the thread level that is needed
        mpi4py.rc.finalize = (
            False  # in close(): behind our back it would make a failing rank wait for the others
        )
        from mpi4py import MPI

        if MPI.Is_finalized():
            raise InputError(
                "MPI has been ended in this process and cannot start again: start one World first, and give it to all that need it"
            )
        started = not MPI.Is_initialized()
        if started:
            refuse_foreign_launcher(MPI)
            with warnings.catch_warnings(
                action="ignore", category=RuntimeWarning
            ):  # of mpi4py, about the launcher: said better below
                env.prepare_mpi()
                MPI.Init_thread(MPI.THREAD_SERIALIZED)
        refuse_unusable(MPI)
        world = cls(MPI, MPI.COMM_WORLD.Dup(), ranks_per_node, limits)
        world._finalizes = started
        if started and world.size > 1:
            atexit.register(world._left)
        return world

    def part(
        self, ranks: Sequence[int], ranks_per_node: int = 0, limits: Limits | None = None
    ) -> "World":
        """A world of these ranks only, numbered in this order; called by them alone. Its operations are waited for apart from ours."""
        origin = self.numbers(ranks)
        return World(
            self._mpi,
            self._subset(ranks, "a part of the world"),
            ranks_per_node,
            limits or self._limits,
            self,
            origin,
        )

    @property
    def is_watched(self) -> bool:
        """Or a part of one, which is not watched by itself."""
        return self._is_part or self._watch is not None

    def watch(self, seconds: float, folder: Path | None = None) -> None:
        """Collective. From now on a rank that waits longer than this for others ends the job, and says who did not come (`comm/watchdog.py`). In
        `folder`, if given, nodes tell each other what their ranks are doing once something is amiss.
        """
        if self.size == 1:
            return
        assert not self._is_part, "only the whole world can be watched"
        assert self._watch is None, "this world is watched already"
        self._slots = self.share_memory(self._neighbours, "the watchdog's window", SLOT, CLEARED)
        slots = dict(zip(self.numbers(self._neighbours), self._slots.blocks, strict=True))
        members = [
            Member(*facts)
            for facts in zip(self._origin, self.hosts, self.node_of_rank, strict=True)
        ]
        self.status.move_to(self._slots.blocks[self.local_rank])
        self._watch = Watch(self.status, members[self.rank], members, slots, seconds, folder)

    def share_memory(
        self, ranks: Sequence[int], name: str, size: int, cleared: int
    ) -> SharedBlocks:
        """Collective over `ranks`, which must share memory; each gets a block that all of them see."""
        if len(hosts := {self.hosts[rank] for rank in ranks}) > 1:
            raise InputError(
                f"{name}: ranks {', '.join(map(str, ranks))} share no memory, being on {', '.join(sorted(hosts))}: {_NODES}"
            )
        communicator = self._subset(ranks, name)
        with self.progress.lock, self.status.waiting(f"making {name}", self.numbers(ranks)):
            shared = SharedBlocks(self._mpi, communicator, name, size, cleared, self._windows)
            communicator.Free()
        self._windows.append(shared)
        return shared

    def unshare_memory(self, shared: SharedBlocks, ranks: Sequence[int]) -> None:
        """Collective over its ranks."""
        self._windows.remove(shared)
        with self.progress.lock, self.status.waiting("the end of a window", self.numbers(ranks)):
            shared.close()

    def numbers(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """What the ranks are called in the world of the whole job."""
        return tuple(self._origin[rank] for rank in ranks)

    @property
    def trace(self) -> Trace:
        return self.progress.trace

    def record(self, trace: Trace) -> None:
        """From now on what happens in this world goes there; `Trace()` keeps nothing."""
        self.progress.trace = trace

    def clock(self) -> Clock:
        """Collective. How this host's clock differs from rank 0's now."""
        computers = self.broadcast_object(
            self.gather_objects(clock.computer(self.hosts[self.rank]))
        )
        compared: dict[int, Clock] = {0: Clock(0, 0)}
        asked = [computers.index(computer) for computer in dict.fromkeys(computers)][1:]
        self._run(clock.compare(self._mpi, self._communicator, asked, compared), "clock")
        mine = str(computers.index(computers[self.rank]))
        return Clock(
            *self.broadcast_object({str(rank): found for rank, found in compared.items()})[mine]
        )

    @property
    def everyone(self) -> "Group":
        return self.group("world", range(self.size))

    def group(self, axis: str, ranks: Sequence[int], purpose: str = "") -> "Group":
        """The group of these ranks, in this order. Collective over them and nobody else; asked for again, it is the same group. Groups for another
        `purpose` have collectives of their own, whose order has nothing to do with that of the first one's.
        """
        from hpczero.comm.connection import Connection, Means
        from hpczero.comm.group import Group

        key = axis, tuple(ranks), purpose
        if key not in self._groups:
            assert self.rank in ranks, (
                f"rank {self.rank} asks for a group without itself: {list(ranks)}"
            )
            communicator = self._subset(ranks, f"group {axis}") if len(ranks) > 1 else None
            means = Means(
                self._mpi, self.progress, self.ledger, self._limits, self.device, self._direct
            )
            connection, native = (
                Connection(means, communicator, axis, self.numbers(ranks)),
                self._native(axis, ranks),
            )
            group = Group(
                axis, ranks, ranks.index(self.rank), self.node_of_rank, connection, native
            )
            group.label = f"{axis} {purpose}".rstrip()
            group.window = self._window(axis, ranks)
            self._groups[key] = group, connection, native
        return self._groups[key][0]

    def _window(self, axis: str, ranks: Sequence[int]) -> "ByWindow | None":
        """Make the window for short collectives; None if the ranks share no memory, or little."""
        from hpczero.comm.shared_memory import ByWindow, size_of

        places = {(self.hosts[rank], self.node_of_rank[rank]) for rank in ranks}
        if len(ranks) == 1 or len(places) > 1 or self.device.has_queues or self.backend != "mpi":
            return None
        size, cleared = size_of(len(ranks), self._limits.staging)
        space = machine.shared_memory()
        if space is None or space.size < _PLENTY * size * len(ranks):
            return None
        try:
            shared = self.share_memory(ranks, f"short messages along {axis}", size, cleared)
        except InputError:
            return None
        return ByWindow(shared, axis, self.numbers(ranks), ranks.index(self.rank))

    @property
    def device(self) -> "Device":
        """Where this rank's tensors live, as `use` has said; else the CPU."""
        from hpczero.device import CPU

        return self._device or CPU

    def use(self, device: "Device", backend: str = "mpi", staging: int = 0) -> None:
        """Collective, before any group is made. The groups also move tensors of this device; `backend` ("mpi", "nccl", "gloo") carries the
        collectives on its tensors. `staging`: bytes of their buffers (`Limits`); 0: as they were.
        """
        from hpczero.comm import mpi_library
        from hpczero.comm.torch_backend import Rendezvous

        assert not self._groups, "groups have been made"
        self._device, self.backend = device, backend
        if staging:
            self._limits = replace(self._limits, staging=staging)
        self._direct = device.has_queues and all(
            self.broadcast_object(self.gather_objects(bool(mpi_library.facts().cuda_aware)))
        )
        self._rendezvous = (
            Rendezvous.of(self, backend) if backend != "mpi" and self.size > 1 else None
        )

    def _native(self, axis: str, ranks: Sequence[int]) -> "Native | None":
        if self._rendezvous is None or len(ranks) == 1:
            return None
        for key, (_, _, native) in self._groups.items():
            if native and key[:2] == (axis, tuple(ranks)):
                return native.beside(lambda: self._subset(ranks, f"one order along {axis}"))
        numbers, rank = self.numbers(ranks), ranks.index(self.rank)
        with self.status.waiting(f"connecting group {axis}", numbers):
            return self._rendezvous.group(
                axis, numbers, rank, self._limits.staging, Order(self._mpi)
            )

    @property
    def buffered(self) -> int:
        """Bytes of the buffers in which pieces arrive that are to be summed."""
        return sum(
            connection.buffered + (native.buffered if native else 0)
            for _, connection, native in self._groups.values()
        )

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank: what JSON can carry, of any length (a tuple becomes a list)."""
        box = [json.dumps(value).encode() if self.rank == 0 else b""]
        self._run(self._share(box), "share")
        return json.loads(box[0])

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        received: list[bytearray] = []
        self._run(self._collect(json.dumps(value).encode(), received), "collect")
        return [json.loads(text) for text in received] if self.rank == 0 else None

    def run_on_all(self, action: Callable[[], Result]) -> Result:
        """Runs the action on every rank; where the input is wrong on any of them, all raise the error of the first such rank."""
        result, message = None, None
        try:
            result = action()
        except InputError as error:
            message = str(error)
        messages = self.gather_objects(message) or []
        first = self.broadcast_object(
            next(((rank, text) for rank, text in enumerate(messages) if text is not None), None)
        )
        if first:
            rank, text = first
            raise InputError(f"rank {rank} on {self.hosts[rank]}: {text}" if rank else text)
        return cast(Result, result)

    def abort(self, code: int = 1) -> None:
        """End the whole job with this exit code; does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)  # some libraries come back from Abort

    def fail(self, error: BaseException) -> None:
        """Say which rank failed and why, and end the whole job, as others may be waiting for this rank; does not return. What is wrong
        with the input is usually found by all ranks: rank 0 says it, and the others wait a moment for it to do so.
        """
        if isinstance(error, InputError) and self.rank > 0:
            time.sleep(HEAD_START)
        if not isinstance(error, HpczeroError):
            traceback.print_exception(error)
        kind = "" if isinstance(error, HpczeroError) else f"{type(error).__name__}: "
        print(
            f"hpczero: rank {self.rank} on {self.hosts[self.rank]}: {kind}{error}", file=sys.stderr
        )
        if isinstance(error, InputError):
            env.wrong_input()
        self.abort(error.exit_code if isinstance(error, HpczeroError) else 1)

    def close(self) -> None:
        """The orderly end, on every rank; nothing may be under way."""
        self.progress.close()
        windows = [
            (group.window, ranks)
            for (_, ranks, _), (group, _, _) in self._groups.items()
            if group.window
        ]
        for _, connection, native in self._groups.values():
            connection.close()
            if native:
                native.close()
        self._groups.clear()
        if self._rendezvous:
            self._run(self._meet(), "close")  # nobody asks the store any more
            self._rendezvous = None
        if self._watch and self._slots:
            self._run(self._meet(), "close")  # the last thing that is watched
            self._watch.stop()
            self.status.move_to(memoryview(bytearray(SLOT)))
            self.unshare_memory(self._slots, self._neighbours)
        for window, ranks in windows:
            window.close()
            self.unshare_memory(window.shared, ranks)
        self.status.leave(self._entry)
        self._communicator.Free()
        if self._finalizes:
            atexit.unregister(self._left)
            self._mpi.Finalize()

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, Stopped):
            self.close()
            return
        self.status.last_words()
        if self.size > 1:
            self.fail(error)

    def _run(self, steps: Steps, operation: str) -> None:
        self._number += 1
        signature = Signature.of(operation)
        self.status.started(self._entry, self._number, signature)
        self.progress.start(
            steps,
            Entry(),
            WaitPoint(signature.label, self._entry, self._number),
            ("world", operation, -1),
        ).wait()

    def _meet(self) -> Steps:
        yield [self._communicator.Ibarrier()]

    def _share(self, box: list[bytes]) -> Steps:
        length = bytearray(len(box[0]).to_bytes(8, "little"))
        yield [self._communicator.Ibcast([length, self._mpi.BYTE])]
        text = bytearray(box[0]) or bytearray(int.from_bytes(length, "little"))
        for piece in _pieces(text):
            yield [self._communicator.Ibcast([piece, self._mpi.BYTE])]
        box[0] = bytes(text)

    def _collect(self, text: bytes, received: list[bytearray]) -> Steps:
        byte = self._mpi.BYTE
        lengths = bytearray(8 * self.size if self.rank == 0 else 0)
        yield [
            self._communicator.Igather(
                [len(text).to_bytes(8, "little"), byte], [lengths, byte] if self.rank == 0 else None
            )
        ]
        if self.rank > 0:
            yield [self._communicator.Isend([piece, byte], 0) for piece in _pieces(text)]
            return
        received += [
            bytearray(int.from_bytes(lengths[8 * rank : 8 * rank + 8], "little"))
            for rank in range(self.size)
        ]
        received[0][:] = text
        arriving = [
            (rank, piece) for rank in range(1, self.size) for piece in _pieces(received[rank])
        ]
        yield [self._communicator.Irecv([piece, byte], rank) for rank, piece in arriving]

    def _node_leader(self, ranks_per_node: int) -> int:
        """The lowest rank on this rank's node."""
        if ranks_per_node:
            return self.rank // ranks_per_node * ranks_per_node
        node = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        leader = bytearray(self.rank.to_bytes(8, "little"))
        node.Bcast([leader, self._mpi.BYTE])
        node.Free()
        return int.from_bytes(leader, "little")

    def _left(self) -> None:
        """At the end of a process that has not closed its world: some launchers take that for a success of all."""
        what = "ends without having closed its world (close(), or a `with` block), and others may wait for it: the job ends"
        print(f"hpczero: rank {self.rank} on {self.hosts[self.rank]} {what}", file=sys.stderr)
        self.abort()

    def _subset(self, ranks: Sequence[int], name: str) -> Any:
        """A communicator of these ranks; collective over them and nobody else."""
        with self.progress.lock, self.status.waiting(f"making {name}", self.numbers(ranks)):
            whole = self._communicator.Get_group()
            subset = whole.Incl(list(ranks))
            communicator = self._communicator.Create_group(subset)
            subset.Free()
            whole.Free()
        return communicator


def _pieces(text: bytes | bytearray) -> list[memoryview]:
    return [memoryview(text)[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
