"""check, init and spec as a user runs them: in a process of their own, without anything that a
login node lacks.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.launch import BLOCKER, HEAVY

Hpczero = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hpczero(tmp_path: Path) -> Hpczero:
    """Runs the program in an empty folder; importing any of `without` there fails."""

    def run(*arguments: str, without: Sequence[str] = HEAVY) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", BLOCKER.format(blocked=list(without)), *arguments]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_help_imports_nothing_but_python(hpczero: Hpczero) -> None:
    for arguments in (["--help"], ["check", "--help"], ["run", "--help"], ["--version"]):
        result = hpczero(*arguments, without=[*HEAVY, "pydantic", "pydantic_core"])
        assert (result.returncode, result.stderr) == (0, "")
        assert "hpczero" in result.stdout


def test_the_blocker_blocks(hpczero: Hpczero) -> None:
    assert "imported pydantic" in hpczero("spec", without=["pydantic"]).stderr


def test_from_nothing_to_a_checked_job(hpczero: Hpczero, tmp_path: Path) -> None:
    result = hpczero("init", "first job.toml")
    assert result.returncode == 0
    assert "hpczero check 'first job.toml'" in result.stdout
    result = hpczero(
        "check",
        "first job.toml",
        "--ranks",
        "6",
        "--ranks-per-node",
        "2",
        "--set",
        "model.layers=2",
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "first job.toml is a valid job" in result.stdout
    assert "1,678,592 parameters; layers 2, hidden 256" in result.stdout
    assert "100 steps = 204,800 tokens" in result.stdout
    assert "6 ranks on 3 nodes" in result.stdout
    assert "each of the 6 data ranks takes 1 micro-batch of 2 or 3 sequences" in result.stdout
    assert re.search(
        r"memory    about \S+ [MG]B on a node of 2 ranks .*, \S+ MB a rank:\n +runtime 250.0 MB, ",
        result.stdout,
    )
    changed = result.stdout.partition("not the default:\n")[2].split()
    assert changed == [
        "name",
        "=",
        '"first-job"',
        "first",
        "job.toml:2",
        "model.layers",
        "=",
        "2",
        "--set",
        "model.layers=2",
    ]
    before = (tmp_path / "first job.toml").read_text()
    result = hpczero("init", "first job.toml")
    assert (result.returncode, result.stdout) == (2, "")
    assert "exists already and is left as it is" in result.stderr
    assert (tmp_path / "first job.toml").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["first job.toml"], (
        "nothing else is written"
    )


def test_init_where_nothing_can_be_written(hpczero: Hpczero) -> None:
    for path in ("missing/spec.toml", "."):
        result = hpczero("init", path)
        assert result.returncode == 2
        assert result.stderr.startswith(f"hpczero: {path} ")
        assert "Traceback" not in result.stderr


def test_mistakes_end_with_2_and_one_message(hpczero: Hpczero, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('name = "\\u001b[31mred"\n[trian]\nsteps = 5\n')
    result = hpczero("check", "job.toml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[0] == "hpczero: 2 mistakes in job.toml:"
    assert '  job.toml:1: name = "\\x1b[31mred": must be text' in result.stderr
    assert "  job.toml:2: [trian]: unknown table; did you mean [train]?" in result.stderr
    result = hpczero("check", "nowhere.toml")
    assert (result.returncode, result.stderr) == (2, "hpczero: nowhere.toml does not exist\n")


def test_explain_says_where_a_value_came_from(hpczero: Hpczero, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[train]\nsteps = 5\n")
    (tmp_path / "job.toml").write_text('extends = "base.toml"\n\n[train]\nsteps = 6\n')
    result = hpczero("check", "job.toml", "--explain", "train.steps", "--set", "train.steps=7")
    assert result.returncode == 0
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()[-4:]] == [
        ["from", "--set train.steps=7"],
        ["instead", "of  6  (job.toml:4)"],
        ["instead", "of  5  (base.toml:2)"],
        ["instead", "of  100  (default)"],
    ]
    answer = json.loads(hpczero("check", "job.toml", "--explain", "train.steps", "--json").stdout)
    assert (answer["value"], answer["source"], answer["role"]) == (6, "job.toml:4", "changeable")
    for key, help_ in (
        ("train.stesp", "did you mean train.steps?"),
        ("train", "its keys are train.steps, "),
        ("\x1b[1m", "hpczero spec prints"),
    ):
        result = hpczero("check", "job.toml", "--explain", key)
        assert (result.returncode, result.stdout) == (2, "")
        assert help_ in result.stderr
        assert "\x1b" not in result.stderr


def test_a_layout_that_cannot_be_and_one_that_cannot_run_yet(
    hpczero: Hpczero, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text("parallel.tensor = 2\n")
    result = hpczero("check", "job.toml", "--ranks", "5")
    assert result.returncode == 2
    assert "tensor(2) does not divide the 5 ranks" in result.stderr
    result = hpczero("check", "job.toml", "--ranks", "4")
    assert result.returncode == 0
    assert "note: parallel.tensor" not in result.stdout
    result = hpczero("check", "job.toml", "--ranks", "40", "--set", "parallel.tensor=1")
    assert (
        "note: train.global_batch = 16 leaves 24 of the 40 data ranks without a sequence"
        in result.stdout
    )
    result = hpczero(
        "check",
        "job.toml",
        "--ranks",
        "12",
        "--set",
        "parallel.tensor=1",
        "--set",
        "train.micro_batch=1",
    )
    assert "takes 2 micro-batches of 0 or 1 sequences" in result.stdout
    assert "without a sequence" not in result.stdout, "every rank has one at least"
    for arguments in (
        ["--ranks", "0"],
        ["--ranks", "-4"],
        ["--ranks", "4", "--ranks-per-node", "0"],
        ["--ranks-per-node", "4"],
    ):
        assert hpczero("check", "job.toml", *arguments).returncode == 2, arguments


@pytest.mark.parametrize(
    ("per_node", "shared", "said"),
    [("3", "true", True), ("3", "auto", True), ("3", "false", False), ("4", "true", False)],
)
def test_why_the_ranks_of_a_node_keep_nothing_together(
    hpczero: Hpczero, tmp_path: Path, per_node: str, shared: str, said: bool
) -> None:
    (tmp_path / "job.toml").write_text("parallel = {tensor = 2, order = 'tensor,data,pipeline'}\n")
    result = hpczero(
        "check",
        "job.toml",
        "--ranks",
        "6",
        "--ranks-per-node",
        per_node,
        "--set",
        f"zero.node_shared={shared}",
    )
    assert result.returncode == 0
    assert (
        "shares nothing: nodes divide the data ranks of the tensor ranks differently"
        in result.stdout
    ) == said


TOPOLOGY = """
model = {layers = 7, hidden = 48, heads = 6, seq_len = 33}
train = {global_batch = 5, micro_batch = 2}
parallel = {tensor = 4, pipeline = 4}
"""


def test_the_map_and_the_bytes(hpczero: Hpczero, tmp_path: Path) -> None:
    """32 ranks = 4 stages x 4 tensor x 2 data; inside nodes of 8 the tensor ranks stay together,
    and who else does depends on the bytes.
    """
    (tmp_path / "job.toml").write_text(TOPOLOGY)
    result = hpczero("check", "job.toml", "--ranks", "32", "--ranks-per-node", "8")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert (
        "32 ranks on 4 nodes: tensor(4) x data(2) x pipeline(4), innermost axis first"
        in result.stdout
    )
    assert (
        "nodes     node 0: ranks 0-7  [stage 0, data 0-1, tensor 0-3]\n"
        "            node 1: ranks 8-15  [stage 1, "
    ) in result.stdout
    assert re.search(
        r"stages    0: embedding, blocks 0-1 \([\d,]+ parameters a rank\)\n", result.stdout
    )
    assert "3: block" in result.stdout
    tensor = next(line for line in lines if line[:2] == ["tensor", "all_reduce"])
    assert (tensor[4:6], tensor[8:]) == (["0", "B"], ["0", "B"]), "nothing of it between nodes"
    layout = json.loads(
        hpczero("check", "job.toml", "--ranks", "32", "--ranks-per-node", "8", "--json").stdout
    )["layout"]
    assert (layout["order"], layout["axes"]) == (
        "tensor,data,pipeline",
        {"tensor": 4, "data": 2, "pipeline": 4},
    )
    assert layout["nodes"][3] == {
        "node": 3,
        "ranks": list(range(24, 32)),
        "places": [{"pipeline": [3, 3], "data": [0, 1], "tensor": [0, 3]}],
    }
    names = [name for stage in layout["stages"] for chunk in stage["chunks"] for name in chunk]
    assert names == ["embedding", *(f"blocks.{index}" for index in range(7)), "head"]
    assert layout["sent"]["pipeline"]["send"]["all"]["between"] == 2 * 3 * 4 * 5 * 33 * 48 * 2, (
        "both ways, 3 boundaries, 4 tensor ranks, 5 sequences"
    )
    assert layout["memory"]["ranks_on_node"] == 8


def test_thousands_of_ranks_stay_short(hpczero: Hpczero, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TOPOLOGY)
    result = hpczero("check", "job.toml", "--ranks", "4096", "--ranks-per-node", "7")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 250
    assert re.search(r"… 57\d more nodes", result.stdout)


def test_what_can_be_said_without_ranks(hpczero: Hpczero, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TOPOLOGY)
    result = hpczero("check", "job.toml", "--set", "parallel.sequence_parallel=true")
    assert (
        "ranks     a multiple of 16: tensor(4) x pipeline(4)\n  stages    0: embedding, blocks 0-1"
        in result.stdout
    )
    result = hpczero(
        "check",
        "job.toml",
        "--set",
        "parallel.tensor=1",
        "--set",
        "parallel.sequence_parallel=true",
    )
    assert (
        "note: parallel.sequence_parallel = true has no effect with parallel.tensor = 1"
        in result.stdout
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.tensor=8"], "parallel.tensor = 8 is more than model.heads = 6"),
        (["parallel.pipeline=12"], "parallel.pipeline = 12 is more than the 9 layers"),
        (["parallel.chunks=2"], 'parallel.chunks = 2 is for "interleaved" only'),
        (
            ["parallel.schedule='interleaved'"],
            'parallel.schedule = "interleaved" is for several parallel.chunks',
        ),
        (["parallel.order='tensor'"], 'parallel.order = "tensor": must name each axis once'),
        (
            ["parallel.tensor=5", "parallel.pipeline=3"],
            "use mpirun -n 45 or 30, or parallel.tensor = 4 and parallel.pipeline = 2",
        ),
    ],
)
def test_layouts_that_cannot_be_end_with_2(
    hpczero: Hpczero, tmp_path: Path, settings: list[str], message: str
) -> None:
    (tmp_path / "job.toml").write_text(TOPOLOGY)
    overrides = [word for setting in settings for word in ("--set", setting)]
    result = hpczero("check", "job.toml", "--ranks", "32", *overrides)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_check_as_data(hpczero: Hpczero, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("train.global_batch = 10\n")
    answer = json.loads(hpczero("check", "job.toml", "--json", "--ranks", "4").stdout)
    assert answer["tokens_per_step"] == 1280
    assert answer["tokens"] == 128_000
    assert answer["spec"]["train"]["global_batch"] == 10
    assert answer["sources"] == {"train.global_batch": "job.toml:1"}
    assert (
        answer["layout"]["data_ranks"],
        answer["layout"]["smallest"],
        answer["layout"]["largest"],
    ) == (4, 2, 3)
    memory = json.loads(
        hpczero("check", "job.toml", "--json", "--ranks", "4", "--ranks-per-node", "2").stdout
    )["layout"]["memory"]
    assert memory["ranks_on_node"] == 2
    assert memory["rank"]["moments"] == pytest.approx(8 * answer["parameters"] / 4, rel=0.01)
    assert memory["node"]["moments"] == 2 * memory["rank"]["moments"]
    assert answer["notes"] == []


def test_the_reference(hpczero: Hpczero) -> None:
    assert "peak learning rate" in hpczero("spec").stdout
    assert "| `lr` | `0.0003` | a number > 0 |" in hpczero("spec", "--markdown").stdout
    assert any(
        entry["key"] == "optimizer.lr" for entry in json.loads(hpczero("spec", "--json").stdout)
    )
