"""memory.jsonl: what ranks hold, by kind, beside what the planner says."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

import torch

from hpczero.model.families import layers
from hpczero.planner.activations import moments_of
from hpczero.spec.load import load
from hpczero_kernels import dispatch
from tests.support.launch import hpczero, launch, mpirun
from tests.support.runs import lines_of

STATES = ("weights", "moments", "gradients")
SPEC = """
name = "large"
[model]
layers = 2
hidden = 256
heads = 4
seq_len = 256
vocab = 2048
[data]
source = "synthetic"
[train]
steps = 4
global_batch = 8
micro_batch = 4
precision = "fp32"
eval_batches = 0
[checkpoint]
every = 2
"""


def train(folder: Path, *settings: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run it on 2 ranks; return the lines of memory.jsonl, and summary.json."""
    arguments = [word for setting in settings for word in ("--set", setting)]
    done = launch([*mpirun(2), *hpczero("run", "spec.toml", *arguments)], 240, folder)
    assert (done.code, done.left) == (0, []), done
    return written(folder / "runs" / "large")


def written(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return lines_of(run / "memory.jsonl"), json.loads((run / "summary.json").read_text())


def assert_is_the_fullest(found: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    fullest = max(lines, key=lambda line: line["held"])
    assert found == {
        **{name: fullest[name] for name in ("step", "rank", "host", "held")},
        "predicted": sum(fullest["predicted"].values()),
    }


@pytest.mark.timeout(600)
def test_what_a_run_holds(tmp_path: Path) -> None:
    """Kinds add up, states are as predicted to the byte, activations within a twentieth. A run that
    goes on from an older checkpoint drops the lines of the steps that it computes again; now its
    states are in files.
    """
    (tmp_path / "spec.toml").write_text(SPEC)
    lines, summary = train(tmp_path)
    spec = load(tmp_path / "spec.toml").spec
    kernels = dispatch.kernel_operations("cpu", torch.float32)
    kept = moments_of(spec, spec.train.micro_batch, layers(spec.model), kernels).kept
    assert lines[0]["step"] == 2
    for line in lines:
        measured, predicted = line["measured"], line["predicted"]
        assert sum(measured.values()) == line["held"] <= line["node"] <= 2 * line["held"]
        assert {kind: measured[kind] for kind in STATES} == {
            kind: predicted[kind] for kind in STATES
        }
        assert measured["activations"] == pytest.approx(kept, rel=0.05)
        assert 0 < measured["workspace"] < line["held"] / 2
        assert predicted["runtime"] / 2 < measured["runtime"] < 2 * predicted["runtime"]
    assert_is_the_fullest(summary["fullest"], lines)

    run = tmp_path / "runs" / "large"
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    with (run / "memory.jsonl").open("a") as file:
        file.write(json.dumps(lines[0] | {"step": 4, "held": 1 << 50}) + "\n")
    lines, summary = train(tmp_path, "train.steps=5", 'zero.offload="nvme:states"')
    assert [line["step"] for line in lines][:2] == [2, 4]
    assert all(line["held"] < 1 << 50 for line in lines)
    files = lines[1]["files"]
    assert files["measured"] == files["predicted"] > lines[0]["measured"]["moments"]
    assert "moments" not in lines[1]["measured"]
    assert_is_the_fullest(summary["fullest"], lines)


LOOP = """
import sys, torch, hpczero
from torch import nn

net = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1))
spec = {"name": "loop", "train": {"precision": "fp32"}, "zero": {"stage": 1}}
with hpczero.initialize(net, spec) as engine:
    engine.resume()
    for _ in range(3):
        loss = engine(torch.ones(4096, 64)).square().mean()
        engine.backward(loss / engine.size)
        engine.step()
"""
KEPT = 4 * 4096 * 1024 * 2  # bytes: before and behind the GELU


@pytest.mark.slow
def test_what_a_loop_of_ones_own_holds(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = launch([*mpirun(2), sys.executable, "loop.py"], 120, tmp_path)
    assert (done.code, done.left) == (0, []), done
    lines, summary = written(tmp_path / "runs" / "loop")
    (line,) = lines
    measured, predicted = line["measured"], line["predicted"]
    assert line["step"] == 2
    assert sum(measured.values()) == line["held"]
    assert {kind: measured[kind] for kind in STATES} == {kind: predicted[kind] for kind in STATES}
    assert measured["activations"] == pytest.approx(KEPT, rel=0.1)
    assert_is_the_fullest(summary["fullest"], lines)
