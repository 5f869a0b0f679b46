"""The doctor's judgement: from facts of recorded ranks to verdicts and fixes."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpczero.comm.mpi_library import Choice, Library, loaded, mpirun_of, why
from hpczero.doctor import facts
from hpczero.doctor.facts import Launcher, Report, Storage
from hpczero.doctor.findings import FAIL, OK, WARN, Finding, judge

GIB = 1 << 30
MPICH = Library(
    "MPICH 5.0.2", "/venv/lib/libmpi.so.12", "why", "/venv/bin/mpirun", (5, 0), "serialized", False
)


def rank(number: int = 0, size: int = 1, **changes: Any) -> Report:
    """A healthy rank on a node of 4 cores and 16 GiB, as started by the library's own mpirun."""
    report = Report(
        host="node0",
        python="3.11.7",
        executable="/venv/bin/python",
        source="/home/a user/hpczero",
        packages={
            "hpczero": "1",
            "torch": "2.6",
            "mpi4py": "4.1",
            "numba": "0.60",
            "numba-cuda": None,
            "h5py": "3.10",
            "numpy": "2",
            "pydantic": "2",
        },
        launched={"PMI": [number, size]},
        launcher=Launcher("/venv/bin/mpirun", 4),
        mpirun_on_path=None,
        cores=[0, 1, 2, 3],
        quota=None,
        physical=16 * GIB,
        available=12 * GIB,
        memory_limit=None,
        usable=12 * GIB,
        shm=(8 * GIB, 8 * GIB),
        gpu_driver=False,
        gpus=[],
        gpu_error="",
        gpu_capability=[],
        kernels={
            "cpu": {"adamw": "numba", "norm": "torch"},
            "cuda": {"adamw": "cuda", "norm": "cuda"},
        },
        storage=Storage("1.14", None, "", "/work", "ext4"),
        sees_all=True,
        wheels=["mpich"],
        library=MPICH,
        rank=number,
        size=size,
    )
    return replace(report, **changes)


def complaints(*reports: Report) -> list[Finding]:
    return [finding for finding in judge(reports) if finding.verdict != OK]


def the_complaint(*reports: Report) -> Finding:
    found = complaints(*reports)
    assert len(found) == 1, found
    assert found[0].fix, "every complaint comes with its fix"
    return found[0]


def test_healthy_ranks_get_no_complaint() -> None:
    assert complaints(rank()) == []
    assert complaints(*(rank(number, 4) for number in range(4))) == []


def test_reports_survive_the_way_through_json() -> None:
    report = rank(launcher=None, library=None, removed=[("a", 1, "MPICH")])
    assert facts.from_json(asdict(report)) == report
    assert facts.from_json(asdict(rank())) == rank()


@pytest.mark.parametrize(
    ("launched", "verdict"),
    [({}, WARN), ({"Slurm": [0, 1]}, WARN), ({"PMI": [0, 2]}, FAIL), ({"Slurm": [0, 4]}, FAIL)],
)
def test_missing_packages_matter_once_a_job_is_started(
    launched: dict[str, list[int]], verdict: str
) -> None:
    packages = rank().packages | {"torch": None, "mpi4py": None}
    finding = the_complaint(rank(packages=packages, launched=launched, library=None))
    assert (finding.topic, finding.verdict) == ("Software", verdict)
    assert "torch, mpi4py" in finding.what
    assert finding.fix == "/venv/bin/python -m pip install '/home/a user/hpczero[train]'"


def test_an_mpi_that_cannot_start() -> None:
    finding = the_complaint(rank(library=None, library_error="no libmpi.so", launched={}))
    assert (finding.topic, finding.verdict) == ("MPI", WARN)
    assert "no libmpi.so" in finding.what
    assert "hpczero[mpi]" in finding.fix
    assert the_complaint(rank(library=None, library_error="no libmpi.so")).verdict == FAIL


def test_one_rank_of_several_by_accident_is_told_the_right_mpirun() -> None:
    finding = the_complaint(
        rank(
            launched={"Open MPI": [0, 4]},
            library_error="started 4 processes, but each would run alone",
        )
    )
    assert (finding.topic, finding.verdict) == ("MPI", FAIL)
    assert finding.fix.startswith("/venv/bin/mpirun -n N")


def test_two_mpis_in_one_environment_clobber_each_other() -> None:
    finding = the_complaint(rank(wheels=["mpich", "impi-rt"]))
    assert finding.verdict == FAIL
    assert "mpich and impi-rt" in finding.what


