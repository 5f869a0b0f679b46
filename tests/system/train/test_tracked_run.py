"""Runs with trackers: what TensorBoard, W&B and MLflow read is what metrics.jsonl has."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import CHECKOUT, Finished, hpczero, launch
from tests.support.runs import lines_of
from tests.support.tiny_run import SPEC, train
from tests.support.tracked import accumulator, tensorboard_losses, wandb_server

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

TRACKED = SPEC + '[checkpoint]\nevery = 4\n[track]\nto = ["tensorboard", "wandb", "mlflow"]\n'
CALLBACK = """
import json
def see(line):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps(dict(line)) + "\\n")
"""
LOOP = """
import sys
import torch
from torch import nn
import hpczero

with hpczero.initialize(nn.Linear(4, 1), sys.argv[1]) as engine:
    for _ in range(6):
        loss = engine(torch.ones(2, 4).to(engine.dtype)).float().square().mean()
        engine.backward(loss / engine.size)
        engine.step()
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Finished]]:
    """A run of 11 steps that goes on from step 8, as a job does that was killed."""
    for package in ("tensorboard", "wandb", "mlflow"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "spec.toml").write_text(TRACKED)
    (folder / "of_mine.py").write_text(CALLBACK)
    path = os.pathsep.join(filter(None, [str(CHECKOUT), str(folder), os.environ.get("PYTHONPATH")]))
    callback = ["--set", "track.callback=of_mine:see"]
    first = train(folder, 2, "--set", "train.steps=11", *callback, PYTHONPATH=path)
    for part in sorted((folder / "runs/tiny/checkpoints/step-00000011").iterdir()):
        part.unlink()
    (folder / "runs/tiny/checkpoints/step-00000011").rmdir()
    second = train(folder, 0, "--set", "train.steps=13", *callback, PYTHONPATH=path)
    return folder, [first, second]


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = lines_of(folder / "runs/tiny/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 14))
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.slow
def test_the_run_hears_nothing_of_its_trackers(resumed: Any) -> None:
    folder, jobs = resumed
    assert [(job.code, job.err) for job in jobs] == [(0, ""), (0, "")]
    events = [line["event"] for line in lines_of(folder / "runs/tiny/events.jsonl")]
    assert "WARN" not in events
    assert "resume" in events


@pytest.mark.slow
def test_tensorboard_has_each_step_once(resumed: Any) -> None:
    folder, _ = resumed
    read = tensorboard_losses(folder / "runs/tiny")
    assert read == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(folder)]
    tags = accumulator(folder / "runs/tiny").Tags()
    assert {"lr", "grad_norm", "tokens_per_second", "validation/loss"} <= set(tags["scalars"])
    assert {"spec", "events/start", "events/resume", "events/stop"} <= set(tags["tensors"])


def test_wandb_has_each_step_once(resumed: Any, tmp_path: Path) -> None:
    folder, _ = resumed
    (run,) = (folder / "runs/tiny/wandb").glob("offline-run-*")
    home = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CONFIG", "CACHE", "DATA")}
    with wandb_server() as server:
        at = home | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0123456789" * 4}
        done = launch([sys.executable, "-m", "wandb", "sync", str(run)], 120, tmp_path, at)
    assert done.code == 0, done.err
    (name,) = server.runs
    assert [(row["_step"], row["loss"]) for row in server.history(name)] == losses(folder)


def test_mlflow_has_each_step_once(resumed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    folder, _ = resumed
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (folder / "runs/tiny/mlflow").as_uri()
    client = mlflow.MlflowClient(tracking_uri=store)
    (experiment,) = client.search_experiments()
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == losses(folder)


def test_the_callback_has_seen_every_line(resumed: Any) -> None:
    folder, _ = resumed
    seen = lines_of(folder / "seen.jsonl")
    steps = [line["step"] for line in seen if "loss" in line and "event" not in line]
    assert steps == [*range(1, 12), *range(9, 14)]
    told = [line["event"] for line in seen if "event" in line]
    assert told == [line["event"] for line in lines_of(folder / "runs/tiny/events.jsonl")]


@pytest.mark.slow
def test_what_a_callback_never_closes_is_written_all_the_same(tmp_path: Path) -> None:
    """Python writes and closes what modules hold at its end: nothing may cut that short."""
    (tmp_path / "spec.toml").write_text(SPEC + '[track]\ncallback = "of_mine:see"\n')
    callback = 'FILE = open("seen", "w")\ndef see(line):\n    FILE.write(f"{len(line)}\\n")\n'
    (tmp_path / "of_mine.py").write_text(callback)
    path = os.pathsep.join([str(CHECKOUT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert train(tmp_path, 2, PYTHONPATH=path).code == 0
    assert len((tmp_path / "seen").read_text().splitlines()) > 5


@pytest.mark.slow
def test_what_is_missing_is_a_warning_and_the_run_is_done(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(TRACKED)
    for name in ("wandb", "mlflow"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this node')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    callback = ["--set", "track.callback=not_there:see"]
    done = launch([*hpczero("run", "spec.toml"), *callback], 120, tmp_path, {"PYTHONPATH": path})
    assert (done.code, done.left) == (0, [])
    events = lines_of(tmp_path / "runs/tiny/events.jsonl")
    warnings = sorted(line["what"] for line in events if line["event"] == "WARN")
    assert warnings == [
        "mlflow gets no more of this run: ImportError: not on this node",
        "track.callback = not_there:see gets no more of this run: not_there cannot be imported "
        "(No module named 'not_there'); is it installed, or in PYTHONPATH?",
        "wandb gets no more of this run: ImportError: not on this node",
    ]
    assert all(f"hpczero: WARN {what}\n" in done.err for what in warnings)
    assert len(list((tmp_path / "runs/tiny/tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_a_loop_of_one_s_own_is_tracked_without_a_call(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard's reader is not installed")
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "loop.toml").write_text('name = "loop"\n[track]\nto = ["tensorboard"]\n')
    done = launch([sys.executable, "train.py", "loop.toml"], 120, tmp_path)
    assert (done.code, done.left) == (0, []), done.err
    norms = accumulator(tmp_path / "runs/loop").Scalars("grad_norm")
    assert [one.step for one in norms] == list(range(1, 7))
