"""The ranks of this job: their life from start to end, and the groups in which they talk."""

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from hpczero import env, machine
from hpczero.comm import mpi_library, stacks
from hpczero.comm.connection import Connection, ConnectionSettings
from hpczero.comm.group import Group
from hpczero.comm.mpi_backend import Order
from hpczero.comm.mpi_library import HEAD_START, library, start_mpi
from hpczero.comm.nodes import Nodes
from hpczero.comm.progress import Limits
from hpczero.comm.shared_memory import SharedBlocks, SharedMemoryCarrier, size_of
from hpczero.comm.status import CLEARED, SLOT
from hpczero.comm.torch_backend import Rendezvous, TorchCarrier
from hpczero.comm.trace import Ledger, Trace
from hpczero.comm.watchdog import PASSING_ON, Member, Watch
from hpczero.device import CPU, Device
from hpczero.errors import HpczeroError, InputError, Stopped

_PLENTY = 64  # times what short messages of a group take: so large must /dev/shm be


class World(Nodes):
    """All ranks of the job, or of a part of it (`part`).

    `.everyone` the group of all; `.device` where this rank's tensors live and `.backend` what
    carries collectives on them; `.ledger` what was sent; `.trace` what happened when; `.library`
    which MPI.

    As a context: an orderly end closes it; an error in it is said with its rank and ends the whole
    job (`fail`).
    """

    _hook: ClassVar[Callable[..., Any]] = sys.excepthook  # that it was before the first one

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        ranks_per_node: int = 0,
        limits: Limits | None = None,
        whole: "World | None" = None,
        origin: Sequence[int] = (),
    ) -> None:
        """Own the communicator; collective over it.

        It may be part of a `whole`, in which its ranks have the numbers `origin`.
        """
        super().__init__(mpi, communicator, ranks_per_node, whole, origin)
        self._limits = limits or Limits()
        self._groups: dict[tuple[str, tuple[int, ...], str], Group] = {}
        self.device: Device = whole.device if whole else CPU
        self.backend: str = whole.backend if whole else "mpi"
        self._direct: bool = whole._direct if whole else False
        self._rendezvous: Rendezvous | None = whole._rendezvous if whole else None
        self.ledger = Ledger()
        self.library = library(mpi)
        self._whole = whole  # of which this one is a part
        self._watch: Watch | None = None
        self._slots: SharedBlocks | None = None

    @classmethod
    def start(cls, ranks_per_node: int = 0, limits: Limits | None = None) -> "World":
        """Start MPI. `ranks_per_node` overrides the nodes found: so many neighbours are a node."""
        mpi, starts = start_mpi()
        world = cls(mpi, mpi.COMM_WORLD.Dup(), ranks_per_node, limits)
        if starts:
            _OPEN.clear()
            cls._hook = sys.excepthook
            sys.excepthook = _uncaught
            atexit.register(_left)
        if starts or _OPEN:  # MPI is ended with the last of those
            _OPEN.append(world)
        return world

    def part(
        self, ranks: Sequence[int], ranks_per_node: int = 0, limits: Limits | None = None
    ) -> "World":
        """Return a world of these ranks only, numbered in this order; called by them alone.

        Its operations are waited for apart from ours.
        """
        communicator = self._communicator_of(ranks, "a part of the world")
        limits = limits or self._limits
        return World(self._mpi, communicator, ranks_per_node, limits, self, self.numbers(ranks))

    @property
    def is_watched(self) -> bool:
        """True if a watchdog runs; a part of a world is not watched by itself."""
        return self._whole is not None or self._watch is not None

    def watch(self, seconds: float, folder: Path | None = None) -> None:
        """End the job, and say who did not come, where a rank waits for others longer than this.

        Collective. In `folder`, if given, nodes tell each other what their ranks are doing once
        something is amiss (`comm/watchdog.py`), or a rank gets the signal SIGUSR1. A rank alone
        prints its main thread's stack then.
        """
        if self.size == 1:
            stacks.print_when_asked()
            return
        assert self._whole is None, "only the whole world can be watched"
        assert self._watch is None, "this world is watched already"
        self._slots = self.share_memory(self._neighbours, "the watchdog's window", SLOT, CLEARED)
        slots = dict(zip(self.numbers(self._neighbours), self._slots.blocks, strict=True))
        facts = zip(self._origin, self.hosts, self.node_of_rank, strict=True)
        members = [Member(*of_rank) for of_rank in facts]
        self.status.move_to(self._slots.blocks[self.local_rank])
        self._watch = Watch(self.status, members[self.rank], members, slots, seconds, folder)

    def watch_in(self, folder: Path) -> None:
        """Let the watchdog, if there is one, write in this folder; on all ranks."""
        if watch := (self._whole or self)._watch:
            watch.use(folder)

    def watch_no_more_in(self, folder: Path) -> None:
        """Let the watchdog write there no more; on all ranks."""
        if watch := (self._whole or self)._watch:
            watch.leave(folder)

    @property
    def trace(self) -> Trace:
        return self.progress.trace

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Enclose a part of the run that trace and status show by this name."""
        with self.status.doing(what), self.trace.span(what):
            yield

    def record(self, trace: Trace) -> None:
        """Write what happens in this world from now on there; `Trace()` keeps nothing."""
        self.progress.trace = trace

    def use(self, device: Device, backend: str = "mpi", staging: int = 0) -> None:
        """Let the groups move tensors of this device, too. Collective, before any group is made.

        `backend` ("mpi", "nccl", "gloo") carries the collectives on its tensors. `staging`: bytes
        of their buffers (`Limits`); 0: as they were.
        """
        assert not self._groups, "groups have been made"
        self.device = device
        self.backend = backend
        if staging:
            self._limits = replace(self._limits, staging=staging)
        if device.has_queues:
            self._direct = all(self.all_gather_objects(bool(mpi_library.facts().cuda_aware)))
        if backend != "mpi" and self.size > 1:
            self._rendezvous = Rendezvous.of(self, backend, device)

    @property
    def everyone(self) -> Group:
        return self.group("world", range(self.size))

    def group(self, axis: str, ranks: Sequence[int], purpose: str = "") -> Group:
        """Return the group of these ranks, in this order; asked for again, the same one.

        Collective over them and nobody else. Groups for another `purpose` have collectives of their
        own, whose order has nothing to do with that of the first one's.
        """
        key = axis, tuple(ranks), purpose
        if key not in self._groups:
            assert self.rank in ranks, f"rank {self.rank} asks for a group without itself"
            named = f"group {axis}"
            communicator = self._communicator_of(ranks, named) if len(ranks) > 1 else None
            settings = ConnectionSettings(
                self._mpi, self.progress, self.ledger, self._limits, self.device, self._direct
            )
            connection = Connection(settings, communicator, axis, self.numbers(ranks))
            rank = ranks.index(self.rank)
            native = self._native(axis, ranks)
            group = Group(axis, ranks, rank, self.node_of_rank, connection, native)
            group.label = f"{axis} {purpose}".rstrip()
            group.window = self._window(axis, ranks)
            self._groups[key] = group
        return self._groups[key]

    def _window(self, axis: str, ranks: Sequence[int]) -> SharedMemoryCarrier | None:
        """Make the window for short collectives; None if the ranks share no memory, or little."""
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
        return SharedMemoryCarrier(shared, axis, self.numbers(ranks), ranks.index(self.rank))

    def _native(self, axis: str, ranks: Sequence[int]) -> TorchCarrier | None:
        """Return torch.distributed's group of these ranks, where that is the backend."""
        if self._rendezvous is None or len(ranks) == 1:
            return None
        for (other, members, _), group in self._groups.items():
            if group.native and (other, members) == (axis, tuple(ranks)):
                return group.native.beside(
                    lambda: self._communicator_of(ranks, f"one order along {axis}")
                )
        numbers = self.numbers(ranks)
        rank = ranks.index(self.rank)
        order = Order(self._mpi)
        with self.status.waiting(f"connecting group {axis}", numbers):
            return self._rendezvous.group(axis, numbers, rank, self._limits.staging, order)

    @property
    def buffered(self) -> int:
        """Bytes of the buffers in which pieces arrive that are to be summed."""
        return sum(group.buffered for group in self._groups.values())

    def abort(self, code: int = 1) -> None:
        """End the whole job with this exit code; do not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(PASSING_ON)
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)  # some libraries come back from Abort

    def fail(self, error: BaseException, place: str = "") -> None:
        """Say which rank failed, why and where, and end the whole job; do not return.

        What is wrong with the input is usually found by all ranks: rank 0 says it, and the others
        wait a moment for it to do so.
        """
        if isinstance(error, InputError) and self.rank > 0:
            time.sleep(HEAD_START)
        if not isinstance(error, HpczeroError):
            traceback.print_exception(error)
        if self._watch:
            self._watch.record_failure(f"{type(error).__name__}: {error}")
        kind = "" if isinstance(error, HpczeroError) else f"{type(error).__name__}: "
        self.say(f"{kind}{error}{place}")
        if isinstance(error, InputError):
            env.note_wrong_input()
        self.abort(error.exit_code if isinstance(error, HpczeroError) else 1)

    def say(self, words: str) -> None:
        print(f"hpczero: rank {self.rank} on {self.hosts[self.rank]}: {words}", file=sys.stderr)

    def close(self) -> None:
        """End this world in good order, on every rank; nothing may be in flight."""
        self.progress.close()
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            group.close()
        if self._rendezvous:
            self._run(self._meet(), "close")  # nobody asks the store any more
            self._rendezvous = None
        if self._watch and self._slots:
            self._run(self._meet(), "close")  # the last thing that is watched
            self._watch.stop()
            self.status.move_to(memoryview(bytearray(SLOT)))
            self.unshare_memory(self._slots, self._neighbours)
        for group in groups:
            if group.window:
                group.window.close()
                self.unshare_memory(group.window.shared, group.ranks)
        self.status.leave(self._entry)
        self._communicator.Free()
        if self in _OPEN:
            _OPEN.remove(self)
            if not _OPEN:
                atexit.unregister(_left)
                if sys.excepthook is _uncaught:  # and nobody has set another one since
                    sys.excepthook = World._hook
                self._mpi.Finalize()

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, Stopped) or is_stop(error):
            self.close()
            return
        self.status.last_words()
        if self.size > 1:
            self.fail(error)


_OPEN: list[World] = []  # started here, the oldest first


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the job for an error that nobody has caught: the others may wait for this rank."""
    if not _OPEN:
        World._hook(kind, error, trace)
        return
    world = _OPEN[0]
    if world.size > 1 and isinstance(error, Exception):
        world.status.last_words()
        world.fail(error, _place(trace))
    if isinstance(error, InputError):
        env.note_wrong_input()
    if isinstance(error, HpczeroError) and not hasattr(sys, "ps1"):  # at no prompt of Python's
        world.say(f"{error}{_place(trace)}")
        raise SystemExit(error.exit_code)
    World._hook(kind, error, trace)


def leave() -> NoReturn:
    """Leave the program with the exit code of a stopped job, on all ranks together."""
    if _OPEN:
        atexit.unregister(_left)
        atexit.register(_close_all)
    raise SystemExit(Stopped.exit_code)


def _close_all() -> None:
    for world in list(_OPEN):
        world.close()


def _left() -> None:
    """End the job with a process that has not closed its worlds.

    Some launchers take such an end for a success of all.
    """
    world = _OPEN[0]
    if world.size > 1:
        closing = "(close(), or a `with` block)"
        world.say(f"ends without having closed its world {closing}, and others may wait for it")
        world.abort()


def _place(trace: TracebackType | None) -> str:
    """Return the line of the program, as the traceback of an error says it."""
    frames = traceback.extract_tb(trace)
    return f" ({frames[0].filename}, line {frames[0].lineno})" if frames else ""


def is_stop(error: BaseException) -> bool:
    """Return True where all ranks leave a program that saved a checkpoint."""
    return isinstance(error, SystemExit) and error.code == Stopped.exit_code
