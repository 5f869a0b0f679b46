"""`hpczero doctor` as a user runs it: alone and under mpirun."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import CHECKOUT, Finished, hpczero, launch, mpirun

SHARED_MEMORY = Path("/dev/shm")


def doctor(*options: str, ranks: int = 0, **environment: str) -> Finished:
    launcher = mpirun(ranks) if ranks else []
    return launch([*launcher, *hpczero("doctor", *options)], 120, environment=environment)


def facts(*options: str, ranks: int = 0, **environment: str) -> dict[str, Any]:
    done = doctor("--json", *options, ranks=ranks, **environment)
    found: dict[str, Any] = json.loads(done.out)
    assert done.code == (1 if found["verdict"] == "FAIL" else 0), done
    return found


@pytest.fixture
def forgotten_segment() -> Iterator[Path]:
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("no /dev/shm to write in")
    path = SHARED_MEMORY / f"hpczero-test-{os.getpid()}"
    path.write_bytes(b"x" * 5000)
    yield path
    path.unlink(missing_ok=True)


def test_alone_it_prints_topics_verdicts_and_a_count() -> None:
    done = doctor()
    assert done.code in (0, 1), done
    assert done.err == ""
    lines = done.out.splitlines()
    topics = [line for line in lines[:-1] if line and not line.startswith(" ")]
    assert [topic for topic in topics if topic != "MPI"] == [
        "Software",
        "Ranks",
        "Cores",
        "Memory",
        "Shared memory",
        "GPUs",
        "Files",
    ]
    assert all(
        line.split()[0] in ("ok", "WARN", "FAIL")
        for line in lines
        if line.startswith("  ") and not line.startswith("   ")
    )
    assert lines[-1] == "nothing to complain about" or lines[-1].endswith(" WARN")


def test_an_mpi_that_cannot_be_loaded_is_one_finding_among_others() -> None:
    pytest.importorskip("mpi4py", reason="the base installation has no mpi4py")
    found = facts(MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert [
        finding["what"]
        for finding in found["findings"]
        if "no MPI could be started" in finding["what"]
    ]
    assert found["ranks"][0]["physical"] > 0


def test_clean_removes_what_nobody_uses_and_nothing_else(forgotten_segment: Path) -> None:
    other = SHARED_MEMORY / f"thesis-{os.getpid()}"
    other.touch()
    try:
        assert forgotten_segment.name in [name for name, _, _ in facts()["ranks"][0]["stale"]]
        assert forgotten_segment.exists()
        with forgotten_segment.open("rb"):
            facts("--clean")
            assert forgotten_segment.exists(), "a living process has it open"
        assert forgotten_segment.name in [
            name for name, _, _ in facts("--clean")["ranks"][0]["removed"]
        ]
        assert not forgotten_segment.exists()
        assert other.exists()
    finally:
        other.unlink()


def test_under_mpirun_one_rank_speaks_for_all() -> None:
    found = facts(ranks=2)
    assert [(rank["rank"], rank["size"]) for rank in found["ranks"]] == [(0, 2), (1, 2)]
    libraries = {rank["library"]["path"] for rank in found["ranks"]}
    assert len(libraries) == 1
    assert Path(libraries.pop()).is_relative_to(Path(mpirun(2)[0]).parent.parent), (
        "the launcher's own library"
    )
    launch = [
        finding
        for finding in found["findings"]
        if "its mpirun is the one in use" in finding["what"]
    ]
    assert [finding["verdict"] for finding in launch] == ["ok"]
    assert (
        "\n2 ranks on 1 node\n"
        in "\n" + "\n".join(finding["what"] for finding in found["findings"]) + "\n"
    )


@pytest.mark.slow
def test_more_ranks_than_cores_are_a_warning() -> None:
    cores = len(os.sched_getaffinity(0))
    if cores > 4:
        pytest.skip("too many cores to have more ranks than them")
    found = facts(ranks=cores + 1)
    assert [
        finding["fix"]
        for finding in found["findings"]
        if finding["topic"] == "Cores" and finding["verdict"] == "WARN"
    ]


@pytest.mark.slow
def test_one_task_of_several_by_accident_is_a_failure_with_the_fix() -> None:
    pytest.importorskip("mpi4py", reason="the base installation has no mpi4py")
    done = doctor(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="4")
    assert done.code == 1
    assert "4 processes" in done.out
    assert "fix: " in done.out


@pytest.mark.parametrize("ranks", [0, 2])
def test_without_torch_it_says_all_the_rest(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="the base installation has no mpi4py")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    path = os.pathsep.join(
        filter(None, [str(tmp_path), str(CHECKOUT), os.environ.get("PYTHONPATH")])
    )
    done = doctor(ranks=ranks, PYTHONPATH=path)
    assert done.code in (0, 1), done
    assert (done.err, done.left) == ("", [])
    assert done.out.count("thread level: ") == 1
    assert "no MPI could be started" not in done.out
