"""scripts/slurm_testbed.sh: two nodes that run jobs, and nothing left behind."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import launch
from tests.support.slurm import CANNOT, SCRIPT, await_that, new_name, running, the_script


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with running() as variables:
        yield variables


def run(slurm: dict[str, str], *words: str, folder: Path | None = None) -> str:
    variables = {**os.environ, **slurm}
    return subprocess.run(
        words, env=variables, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def mentioning(configuration: str) -> list[str]:
    """Processes of the testbed."""
    entry, found = f"SLURM_CONF={configuration}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_a_job_runs_on_both_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\nsrun --nodes=2 bash -c 'echo $SLURMD_NODENAME'\n"
    )
    run(slurm, "sbatch", "--wait", "--nodes=2", "--output=log", "job.sh", folder=tmp_path)
    assert sorted((tmp_path / "log").read_text().split()) == ["n1", "n2"]


def test_status_says_what_there_is(slurm: dict[str, str]) -> None:
    name = slurm["SLURM_CONF"].split("/")[-2].rpartition("-")[2]
    said = the_script("status", name)
    assert said.code == 0
    assert "n1 main* idle" in said.out


def test_up_a_second_time_takes_the_one_that_is_up(slurm: dict[str, str]) -> None:
    name = slurm["SLURM_CONF"].split("/")[-2].rpartition("-")[2]
    before = mentioning(slurm["SLURM_CONF"])
    again = the_script("up", name)
    assert (again.code, again.err) == (0, "")
    assert again.out == f"export SLURM_CONF={slurm['SLURM_CONF']}\n"
    assert sorted(mentioning(slurm["SLURM_CONF"])) == sorted(before)
    other = launch([SCRIPT, "up", "--name", name, "--cpus", "3"], seconds=60)
    assert other.code == 1
    assert "has other nodes" in other.err
    assert the_script("status", name).code == 0, "it was left as it is"


@pytest.mark.slow
def test_a_folder_without_a_slurm_in_it_is_said(tmp_path: Path) -> None:
    name = new_name()
    folder = tmp_path / f"hpczero-slurm-{os.getuid()}-{name}"
    folder.mkdir()
    command = [SCRIPT, "up", "--name", name]
    made = launch(command, seconds=60, environment={"HPCZERO_TESTBEDS": str(tmp_path)})
    if made.code == CANNOT:
        pytest.skip(made.err.strip())
    assert made.code == 1
    assert f"there is a testbed in {folder}, and it does not answer" in made.err
    assert folder.exists()


@pytest.mark.slow
def test_nothing_is_left_behind_though_a_job_runs(tmp_path: Path) -> None:
    with running() as slurm:
        (tmp_path / "job.sh").write_text(
            "#!/bin/bash\ntrap '' TERM\nsrun sleep 600 &\nwhile :; do sleep 1; done\n"
        )
        run(slurm, "sbatch", "--output=log", "job.sh", folder=tmp_path)
        await_that(
            lambda: "R" in run(slurm, "squeue", "--noheader", "--format=%t"), 60, "the job runs"
        )
        assert len(mentioning(slurm["SLURM_CONF"])) > 4
    assert mentioning(slurm["SLURM_CONF"]) == []
    assert not Path(slurm["SLURM_CONF"]).parent.exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for program in ("bash", "env", "realpath", "basename", "id"):
        (tmp_path / program).symlink_to(Path("/usr/bin") / program)
    name = new_name()
    made = the_script("up", name, path=str(tmp_path))
    if made.code == 0:  # its daemons are in /usr/sbin, which the script looks into itself
        the_script("down", name)
    assert made.code == CANNOT
    assert "not found: " in made.err
    assert "apt-get install" in made.err


def test_down_twice_and_status_of_nothing() -> None:
    assert the_script("down", new_name()).code == 0
    assert the_script("status", new_name()).code == 1
    assert the_script("up", "Not a name").code == 2
