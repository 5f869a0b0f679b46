"""Facts about this computer that need neither MPI nor torch.

Everything is read below `root`, so that tests can lay out a recorded computer in a folder.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpczero import safe_files

ROOT = Path("/")

# ------------------------------------------------------------------- identity and file systems


def boot_identity(root: Path = ROOT) -> str:
    """Return the identity of the running kernel: equal in all its containers, unique elsewhere."""
    return text_of(root / "proc/sys/kernel/random/boot_id").strip()


def process_began(root: Path = ROOT) -> float:
    """Return when this process was started, in seconds since 1970; now, if that is unknown.

    The kernel counts from its own start, which `psutil` knows to the second alone.
    """
    fields = text_of(root / "proc/self/stat").rpartition(")")[2].split()
    if len(fields) < 20 or not fields[19].isdigit():
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age)


# The kernel's file locks on these reach every process that can see the files.
_LOCAL_FILE_SYSTEMS = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"),
    *("tmpfs", "ramfs", "overlay"),
}


def is_local_file_system(path: Path, root: Path = ROOT) -> bool:
    """Return True if `path` lies on a disk or in the memory of this computer, not on a server."""
    return file_system_type(path, root) in _LOCAL_FILE_SYSTEMS


def file_system_type(path: Path, root: Path = ROOT) -> str:
    """Return the type of the file system that holds `path` ("ext4", "lustre"); "" if unknown."""
    resolved = Path(os.path.realpath(path))  # of links in a circle, too
    above = [mount for mount in _mounts(root) if resolved.is_relative_to(mount.point)]
    # Of several at the longest path, the one mounted last is seen.
    nearest = max(reversed(above), key=lambda mount: len(str(mount.point)), default=None)
    return nearest.kind if nearest else ""


@dataclass(frozen=True)
class _Mount:
    root: Path  # the folder of the file system that is mounted
    point: Path
    kind: str
    options: frozenset[str]


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")  # a field may be empty
        kind, _, options = after.split(" ", 2)
        folder, point = map(_unescaped, fields[3:5])
        yield _Mount(folder, point, kind, frozenset(options.split(",")))


def _unescaped(field: str) -> Path:
    """Return a path of the kernel's, which writes a space as \\040."""
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field))


# ------------------------------------------------------------------------------------- cgroups


def _cgroup_folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield version (1 or 2) and folder of this process's cgroups, then of those above them."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if (number, controllers) == ("0", "") else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        mount = _cgroup_mount(version, controller, root)
        if mount is None:
            continue
        top = root / mount.point.relative_to("/")
        inside = Path()
        if Path(path).is_relative_to(mount.root):
            inside = Path(path).relative_to(mount.root)
        folder = top if ".." in inside.parts else top / inside
        for parent in (folder, *folder.parents):
            if parent.is_relative_to(top):
                yield version, parent