def test_a_foreign_mpirun(tmp_path: Path) -> None:
    finding = the_complaint(rank(launcher=Launcher("/usr/bin/mpiexec.hydra", 4)))
    assert finding.verdict == WARN
    assert "/usr/bin/mpiexec.hydra" in finding.what
    assert (
        "the mpirun on the PATH"
        in the_complaint(rank(launcher=None, launched={}, mpirun_on_path="/usr/bin/mpirun")).what
    )
    assert complaints(rank(launcher=Launcher("/opt/slurm/bin/srun", 4))) == []


def test_what_must_be_the_same_on_all_ranks() -> None:
    other = rank(1, 2, host="node1", node=1, packages=rank().packages | {"torch": "2.5"})
    assert the_complaint(rank(0, 2), other).verdict == FAIL
    assert "2.5 on node1 (rank 1)" in the_complaint(rank(0, 2), other).what
    other = rank(1, 2, host="node1", node=1, packages=rank().packages | {"numpy": "1.26"})
    assert the_complaint(rank(0, 2), other).verdict == WARN
    other = rank(1, 2, host="node1", node=1, library=replace(MPICH, path="/usr/lib/libmpi.so.12"))
    assert "not the same library everywhere" in the_complaint(rank(0, 2), other).what


def test_too_many_ranks_for_the_cores() -> None:
    finding = the_complaint(*(rank(number, 5) for number in range(5)))
    assert (finding.topic, finding.verdict) == ("Cores", WARN)
    assert "5 ranks share 4 cores" in finding.what
    assert "at most 4 ranks" in finding.fix


def test_a_cpu_quota_counts_as_cores() -> None:
    finding = the_complaint(*(rank(number, 3, quota=2.0) for number in range(3)))
    assert "4 cores and a CPU quota of 2" in finding.what
    assert complaints(*(rank(number, 2, quota=2.0) for number in range(2))) == []


def test_ranks_bound_to_few_of_many_cores() -> None:
    idle = the_complaint(
        *(
            rank(number, 2, cores=[number], launcher=Launcher("/venv/bin/mpirun", 64))
            for number in range(2)
        )
    )
    assert "bound to 2 of 64 cores; 62 idle" in idle.what
    piled_up = the_complaint(
        *(
            rank(number, 2, cores=[0], launcher=Launcher("/venv/bin/mpirun", 64))
            for number in range(2)
        )
    )
    assert "2 ranks share 1 core" in piled_up.what
    assert "--bind-to none" in piled_up.fix


