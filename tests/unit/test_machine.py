"""Facts about computers, read from folders laid out like them."""

import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpczero import machine, processors

GIB = 1 << 30
V2_MOUNT = "30 24 0:26 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 {inside} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def lay_out(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class TestCgroupVersion2:
    def computer(
        self, root: Path, files: Mapping[str, str], path: str = "/job/step/task", inside: str = "/"
    ) -> Path:
        cgroups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        return lay_out(
            root,
            {
                "proc/self/cgroup": f"0::{path}\n",
                "proc/self/mountinfo": V2_MOUNT.format(inside=inside),
                **cgroups,
            },
        )

    def test_the_tightest_parent_decides(self, tmp_path: Path) -> None:
        root = self.computer(
            tmp_path,
            {
                "cpu.max": "max 100000\n",
                "job/cpu.max": "150000 100000\n",
                "job/step/cpu.max": "400000 100000\n",
                "job/step/task/cpu.max": "max 100000\n",
                "job/memory.max": f"{4 * GIB}\n",
                "job/memory.current": f"{3 * GIB}\n",
                "job/memory.stat": f"anon 5\ninactive_file {GIB - 7}\nactive_file 7\n",
                "job/step/memory.max": f"{8 * GIB}\n",
                "job/step/memory.current": f"{GIB}\n",
                "job/step/task/memory.max": "max\n",
            },
        )
        assert machine.cpu_quota(root) == 1.5
        limit = machine.memory_limit(root)
        assert limit is not None
        assert (limit.limit, limit.used, limit.free, limit.folder.name) == (
            4 * GIB,
            2 * GIB,
            2 * GIB,
            "job",
        )

    def test_what_leaves_the_least_room_wins_over_the_smaller_limit(self, tmp_path: Path) -> None:
        files = {
            "job/memory.max": f"{8 * GIB}",
            "job/memory.current": f"{7 * GIB}",
            "job/step/memory.max": f"{4 * GIB}",
            "job/step/memory.current": "0",
        }
        limit = machine.memory_limit(self.computer(tmp_path, files))
        assert limit is not None
        assert limit.free == GIB

    def test_no_limit(self, tmp_path: Path) -> None:
        root = self.computer(tmp_path, {"job/cpu.max": "max 100000\n", "job/memory.max": "max\n"})
        assert machine.cpu_quota(root) is None
        assert machine.memory_limit(root) is None

    @pytest.mark.parametrize(
        ("path", "inside"),
        [
            ("/", "/"),
            ("/docker/abc", "/docker/abc"),
            ("/../../host/part", "/"),
            ("/elsewhere", "/docker/abc"),
        ],
    )
    def test_a_container_sees_its_own_part_only(
        self, tmp_path: Path, path: str, inside: str
    ) -> None:
        root = self.computer(
            tmp_path,
            {"cpu.max": "50000 100000\n", "memory.max": f"{GIB}\n", "memory.current": "0\n"},
            path,
            inside,
        )
        (tmp_path / "sys/fs/cpu.max").write_text("1 100000\n")  # above the mount: not a cgroup
        assert machine.cpu_quota(root) == 0.5
        assert machine.memory_limit(root) == machine.MemoryLimit(GIB, 0, root / "sys/fs/cgroup")


class TestCgroupVersion1:
    def computer(self, root: Path, files: Mapping[str, str]) -> Path:
        text = (
            "12:cpu,cpuacct:/slurm/job_7/step_0\n9:memory:/slurm/job_7/step_0\n"
            "1:name=systemd:/x\n0::/\n"
        )
        cgroups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        return lay_out(
            root,
            {
                "proc/self/cgroup": text,
                "proc/self/mountinfo": V1_MOUNTS.format(inside="/"),
                **cgroups,
            },
        )

    def test_the_tightest_parent_decides(self, tmp_path: Path) -> None:
        root = self.computer(
            tmp_path,
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slurm/job_7/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/slurm/job_7/memory.usage_in_bytes": f"{GIB}\n",
                "memory/slurm/job_7/memory.stat": (
                    f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n"
                ),
                "memory/slurm/job_7/step_0/memory.limit_in_bytes": "9223372036854771712\n",
            },
        )
        assert machine.cpu_quota(root) == 2.5
        assert machine.memory_limit(root) == machine.MemoryLimit(
            2 * GIB, GIB // 2, root / "sys/fs/cgroup/memory/slurm/job_7"
        )

    def test_no_limit(self, tmp_path: Path) -> None:
        root = self.computer(tmp_path, {"memory/memory.limit_in_bytes": "9223372036854771712\n"})
        assert machine.cpu_quota(root) is None
        assert machine.memory_limit(root) is None


