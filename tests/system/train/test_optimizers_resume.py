"""A run by LAMB, Lion or Muon goes on in another layout, with the optimizer's states; so do models
of masked tokens.
"""

from pathlib import Path

import pytest

from tests.support.launch import hpczero, launch, mpirun
from tests.support.runs import lines_of

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
[model]
layers = 2
hidden = 24
heads = 3
seq_len = 17
[data]
source = "synthetic"
[train]
steps = 7
global_batch = 7
micro_batch = 2
precision = "fp32"
eval_batches = 0
log_every = 1
[schedule]
name = "constant"
[checkpoint]
every = 4
"""
T5 = ("family=t5", "layers=5", "masked_fraction=0.3", "span_length=2.0", "dropout=0.1")
JOBS = {
    "lamb": ("optimizer.name=lamb", "optimizer.lr=0.02"),
    "lion": ("optimizer.name=lion", "optimizer.lr=0.001"),
    "muon": ("optimizer.name=muon", "optimizer.lr=0.01"),
    "bert": ("model.family=bert", "model.sentences=next", "model.dropout=0.1"),
    "t5": tuple(f"model.{setting}" for setting in T5),
}
LAYOUTS = [
    (2, ("parallel.tensor=2", "zero.stage=0")),
    (3, ("zero.stage=3", "zero.node_shared=false")),
    (4, ("parallel.tensor=2", "parallel.pipeline=2")),
]


def run(folder: Path, ranks: int, name: str, *settings: str) -> list[float]:
    words = [word for setting in settings for word in ("--set", setting)]
    command = [*mpirun(ranks), *hpczero("run", "spec.toml", "--set", f"name={name}", *words)]
    ended = launch(command, 300, folder)
    assert ended.code == 0, ended
    lines = lines_of(folder / "runs" / name / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_steps_after_a_resume_are_those_without_one(
    job: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    whole = run(tmp_path, 1, "whole", *job)
    (first, before), (second, after), (third, last) = LAYOUTS
    run(tmp_path, first, "parts", *job, *before, "train.steps=4")
    run(tmp_path, second, "parts", *job, *after, "train.steps=6")
    parts = run(tmp_path, third, "parts", *job, *last)
    assert parts == pytest.approx(whole, rel=2e-5)
    assert whole[4:] != pytest.approx(whole[:3], rel=1e-3)


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        ("adamw", "lamb", True),
        ("lamb", "adamw", True),
        ("adamw", "muon", True),
        ("muon", "adamw", False),
        ("adamw", "lion", False),
        ("lion", "lamb", False),
    ],
)
@pytest.mark.slow
def test_states_of_another_optimizer_are_refused_but_for_those_alike(
    before: str, after: str, goes_on: bool, tmp_path: Path
) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    run(tmp_path, 1, "one", "train.steps=4", f"optimizer.name={before}")
    command = hpczero("run", "spec.toml", "--set", "name=one", "--set", f"optimizer.name={after}")
    ended = launch(command, 300, tmp_path)
    assert ended.code == (0 if goes_on else 2), ended
    if not goes_on:
        assert f"has the states of another optimizer ({before}, and {after} goes on" in ended.err
