"""Facts about this computer that need neither MPI nor torch.

Everything is read below `root`, so that the tests can lay out a recorded computer in a folder.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from hpczero import safe_files

ROOT = Path("/")

# ---------------------------------------------------------------------------------------------------------------- identity


def boot_identity(root: Path = ROOT) -> str:
    """A name for the running kernel: equal in all its containers, different on every other computer."""
    return _text(root / "proc/sys/kernel/random/boot_id").strip()


# The kernel's file locks on these reach every process that can see the files.
_LOCAL_FILE_SYSTEMS = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "tmpfs",
    "ramfs",
    "overlay",
    "jfs",
    "bcachefs",
}


def is_local_file_system(path: Path, root: Path = ROOT) -> bool:
    """Whether `path` lies on a disk or memory of this computer, rather than on a file server."""
    return file_system_type(path, root) in _LOCAL_FILE_SYSTEMS


def file_system_type(path: Path, root: Path = ROOT) -> str:
    """The type of the file system that holds `path` ("ext4", "nfs4", "lustre"); "" where it cannot be told."""
    resolved = path.resolve()
    holding = [mount for mount in _mounts(root) if resolved.is_relative_to(mount.point)]
    longest = max((len(str(mount.point)) for mount in holding), default=0)
    return next(
        (mount.kind for mount in reversed(holding) if len(str(mount.point)) == longest), ""
    )  # the last one mounted is seen


@dataclass(frozen=True)
class _Mount:
    root: Path  # which folder of the file system is mounted
    point: Path
    kind: str
    options: frozenset[str]


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(" "), after.split(" ", 2)  # a field may be empty
        yield _Mount(
            _unescaped(fields[3]), _unescaped(fields[4]), kind, frozenset(options.split(","))
        )


def _unescaped(field: str) -> Path:
    """The kernel writes a space in a path as \\040."""
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field))


# ----------------------------------------------------------------------------------------------------------------- cgroups


def _cgroup_folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version (1 or 2) and folder of the cgroups that this process belongs to, from its own up to the highest that is visible."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if (number, controllers) == ("0", "") else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        for mount in _mounts(root):
            if mount.kind != ("cgroup2" if version == 2 else "cgroup") or (
                version == 1 and controller not in mount.options
            ):
                continue
            top = root / mount.point.relative_to("/")
            inside = (
                Path(path).relative_to(mount.root)
                if Path(path).is_relative_to(mount.root)
                else Path()
            )
            folder = top if ".." in inside.parts else top / inside
            yield from (
                (version, parent)
                for parent in (folder, *folder.parents)
                if parent.is_relative_to(top)
            )
            break


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many cores' worth of time the cgroups allow; None: as many as there are."""
    quotas = []
    for version, folder in _cgroup_folders("cpu", root):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        else:
            quota, period = (
                _text(folder / "cpu.cfs_quota_us").strip(),
                _text(folder / "cpu.cfs_period_us").strip(),
            )
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
    """The limit that leaves the least room; None: no limit."""
    return min(memory_limits(root), key=lambda limit: limit.free, default=None)


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Of all cgroups that this process belongs to."""
    limits = []
    for version, folder in _cgroup_folders("memory", root):
        limit_file, used_file, prefix = (
            ("memory.max", "memory.current", "")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
        if limit.isdigit() and int(limit) < 1 << 60:  # version 1 writes "no limit" as almost 2^63
            counts = _fields(_text(folder / "memory.stat"))
            reclaimable = counts.get(f"{prefix}inactive_file", 0) + counts.get(
                f"{prefix}active_file", 0
            )
            limits.append(MemoryLimit(int(limit), max(0, int(used or 0) - reclaimable), folder))
    return limits


# ------------------------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Memory:
    """Bytes: what the computer has, what is free now, and what this process's cgroups allow."""

    physical: int
    available: int
    limit: MemoryLimit | None

    @property
    def usable(self) -> int:
        """What this node's ranks together may still take."""
        return min(self.available, self.limit.free) if self.limit else self.available


def memory(root: Path = ROOT) -> Memory:
    kilobytes = _fields(_text(root / "proc/meminfo"))
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
    """Size and free bytes of the file system that shared windows live in; None: there is none."""
    try:
        space = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(space.total, space.free)


def _fields(text: str) -> dict[str, int]:
    """`MemTotal:  123 kB` and `inactive_file 123`: name -> number."""
    return {
        name.rstrip(":"): int(number)
        for name, number in re.findall(r"^(\S+)\s+(\d+)", text, re.MULTILINE)
    }


# ------------------------------------------------------------------------------------------------------------------- cores