def test_usable_memory_is_the_smaller_of_what_is_free_and_what_is_allowed(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/meminfo": (
                "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"
            )
        },
    )
    free = machine.memory(tmp_path)
    assert (free.physical, free.available, free.usable) == (16 * GIB, 8 * GIB, 8 * GIB)
    limited = machine.Memory(16 * GIB, 8 * GIB, machine.MemoryLimit(4 * GIB, GIB, tmp_path))
    assert limited.usable == 3 * GIB


def test_a_computer_that_tells_nothing_breaks_nothing(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None
    assert machine.memory(tmp_path).physical == 0
    assert machine.shared_memory(tmp_path / "none") is None
    assert machine.stale_segments(tmp_path / "none") == []
    assert machine.boot_identity(tmp_path) == ""
    assert machine.file_system_type(tmp_path, tmp_path) == ""
    assert not machine.is_local_file_system(tmp_path, tmp_path)


def test_this_computer_has_memory_and_cores() -> None:
    memory = machine.memory()
    assert memory.physical > memory.available > 0
    assert processors.usable_cores() <= os.sched_getaffinity(0)
    assert processors.usable_cores()
    assert machine.boot_identity()


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    data = tmp_path / "da ta"
    data.mkdir()
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:5 / {tmp_path!s} rw - lustre mds:/x rw,flock\n"
        f"3 2 0:6 / {str(data).replace(' ', chr(92) + '040')} rw shared:1 - nfs4 server:/y rw\n"
    )
    root = lay_out(tmp_path / "root", {"proc/self/mountinfo": mounts})
    assert machine.file_system_type(data / "run", root) == "nfs4"
    assert machine.file_system_type(tmp_path / "dat", root) == "lustre"
    assert machine.file_system_type(Path("/nowhere"), root) == "ext4"
    assert machine.is_local_file_system(Path("/nowhere"), root)
    assert not machine.is_local_file_system(data, root)


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    here = os.sched_getaffinity(0)
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{min(here)},99\n"
        for cpu in here
    }
    assert processors.usable_cores(lay_out(tmp_path, siblings)) == {min(here)}


@pytest.mark.parametrize(
    ("affinities", "quota", "threads"),
    [
        ([{0, 1}], None, [2]),
        ([{0, 1}, {0, 1}], None, [1, 1]),
        ([{0, 1}] * 3, None, [1, 1, 1]),
        ([set(range(8))] * 3, None, [2, 2, 2]),
        ([{0, 1, 2}, {3}], None, [3, 1]),  # bound: everybody keeps what is theirs
        ([{0}, {0, 1, 2, 3}], None, [1, 3]),  # one bound, the other one takes the rest
        ([set(range(16))] * 2, 4.0, [2, 2]),  # the quota is for all of them
        ([set(range(16))], 2.5, [2]),
        ([{0, 1}, {2, 3}], 1.0, [1, 1]),  # never less than one
        ([set()], None, [1]),
        ([], None, []),
    ],
)
def test_threads_per_rank(
    affinities: list[set[int]], quota: float | None, threads: list[int]
) -> None:
    assert processors.threads_per_rank(affinities, quota) == threads


