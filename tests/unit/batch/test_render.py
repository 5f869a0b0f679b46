"""Scripts are those of tests/unit/batch/golden, and such that schedulers and shells accept them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpczero.batch import render
from hpczero.batch.job import SubmitHost
from hpczero.batch.scheduler import SCHEDULERS
from hpczero.errors import InputError
from hpczero.text import parse_duration, scheduler_duration
from tests.support.golden import FOLDER, cases, kept, script

CASES = cases()
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def scheduler(text: str) -> str:
    return "slurm" if "#SBATCH" in text else "pbs"


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_the_one_that_is_kept(case: str, tmp_path: Path) -> None:
    assert kept(case, CASES[case], tmp_path) == (FOLDER / f"{case}.sh").read_text(), (
        "if it is meant: python -m tests.support.golden"
    )


def test_every_script_that_is_kept_has_its_case() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(CASES)


def test_every_script_is_sound_shell() -> None:
    files = sorted(map(str, FOLDER.glob("*.sh")))
    assert files
    for file in files:
        subprocess.run(["bash", "-n", file], check=True)
    program = str(SHELLCHECK) if SHELLCHECK.exists() else "shellcheck"
    found = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("case", CASES)
def test_directives_stand_together_at_the_top(case: str) -> None:
    text = (FOLDER / f"{case}.sh").read_text()
    kind = scheduler(text)
    lines = text.splitlines()
    marked = [number for number, line in enumerate(lines) if line.startswith(SCHEDULERS[kind].MARK)]
    assert marked == list(range(1, 1 + len(marked))), "nothing between them, comments least of all"
    subjects = [
        about for words in render.directives(text, kind) for about in render.subjects(words, kind)
    ]
    assert len(subjects) == len(set(subjects))
    if kind == "pbs":
        (name,) = (words[1] for words in render.directives(text, kind) if words[0] == "-N")
        assert re.fullmatch(r"[A-Za-z0-9][\x21-\x7e]{0,14}", name)


def test_only_what_was_asked_for_is_asked() -> None:
    bare = render.directives((FOLDER / "generic-slurm.sh").read_text(), "slurm")
    assert [words[0].partition("=")[0] for words in bare] == [
        "--job-name",
        "--nodes",
        "--ntasks-per-node",
        "--time",
        "--export",
    ]


@pytest.mark.parametrize(
    ("site", "extra"),
    [
        ("generic/slurm", "--nodes=7"),
        ("generic/slurm", "-N7"),
        ("generic/slurm", "--exclusive --time 5"),
        ("generic/slurm", "--job=other"),
        ("generic/slurm", "--ntasks=4"),
        ("generic/slurm", "--output=/tmp/x"),
        ("generic/slurm", "--comment 'mine"),
        ("generic/slurm", "--array=1-3"),
        ("generic/slurm", "-a 1-3"),
        ("generic/slurm", "--arr=1-3"),
        ("generic/pbs", "-J 1-3"),
        ("generic/pbs", "-N other"),
        ("generic/pbs", "-l select=4"),
        ("generic/pbs", "-lwalltime=5"),
        ("generic/pbs", "-l place=pack,walltime=5"),
        ("generic/pbs", "-o /tmp/x"),
    ],
)
def test_an_extra_directive_may_not_say_again_what_is_said(
    site: str, extra: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"batch\.extra_directives"):
        script({"site": site, "extra_directives": [extra]}, tmp_path)


@pytest.mark.parametrize(
    "resources", [["walltime=5"], ["filesystems=home,select=9"], ["ngpus=1", "ngpus=2"]]
)
def test_nor_may_a_resource(resources: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"batch\.pbs_resources"):
        script({"site": "generic/pbs", "pbs_resources": resources}, tmp_path)


PROBLEMS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"site": "perlmutter/gpu", "account": "m1", "ranks_per_node": 4, "cpus_per_rank": 64},
        ["4", "64", "256 CPUs", "128", "at most 2 ranks"],
    ),
    (
        {"site": "perlmutter/gpu", "account": "m1", "ranks_per_node": 3},
        ["3", "GPUs are not divisible", "1, 2, 4 ranks"],
    ),
    ({"site": "perlmutter/gpu", "account": "m1", "gpus_per_node": 8}, ["8", "a node has 4"]),
    ({"site": "perlmutter/gpu", "account": "m1", "qos": "debug"}, ['"1h"', "30m", "debug"]),
    (
        {"site": "perlmutter/gpu", "account": "m1", "nodes": 5000},
        ["5,000", "1,792", "debug, preempt and regular"],
    ),
    (
        {"site": "frontier", "account": "m1", "nodes": 92, "walltime": "12h"},
        ['"12h"', "6h", "92 nodes"],
    ),
    (
        {"site": "frontier", "account": "m1", "nodes": 9000, "walltime": "24h"},
        ['"24h"', "12h", "9,000 nodes"],
    ),
    (
        {"site": "polaris", "account": "m1", "nodes": 2},
        ["batch.nodes = 2", "at least 10 nodes", "debug-scaling"],
    ),
    ({"site": "frontier"}, ["batch.account is missing"]),
    (
        {"site": "frontier", "account": "m1", "ranks_per_node": 4},
        ['"closest"', "4 ranks and 8 GPUs"],
    ),
    (
        {"site": "generic/pbs", "qos": "high", "constraint": "x"},
        ["2 problems", "batch.qos", "batch.constraint", "slurm only"],
    ),
    ({"site": "generic/slurm", "pbs_chunk": "a=b"}, ["batch.pbs_chunk", "pbs only"]),
    ({"site": "generic/pbs", "launcher": "srun"}, ['"srun" belongs to Slurm']),
    (
        {"site": "generic/slurm", "launcher": "mpirun", "bind": "cores"},
        ["batch.bind", "launch_options"],
    ),
    ({"site": "generic/slurm", "walltime": "0m"}, ['"0m"']),
    ({"site": "generic/slurm", "venv": "venv"}, ["the whole path"]),
    ({"site": "derecho/cpu", "account": "m1", "mem": "300G"}, ['"300G"', "235 GB"]),
    ({"site": "generic/slurm", "env_inherit": True, "env_pass": ["A"]}, ["one of the two"]),
    ({"site": "moon"}, ['no site "moon"', "perlmutter"]),
    ({"site": "perlmutter/moon"}, ['no partition "moon"', "gpu and cpu"]),
    ({"site": "generic/slurm", "walltime": "30"}, ["batch.walltime", '"90m"']),
    ({"site": "generic/slurm", "account": "-x"}, ["batch.account", "one word"]),
]


@pytest.mark.parametrize(
    ("batch", "said"), PROBLEMS, ids=[f"{number}" for number in range(len(PROBLEMS))]
)
def test_what_cannot_be_is_refused_with_all_numbers(
    batch: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        script(batch, tmp_path)
    for words in said:
        assert words in str(refused.value)


def test_memory_counts_as_schedulers_count_it(tmp_path: Path) -> None:
    """A node of 235 GB."""
    script({"site": "derecho/cpu", "account": "m1", "mem": f"{235 * 1024}M"}, tmp_path)
    with pytest.raises(InputError, match="235 GB"):
        script({"site": "derecho/cpu", "account": "m1", "mem": f"{235 * 1024 + 1}M"}, tmp_path)


def test_ranks_that_make_no_grid_and_jobs_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"tensor\(2\) does not divide the 3 ranks.*batch.nodes = 3"
    ):
        script(
            {"site": "generic/slurm", "nodes": 3, "ranks_per_node": 1},
            _with(tmp_path, "parallel.tensor = 2"),
        )
    with pytest.raises(InputError, match=r"needs .* GB on a node .*1\.0 GB are available"):
        script(
            {"site": "generic/slurm", "nodes": 1, "mem": "1G"},
            _with(tmp_path, "model.layers = 60\nmodel.hidden = 2048"),
        )


def test_the_systems_python_is_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, put in front, would hide what the modules bring."""
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert SubmitHost.now().environment == ""
    monkeypatch.setattr(sys, "prefix", "/home/ada/venv")
    assert SubmitHost.now().environment == "/home/ada/venv"


def test_gpus_that_nobody_would_use(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r'batch.gpus_per_node = 2, and train.device = "cpu" uses none'
    ):
        script(
            {"site": "generic/slurm", "gpus_per_node": 2}, _with(tmp_path, 'train.device = "cpu"')
        )


def _with(folder: Path, text: str) -> Path:
    """Return a folder whose spec extends one with this text."""
    (folder / "base.toml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "length", "written"),
    [
        ("90m", 5400, "01:30:00"),
        ("1h30m", 5400, "01:30:00"),
        ("2d", 172800, "48:00:00"),
        ("1-12:00:00", 129600, "36:00:00"),
        ("12:00:30", 43230, "12:00:30"),
        ("90s", 90, "00:01:30"),
    ],
)
def test_durations(text: str, length: int, written: str) -> None:
    assert parse_duration(text) == length
    assert scheduler_duration(length) == written