def _cgroup_mount(version: int, controller: str, root: Path) -> _Mount | None:
    for mount in _mounts(root):
        if version == 2 and mount.kind == "cgroup2":
            return mount
        if version == 1 and mount.kind == "cgroup" and controller in mount.options:
            return mount
    return None


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many cores' worth of time the cgroups allow; None: as many as there are."""
    quotas = []
    for version, folder in _cgroup_folders("cpu", root):
        if version == 2:
            quota, _, period = text_of(folder / "cpu.max").strip().partition(" ")
        else:
            quota = text_of(folder / "cpu.cfs_quota_us").strip()
            period = text_of(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of a cgroup, in bytes."""

    limit: int
    used: int  # without the file cache that the kernel gives back when asked
    folder: Path

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Return the limit that leaves the least memory; None: no limit."""
    return min(memory_limits(root), key=lambda limit: limit.free, default=None)


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return the limits of all cgroups that this process belongs to."""
    limits = []
    for version, folder in _cgroup_folders("memory", root):
        names = _MEMORY_FILES[version]
        limit = text_of(folder / names.limit).strip()
        used = text_of(folder / names.used).strip()
        if limit.isdigit() and int(limit) < 1 << 60:  # version 1 writes "no limit" as almost 2^63
            counts = _fields(text_of(folder / "memory.stat"))
            reclaimable = sum(counts.get(name, 0) for name in names.reclaimable)
            limits.append(MemoryLimit(int(limit), max(0, int(used or 0) - reclaimable), folder))
    return limits


class _MemoryFiles(NamedTuple):
    limit: str
    used: str
    reclaimable: tuple[str, str]  # names in memory.stat


_MEMORY_FILES = {  # version of the cgroup -> names
    1: _MemoryFiles(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: _MemoryFiles("memory.max", "memory.current", ("inactive_file", "active_file")),
}


# -------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Memory of the computer, in bytes."""

    physical: int
    available: int  # free now
    limit: MemoryLimit | None  # of this process's cgroups

    @property
    def usable(self) -> int:
        """Bytes that this node's ranks together may still take."""
        return min(self.available, self.limit.free) if self.limit else self.available


def memory(root: Path = ROOT) -> Memory:
    kilobytes = _fields(text_of(root / "proc/meminfo"))
    return Memory(
        kilobytes.get("MemTotal", 0) * 1024,
        kilobytes.get("MemAvailable", 0) * 1024,
        memory_limit(root),
    )


@dataclass(frozen=True)
class Space:
    size: int
    free: int


def shared_memory(folder: Path = ROOT / "dev/shm") -> Space | None:
    """Return the size of the file system of shared windows, and its free bytes; None: no such."""
    try:
        space = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(space.total, space.free)


def _fields(text: str) -> dict[str, int]:
    """Return name -> number for lines such as `MemTotal:  123 kB` and `inactive_file 123`."""
    pairs = re.findall(r"^(\S+)\s+(\d+)", text, re.MULTILINE)
    return {name.rstrip(":"): int(number) for name, number in pairs}


# ---------------------------------------------------------------------- shared-memory segments

_SEGMENTS = {  # maker -> names of its files
    "hpczero": r"hpczero[._-].*",
    "MPICH": r"mpich_(shm_|shar_tmp).*",
    "Open MPI": r"(vader_segment|sm_segment|osc_sm|osc_rdma|smcuda)[._].*|ompi[._].*",
    "Intel MPI": r"(Intel_MPI|impi)_.*",
    "UCX": r"ucx_shm_posix_.*",
    "PSM": r"psm[23]?[_.].*",
    "NCCL": r"nccl-.*",
}


@dataclass(frozen=True)
class Segment:
    """A file of shared memory."""

    path: Path
    size: int
    made_by: str


def stale_segments(folder: Path = ROOT / "dev/shm", proc: Path = ROOT / "proc") -> list[Segment]:
    """Return this user's shared-memory files, of hpczero or an MPI, that no living process uses.

    The files are listed before the processes are: a file that appears meanwhile is not judged.
    """
    segments = list(_segments(folder))
    if not segments:
        return []
    in_use = set(_files_in_use(proc))
    return [segment for segment, identity in segments if identity not in in_use]


def remove_stale_segments(
    makers: Set[str] | None = None, folder: Path = ROOT / "dev/shm", proc: Path = ROOT / "proc"
) -> tuple[list[Segment], list[Segment]]:
    """Remove stale segments of these makers (None: all), if all their users can be seen.

    Return the segments that stay, such as those that cannot be removed, and those that are gone.
    """
    stale = stale_segments(folder, proc)
    gone = []
    for segment in stale if sees_all_users_of(folder, proc) else ():
        if makers is None or segment.made_by in makers:
            with contextlib.suppress(OSError):
                safe_files.remove(segment.path)
                gone.append(segment)
    return [segment for segment in stale if segment not in gone], gone


def sees_all_users_of(folder: Path = ROOT / "dev/shm", proc: Path = ROOT / "proc") -> bool:
    """Return True if this process sees all processes that may use the segments in `folder`.

    In a container with its own processes, that is so only if `folder` too is the container's own:
    then it has its own IPC namespace.
    """
    try:
        pid = _namespace(proc, "pid")
        ipc = _namespace(proc, "ipc")
    except (OSError, ValueError):
        return False
    return folder.is_dir() and (pid == _FIRST_PID_NAMESPACE or ipc != _FIRST_IPC_NAMESPACE)


# constants of the kernel
_FIRST_PID_NAMESPACE = 4026531836
_FIRST_IPC_NAMESPACE = 4026531839


def _namespace(proc: Path, kind: str) -> int:
    return int(re.sub(r"\D", "", os.readlink(proc / "self/ns" / kind)))


def _segments(folder: Path) -> Iterator[tuple[Segment, tuple[int, int]]]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        makers = [maker for maker, names in _SEGMENTS.items() if re.fullmatch(names, path.name)]
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            if makers and path.is_file() and not path.is_symlink() and facts.st_uid == os.getuid():
                yield Segment(path, facts.st_size, makers[0]), (facts.st_dev, facts.st_ino)


def _files_in_use(proc: Path) -> Iterator[tuple[int, int]]:
    """Yield (device, inode) of all files that are open or mapped in a process we may look into."""
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            yield from mapped_files(text_of(process / "maps"))
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    facts = descriptor.stat()
                    yield facts.st_dev, facts.st_ino


def mapped_files(maps: str) -> set[tuple[int, int]]:
    """Return (device, inode) of every file in the text of a /proc/<pid>/maps."""
    line = r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+)"
    return {
        (os.makedev(int(major, 16), int(minor, 16)), int(inode))
        for major, minor, inode in re.findall(line, maps, re.MULTILINE)
        if inode != "0"
    }


def text_of(path: Path) -> str:
    """Return a file's text; "" if it is missing or unreadable: a fact that the kernel hides."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def gpu_driver() -> bool:
    """Return True if there is a driver of GPUs, be it one that works or not."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