def usable_cores(root: Path = ROOT) -> set[int]:
    """The cores that this process may run on, each named by its first hardware thread: two threads of one core count once."""
    return {_first_thread(cpu, root) for cpu in os.sched_getaffinity(0)}


def _first_thread(cpu: int, root: Path) -> int:
    siblings = re.match(
        r"\d+", _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    )
    return int(siblings[0]) if siblings else cpu


def threads_per_rank(affinities: Sequence[Set[int]], quota: float | None = None) -> list[int]:
    """How many threads each rank of a node runs, from the cores that each may use and the cgroups' quota for all of them.

    A core counts for a rank by one n-th where n ranks may use it: bound ranks keep what is theirs, unbound ones share. At least one each.
    """
    ranks_on: dict[int, int] = {}
    for cores in affinities:
        for core in cores:
            ranks_on[core] = ranks_on.get(core, 0) + 1
    shares = [
        sum((Fraction(1, ranks_on[core]) for core in cores), Fraction()) for cores in affinities
    ]
    allowed = (
        Fraction(quota).limit_denominator(10**6) if quota is not None else Fraction(len(ranks_on))
    )
    total = sum(shares, Fraction())
    if total > allowed:
        shares = [share * allowed / total for share in shares]
    return [max(1, int(share)) for share in shares]


# --------------------------------------------------------------------------------------------------- shared-memory segments

_SEGMENTS = {
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
    path: Path
    size: int
    made_by: str


def stale_segments(folder: Path = ROOT / "dev/shm", proc: Path = ROOT / "proc") -> list[Segment]:
    """Shared-memory files of this user, made by hpczero or an MPI, that no living process has mapped or open.

    The list of files is taken before the processes are looked at: whoever made a file meanwhile is not judged.
    """
    found = [(segment, identity) for segment, identity in _segments(folder)]
    if not found:
        return []
    in_use = set(_files_in_use(proc))
    return [segment for segment, identity in found if identity not in in_use]


def remove_stale_segments(
    makers: Set[str] | None = None, folder: Path = ROOT / "dev/shm", proc: Path = ROOT / "proc"
) -> tuple[list[Segment], list[Segment]]:
    """Remove those that these (None: all) have made, if all who may use them can be seen.

    Return what stays and what is gone. One that cannot be removed stays on the list.
    """
    stale, gone = stale_segments(folder, proc), []
    for segment in stale if sees_all_users_of(folder, proc) else ():
        if makers is None or segment.made_by in makers:
            with contextlib.suppress(OSError):
                safe_files.remove(segment.path)
                gone.append(segment)
    return [segment for segment in stale if segment not in gone], gone


def sees_all_users_of(folder: Path = ROOT / "dev/shm", proc: Path = ROOT / "proc") -> bool:
    """Whether all processes that may use the segments in `folder` can be seen from here.

    In a container with processes of its own, that is so only if `folder` too is the container's own; a private IPC namespace tells.
    """
    first_pid_namespace, first_ipc_namespace = 4026531836, 4026531839  # constants of the kernel
    try:
        pid, ipc = (
            int(re.sub(r"\D", "", os.readlink(proc / "self/ns" / kind))) for kind in ("pid", "ipc")
        )
    except (OSError, ValueError):
        return False
    return folder.is_dir() and (pid == first_pid_namespace or ipc != first_ipc_namespace)


def _segments(folder: Path) -> Iterator[tuple[Segment, tuple[int, int]]]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        maker = next(
            (maker for maker, pattern in _SEGMENTS.items() if re.fullmatch(pattern, path.name)),
            None,
        )
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            if maker and path.is_file() and not path.is_symlink() and facts.st_uid == os.getuid():
                yield Segment(path, facts.st_size, maker), (facts.st_dev, facts.st_ino)


def _files_in_use(proc: Path) -> Iterator[tuple[int, int]]:
    """(device, inode) of all files that the processes we may look into have mapped or open."""
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            yield from mapped_files(_text(process / "maps"))
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    facts = descriptor.stat()
                    yield facts.st_dev, facts.st_ino


def mapped_files(maps: str) -> set[tuple[int, int]]:
    """(device, inode) of every file in the text of a /proc/<pid>/maps."""
    found = re.findall(
        r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+)", maps, re.MULTILINE
    )
    return {
        (os.makedev(int(major, 16), int(minor, 16)), int(inode))
        for major, minor, inode in found
        if inode != "0"
    }


def _text(path: Path) -> str:
    """A file's text; "" where there is none or it may not be read: a fact that the kernel does not tell."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def gpu_driver() -> bool:
    """Whether there is a driver of GPUs, be it one that works or not."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