def test_little_memory_and_little_shared_memory() -> None:
    assert the_complaint(rank(usable=GIB // 4)).topic == "Memory"
    small = the_complaint(*(rank(number, 4, shm=(64 << 20, 60 << 20)) for number in range(4)))
    assert "60.0 MiB free of 64.0 MiB; 4 ranks may need 128.0 MiB" in small.what
    assert the_complaint(rank(shm=None)).verdict == FAIL


def test_stale_segments() -> None:
    stale = [("mpich_shm_1", 1 << 20, "MPICH"), ("sm_segment.1", 3 << 20, "Open MPI")]
    finding = the_complaint(rank(stale=stale))
    assert "2 segments of MPICH and Open MPI (4.0 MiB)" in finding.what
    assert finding.fix == "hpczero doctor --clean"
    assert complaints(rank(stale=stale, sees_all=False)) == []
    assert any("removed 2 segments" in finding.what for finding in judge([rank(removed=stale)]))


def test_the_kernels_are_named() -> None:
    (what,) = [finding.what for finding in judge([rank()]) if finding.what.startswith("kernels on")]
    assert what == "kernels on CPUs: adamw by numba, norm by torch; on GPUs: adamw norm by cuda"


def test_gpus() -> None:
    packages, aware = rank().packages | {"numba-cuda": "0.20"}, replace(MPICH, cuda_aware=True)
    gpus = partial(rank, gpu_driver=True, gpus=["A100"] * 4, gpu_capability=[8, 0])
    assert complaints(gpus(packages=packages, library=aware)) == []
    assert "not CUDA-aware" in the_complaint(gpus(packages=packages)).what
    assert (
        "torch finds none"
        in the_complaint(rank(gpu_driver=True, gpu_error="torch finds none")).what
    )
    old = the_complaint(
        gpus(packages=packages, library=aware),
        gpus(1, 2, gpu_capability=[7, 5], host="n2", packages=packages, library=aware),
    )
    assert old.what == (
        "a GPU of n2 has compute capability 7.5, and the kernels need 8.0: PyTorch's "
        "operations are taken there"
    )
    built_in = the_complaint(gpus(library=aware))
    assert built_in.fix == "/venv/bin/python -m pip install '/home/a user/hpczero[cuda]'"


def test_file_locks() -> None:
    broken = Storage("1.14", None, "Function not implemented", "/scratch", "lustre")
    assert the_complaint(rank(storage=broken)).fix == "export HDF5_USE_FILE_LOCKING=FALSE"
    assert complaints(rank(storage=replace(broken, locking="FALSE"))) == []


def test_clocks() -> None:
    finding = the_complaint(rank(0, 2), rank(1, 2, host="node1", node=1, skew=-7.25))
    assert "node0 and node1 differ by 7.2 s" in finding.what


def test_large_jobs_stay_readable() -> None:
    reports = [
        rank(number, 400, host=f"node{number // 4}", node=number // 4) for number in range(400)
    ]
    text = "\n".join(finding.what for finding in judge(reports))
    assert "400 ranks on 100 nodes" in text
    assert "... and 92 more nodes" in text
    assert len(text.splitlines()) < 50


def test_of_many_nodes_the_sick_ones_are_shown() -> None:
    reports = [
        rank(
            number,
            100,
            host=f"node{number}",
            node=number,
            shm=None if number in (50, 60) else (GIB, GIB),
        )
        for number in range(100)
    ]
    assert [finding.what for finding in complaints(*reports)] == [
        "node50: there is no /dev/shm",
        "node60: there is no /dev/shm",
    ]
    found = complaints(*(replace(report, shm=None) for report in reports))
    assert len(found) == 9
    assert (found[-1].verdict, found[-1].what) == (
        FAIL,
        "... and the same kind of finding on 92 more nodes",
    )


class TestWhyThisLibrary:
    nothing = Choice(None, None, None, False, Path("/venv"), Path("/home/u/.local"), None)

    @pytest.mark.parametrize(
        ("path", "choice", "because"),
        [
            (
                "/venv/lib/libmpi.so.12",
                nothing,
                "this Python environment, where mpi4py looks first",
            ),
            ("/home/u/.local/lib/libmpi.so.12", nothing, "user's Python packages"),
            ("/usr/lib/libmpi.so.40", nothing, "the system's"),
            (
                "/site/mpi/lib/libmpi.so.40",
                replace(nothing, search_path="/x::/site/mpi/lib"),
                "LD_LIBRARY_PATH",
            ),
            (
                "/venv/lib/libmpi.so.12",
                replace(nothing, search_path="/site/mpi/lib"),
                "this Python environment",
            ),
            (
                "/site/libmpi.so",
                replace(nothing, named="/site/libmpi.so"),
                "MPI4PY_LIBMPI=/site/libmpi.so names it",
            ),
            ("/usr/lib/libmpi.so.40", replace(nothing, kind="openmpi"), "MPI4PY_MPIABI=openmpi"),
            (
                "/opt/cray/lib/libmpi_cray.so.12",
                replace(nothing, compiled_in=True),
                "built against it",
            ),
            (
                "/x/libmpi.so.12",
                replace(nothing, preloaded="/x/libmpi.so.12", named="/y"),
                "LD_PRELOAD",
            ),
            (None, nothing, "could not be found"),
        ],
    )
    def test_the_order_of_mpi4py(self, path: str | None, choice: Choice, because: str) -> None:
        assert because in why(path, choice)

    def test_the_library_is_found_among_the_mapped_files(self) -> None:
        maps = (
            "7f00-7f10 r-xp 00000000 08:01 1 "
            "/venv/lib/python3.11/site-packages/mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so\n"
            "7f20-7f30 r-xp 00000000 08:01 2 /venv/lib/libmpi.so.12\n"
            "7f40-7f50 r--p 00000000 08:01 2 /venv/lib/libmpi.so.12\n"
        )
        assert loaded(maps) == "/venv/lib/libmpi.so.12"
        assert (
            loaded("7f20-7f30 r-xp 00000000 08:01 2 /opt/cray/pe/lib64/libmpi_cray.so.12.0.0\n")
            == "/opt/cray/pe/lib64/libmpi_cray.so.12.0.0"
        )
        assert loaded("") is None

    def test_its_mpirun_is_the_nearest_one_above(self, tmp_path: Path) -> None:
        (tmp_path / "usr/bin").mkdir(parents=True)
        (tmp_path / "usr/bin/mpiexec").touch()
        library = tmp_path / "usr/lib/x86_64-linux-gnu/libmpi.so.40"
        assert mpirun_of(str(library)) == tmp_path / "usr/bin/mpiexec"
        assert mpirun_of(None) is None
