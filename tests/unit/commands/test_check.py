"""`hpczero check` of a job whose cluster is known: its time, and what does not fit its nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpczero.cli import main
from hpczero.planner.cluster import find
from tests.support.clusters import one_node
from tests.support.launch import BLOCKER, HEAVY

SPEC = """
name = "small"
[model]
layers = 8
hidden = 1024
heads = 16
seq_len = 1024
vocab = 32000
[train]
steps = 1_000_000
global_batch = 64
micro_batch = 2
[batch]
cluster = "dgx-h100"
walltime = "2h"
"""
RANKS = ("--ranks", "16", "--ranks-per-node", "8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    one_node(tmp_path)
    return tmp_path


def check(*arguments: str) -> int:
    return main(["check", "spec.toml", *arguments])


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert check("--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
def test_it_says_who_has_copies_and_what_these_exchange(
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = ("--set", "zero.shard_ranks=node")
    layout = data(capsys, *RANKS, *node)["layout"]
    assert layout["axes"]["shard"] == 8
    assert layout["axes"]["replica"] == 2
    assert layout["exchanged"] is None
    assert set(layout["sent"]) == {"data", "shard", "replica", "world"}
    local = ("--set", "optimizer.outer.every=50", "--set", "checkpoint.every=0")
    layout = data(capsys, *RANKS, *node, *local)["layout"]
    assert (layout["exchanged"]["form"], layout["exchanged"]["every"]) == ("fp32", 50)
    assert check(*RANKS, *node, *local) == 0
    out = capsys.readouterr().out
    assert "shard   2 groups of 8, inside nodes:  [0 1 2 3 4 5 6 7]  [8 9 10" in out
    assert "replicas send each other weights in fp32, in one of 50 steps: bytes are those" in out


@pytest.mark.usefixtures("here")
def test_it_says_how_long_the_job_takes(capsys: pytest.CaptureFixture[str]) -> None:
    time = data(capsys, *RANKS)["layout"]["time"]
    assert check(*RANKS) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("  time "))
    seconds = f"{time['step_seconds']:.3g} s a step, "
    assert lines[first].startswith(f"  time      {seconds}")
    assert lines[first].endswith("of the peak (predicted for dgx-h100)")
    assert [line[:12].strip() for line in lines[first + 1 : first + 5]] == [""] * 4
    assert lines[first + 4].strip().startswith(f"the training: {time['days']:.3g} days, ")
    chain = f"batch.chain = {time['jobs']} would finish it"
    assert any(line.startswith("note: the training") and chain in line for line in lines)


@pytest.mark.usefixtures("here")
def test_as_data_the_time_has_its_causes(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *RANKS)
    time = found["layout"]["time"]
    assert time["cluster"] == "dgx-h100"
    assert sum(time["causes"].values()) == pytest.approx(time["step_seconds"])
    assert any("would finish it" in note for note in found["notes"])
    enough = data(capsys, *RANKS, "--set", f"batch.chain={time['jobs']}")
    assert not any("would finish it" in note for note in enough["notes"])


@pytest.mark.usefixtures("here")
def test_without_a_cluster_or_ranks_nothing_is_predicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert data(capsys, *RANKS, "--set", "batch.cluster=")["layout"]["time"] is None
    assert data(capsys)["layout"] is None
    for arguments in ((), (*RANKS, "--set", "batch.cluster=")):
        assert check(*arguments) == 0
        assert "\n  time " not in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_why_nothing_is_predicted_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    other = (*RANKS, "--set", "train.device=cpu")
    found = data(capsys, *other)
    problem = "it has GPUs, and the job computes on CPUs"
    assert found["layout"]["time"] == {"cluster": "dgx-h100", "problem": problem}
    assert check(*other) == 0
    out = capsys.readouterr().out
    assert f'note: no time is predicted for batch.cluster = "dgx-h100": {problem}' in out
    assert "\n  time " not in out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("more", [RANKS, (), (*RANKS, "--set", "model.family=mine:make")])
def test_an_unknown_cluster_is_refused(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*more, "--set", "batch.cluster=summit") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("hpczero: ")) == ("", 1)
    assert 'there is no cluster "summit"' in err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        ("small.toml", ["batch.cluster=small.toml", "train.device=cpu", "model.layers=40"]),
        ("dgx-h100", ["model.hidden=16384", "model.heads=128"]),
    ],
)
def test_memory_that_only_the_cluster_knows_refuses_a_job(
    cluster: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    ranks = ("--ranks", "8", "--ranks-per-node", "8", "--set", "zero.stage=0")
    assert check(*ranks, *options) == 2
    out, err = capsys.readouterr()
    assert "spec.toml does not fit its nodes" in out
    assert err.count("hpczero: ") == 1
    node = find(cluster).cluster.hardware
    assert f"where {node.gpu_memory_gb or node.memory_gb:.1f} GB are available" in err
    assert check(*ranks, *options, "--set", "batch.cluster=") == 0, "nothing else knows it"


def test_a_login_node_needs_no_more_for_it(here: Path) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", BLOCKER.format(blocked=list(HEAVY))]
    done = subprocess.run(
        [*command, "check", "spec.toml", *RANKS],
        cwd=here,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  time " in done.stdout