def test_stale_segments_are_ours_by_name_and_nobodys_by_use(tmp_path: Path) -> None:
    for name in (
        "mpich_shm_1",
        "hpczero-7",
        "sm_segment.host.0.1",
        "psm3_shm.0",
        "thesis.txt",
        "mpich_shm_mapped",
        "vader_segment.open",
    ):
        (tmp_path / name).write_bytes(b"x" * 4096)
    (tmp_path / "mpich_shm_link").symlink_to(tmp_path / "thesis.txt")
    with (tmp_path / "mpich_shm_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with (tmp_path / "vader_segment.open").open("rb"):
        found = machine.stale_segments(tmp_path)
    assert {segment.path.name: segment.made_by for segment in found} == {
        "mpich_shm_1": "MPICH",
        "hpczero-7": "hpczero",
        "sm_segment.host.0.1": "Open MPI",
        "psm3_shm.0": "PSM",
    }
    assert {segment.size for segment in found} == {4096}
    mapped.close()
    assert {segment.path.name for segment in machine.stale_segments(tmp_path)} >= {
        "mpich_shm_mapped",
        "vader_segment.open",
    }


def test_stale_segments_of_some_makers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["hpczero-7", "mpich_shm_1", "mpich_shm_open", "sm_segment.host.0.1"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(machine, "sees_all_users_of", lambda *_: False)
    assert machine.remove_stale_segments({"MPICH"}, tmp_path)[1] == []
    monkeypatch.setattr(machine, "sees_all_users_of", lambda *_: True)
    with (tmp_path / "mpich_shm_open").open("rb"):
        left, gone = machine.remove_stale_segments({"MPICH"}, tmp_path)
    assert [segment.path.name for segment in gone] == ["mpich_shm_1"]
    assert [segment.path.name for segment in left] == ["hpczero-7", "sm_segment.host.0.1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*names} - {"mpich_shm_1"})
    assert len(machine.remove_stale_segments(None, tmp_path)[1]) == 3


def test_another_users_segments_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpich_shm_1").touch()
    monkeypatch.setattr(machine.os, "getuid", lambda: 12345678)
    assert machine.stale_segments(tmp_path) == []


@pytest.mark.parametrize(
    ("pid", "ipc", "seen"),
    [
        (4026531836, 4026531839, True),
        (4026531836, 99, True),
        (99, 98, True),
        (99, 4026531839, False),
        (None, None, False),
    ],
)
def test_a_container_that_shares_the_hosts_memory_cannot_judge(
    tmp_path: Path, pid: int | None, ipc: int | None, seen: bool
) -> None:
    namespaces = tmp_path / "self" / "ns"
    namespaces.mkdir(parents=True)
    for kind, number in (("pid", pid), ("ipc", ipc)):
        if number:
            (namespaces / kind).symlink_to(f"{kind}:[{number}]")
    assert machine.sees_all_users_of(tmp_path, tmp_path) is seen


def test_maps_are_read_by_device_and_inode() -> None:
    maps = (
        "7f00-7f10 rw-s 00000000 00:17 42                         /dev/shm/mpich_shm_1 (deleted)\n"
        "7f20-7f30 rw-p 00000000 00:00 0 \n"
        "7f40-7f50 r-xp 00001000 103:0a 4711 /usr/lib/with space.so\n"
    )
    assert machine.mapped_files(maps) == {
        (os.makedev(0, 0x17), 42),
        (os.makedev(0x103, 0x0A), 4711),
    }


@pytest.mark.parametrize(
    ("line", "bf16", "fp16"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_tile", True, False),
        ("flags\t\t: fpu avx2 avx512f", False, False),
        ("Features\t: fp asimd asimdhp", False, True),
        ("model name\t: of an unknown kind", True, True),
    ],
)
def test_products_that_a_processor_has(tmp_path: Path, line: str, bf16: bool, fp16: bool) -> None:
    root = lay_out(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{line}\n"})
    found = [processors.has_products(precision, root) for precision in ("bf16", "fp16", "fp32")]
    assert found == [bf16, fp16, True]


def test_seconds_in_which_threads_waited_for_a_core(tmp_path: Path) -> None:
    assert processors.waited_for_core(tmp_path) == processors.helpers_waited_for_core(tmp_path) == 0
    own = str(threading.get_native_id())
    waits = {own: "5 9000000000 7\n", "1": "5 2500000000 7\n", "2": "8 500000000 9\n", "ended": ""}
    files = {f"proc/self/task/{name}/schedstat": text for name, text in waits.items()}
    root = lay_out(tmp_path, files | {"proc/thread-self/schedstat": waits[own]})
    assert processors.waited_for_core(root) == 9
    assert processors.helpers_waited_for_core(root) == 3
