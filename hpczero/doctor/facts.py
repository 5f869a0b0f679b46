"""Facts that each rank sees, as plain data that can be sent to rank 0 as JSON, and their table.

Nothing is judged here.
"""

import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hpczero import env, machine, processors
from hpczero.comm.mpi_library import Library, installed_wheels
from hpczero.text import consecutive_runs, format_span
from hpczero_kernels.table import MIN_CAPABILITY, available

PACKAGES = ("torch", "mpi4py", "numba", "numba-cuda", "h5py", "numpy", "pydantic")
_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun", "srun", "aprun", "palsd")


@dataclass(frozen=True)
class Launcher:
    """The command that started this rank, found among its ancestors."""

    command: str
    cores: int  # that it may use itself, and so give to its ranks


@dataclass(frozen=True)
class Storage:
    """The HDF5 library, and file locks in the working directory."""

    hdf5: str | None  # version
    locking: str | None  # HDF5_USE_FILE_LOCKING
    lock_error: str  # "" if locks work
    directory: str
    file_system: str


@dataclass
class Report:
    """Facts of one rank; the caller enters those about the job (`rank`, `node`, `skew`)."""

    host: str
    python: str
    executable: str
    source: str  # of hpczero: the checkout, or what pip was given
    packages: dict[str, str | None]
    launched: dict[str, list[int]]  # launcher's variables: [rank, size]
    launcher: Launcher | None
    mpirun_on_path: str | None
    cores: list[int]
    quota: float | None
    physical: int
    available: int
    memory_limit: int | None
    usable: int
    shm: tuple[int, int] | None  # size, free
    gpu_driver: bool
    gpus: list[str]
    gpu_error: str
    gpu_capability: list[int]  # major, minor: of the oldest of them
    kernels: dict[str, dict[str, str]]  # device -> operation -> implementation
    storage: Storage
    sees_all: bool
    wheels: list[str]  # PyPI's MPIs in this Python environment
    # Segments of shared memory, of a node's first rank only: name, bytes, made by.
    stale: list[tuple[str, int, str]] = field(default_factory=list)
    removed: list[tuple[str, int, str]] = field(default_factory=list)
    library: Library | None = None
    library_error: str = ""
    rank: int = 0
    size: int = 1
    node: int = 0
    skew: float = 0.0

    @property
    def under_a_launcher(self) -> bool:
        """True for a rank of a job. A single task of Slurm's may be just the job's shell."""
        return any(launcher != "Slurm" or size > 1 for launcher, (_, size) in self.launched.items())


def report() -> Report:
    memory = machine.memory()
    shm = machine.shared_memory()
    gpus, gpu_error, capability = _gpus()
    return Report(
        host=socket.gethostname(),
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        source=env.source(),
        packages={"hpczero": env.VERSION, **{name: env.package_version(name) for name in PACKAGES}},
        launched={name: list(task) for name, task in env.launched_tasks().items()},
        launcher=_launcher(),
        mpirun_on_path=shutil.which("mpirun"),
        cores=sorted(processors.usable_cores()),
        quota=machine.cpu_quota(),
        physical=memory.physical,
        available=memory.available,
        memory_limit=memory.limit.limit if memory.limit else None,
        usable=memory.usable,
        shm=(shm.size, shm.free) if shm else None,
        gpu_driver=machine.gpu_driver(),
        gpus=gpus,
        gpu_error=gpu_error,
        gpu_capability=list(capability) if gpus else [],
        kernels={"cpu": available("cpu"), "cuda": available("cuda", capability)},
        storage=_storage(),
        sees_all=machine.sees_all_users_of(),
        wheels=installed_wheels(),
    )


def from_json(data: dict[str, Any]) -> Report:
    launcher = Launcher(**data["launcher"]) if data["launcher"] else None
    library = Library(**data["library"]) if data["library"] else None
    return Report(
        **{**data, "launcher": launcher, "library": library, "storage": Storage(**data["storage"])}
    )


def look_for_stale_segments(report: Report, remove: bool) -> None:
    """Enter this user's segments that nobody uses; remove them first if asked to."""
    may_remove = remove and report.sees_all
    left, removed = (
        machine.remove_stale_segments() if may_remove else (machine.stale_segments(), [])
    )
    report.stale = _described(left)
    report.removed = _described(removed)


def _described(segments: Sequence[machine.Segment]) -> list[tuple[str, int, str]]:
    return [(segment.path.name, segment.size, segment.made_by) for segment in segments]


def _launcher() -> Launcher | None:
    try:
        for ancestor in psutil.Process().parents():
            if ancestor.name().startswith(_LAUNCHERS):
                return Launcher(ancestor.exe() or ancestor.name(), len(ancestor.cpu_affinity()))
    except (OSError, psutil.Error):
        pass
    return None


def _gpus() -> tuple[list[str], str, tuple[int, int]]:
    """Return the names of this rank's GPUs, what is wrong with them, and the oldest's capability.

    torch takes seconds to import, so it is asked only if there is a driver.
    """
    if not machine.gpu_driver():
        return [], "", MIN_CAPABILITY
    try:
        import torch

        visible = range(torch.cuda.device_count())
        names = list(map(torch.cuda.get_device_name, visible))
        oldest = min(map(torch.cuda.get_device_capability, visible), default=MIN_CAPABILITY)
        return names, "" if visible else f"torch {torch.__version__} finds none", oldest
    except (
        Exception
    ) as error:  # a mismatched driver can raise anything; the other facts still count
        return [], f"{type(error).__name__}: {error}", MIN_CAPABILITY


def _storage() -> Storage:
    try:
        import h5py

        hdf5 = h5py.version.hdf5_version
    except ImportError:
        hdf5 = None
    directory = Path.cwd()
    return Storage(
        hdf5,
        env.variable("HDF5_USE_FILE_LOCKING"),
        _lock_error(directory),
        str(directory),
        machine.file_system_type(directory),
    )


def _lock_error(directory: Path) -> str:
    """Return why the folder cannot be locked, or ""; nothing is written for the test."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # somebody else has it: locks work
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def by_node(reports: Sequence[Report]) -> list[list[Report]]:
    """Return the reports of each node."""
    nodes: dict[int, list[Report]] = {}
    for report in reports:
        nodes.setdefault(report.node, []).append(report)
    return list(nodes.values())


def table(nodes: Sequence[Sequence[Report]], most: int) -> Iterator[str]:
    """Yield a line for each of the first nodes, under a head, and how many more there are."""
    rows = [("node", "host", "ranks", "cores", "threads a rank", "memory a rank", "GPUs a rank")]
    for node in nodes[:most]:
        first = node[0]
        cores = [set(report.cores) for report in node]
        row = (
            str(first.node),
            first.host,
            ",".join(map(_span, consecutive_runs([report.rank for report in node]))),
            str(len(set.union(*cores))),
            _span(processors.threads_per_rank(cores, first.quota)),
            f"{first.usable / len(node) / (1 << 30):.1f} GiB",
            _span([len(report.gpus) for report in node]),
        )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(nodes) > most:
        yield f"... and {len(nodes) - most} more nodes"


def _span(numbers: Sequence[int]) -> str:
    return format_span(min(numbers), max(numbers))
