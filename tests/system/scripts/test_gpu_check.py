"""scripts/gpu_check.sh where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import CHECKOUT

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: the script itself is run on it"
)


def check(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folders = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {
        "HPCZERO_PYTHON": sys.executable,
        "TMPDIR": str(tmp_path),
        "PATH": folders,
    } | environment
    command = ["bash", "scripts/gpu_check.sh", "--logs", str(tmp_path / "logs"), *arguments]
    return subprocess.run(
        command,
        cwd=CHECKOUT,
        env=os.environ | given,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
    )


def test_every_part_has_a_name_and_a_limit_and_the_first_takes_three_minutes(
    tmp_path: Path,
) -> None:
    lines = check(tmp_path, "--list").stdout.splitlines()
    limits = {name: int(seconds) for seconds, name in (line.split(" s  ") for line in lines)}
    assert next(iter(limits.items())) == ("first", 180)
    assert all(0 < seconds <= 300 for seconds in limits.values())
    assert len(limits) == len(lines) > 20
    rest = check(tmp_path, "--list", "--from", "tensor on 2 ranks").stdout.splitlines()
    assert rest == lines[list(limits).index("tensor on 2 ranks") :]


@pytest.mark.slow
def test_the_first_part_gets_as_far_as_saying_that_there_is_no_gpu(tmp_path: Path) -> None:
    """An nvcc in the path that belongs to no toolkit does not name one."""
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "nvcc"
    shim.write_text("#!/bin/sh\n")
    shim.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = check(tmp_path, "--dry-run", "--only", "^first$", PATH=path, CUDA_HOME="")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    log = (tmp_path / "logs" / "log.txt").read_text()
    assert "CUDA_HOME = (not set)" in log
    assert 'train.device = "cuda": 2 of 2 ranks see no GPU' in log
    assert (tmp_path / "logs" / "table.txt").read_text().split()[:3] == ["first", "no", "GPU"]


@pytest.mark.slow
def test_tests_that_would_run_on_the_cpu_do_not_count(tmp_path: Path) -> None:
    ended = check(tmp_path, "--only", "engine, preflight")
    assert ended.returncode == 1
    assert "FAIL" in (tmp_path / "logs" / "table.txt").read_text()


def test_no_part_begins_that_may_end_after_the_minutes_given(tmp_path: Path) -> None:
    ended = check(tmp_path, "--minutes", "2", "--dry-run")
    assert ended.stdout.splitlines()[-1].endswith("go on with --from 'first'")
    assert not (tmp_path / "logs" / "table.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "nowhere"], "no part is named nowhere"),
        (["--minutes", "x"], "a whole number"),
        (["--what"], "--what"),
    ],
)
def test_what_is_not_understood_is_said(tmp_path: Path, arguments: list[str], words: str) -> None:
    ended = check(tmp_path, *arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
