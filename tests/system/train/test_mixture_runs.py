"""Runs on several sources, some of them tokens that others wrote: stopped, resumed, changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.launch import hpczero, launch, mpirun
from tests.support.plain_tokens import documents, write_megatron
from tests.support.runs import lines_of

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
name = "mixed"
[model]
layers = 1
hidden = 32
heads = 2
seq_len = 16
[data]
validation_fraction = 0.2
[[data.sources]]
path = "own.h5"
weight = 0.7
[[data.sources]]
path = "megatron.idx"
weight = 0.2
[[data.sources]]
path = "array.npy"
weight = 0.1
[train]
steps = 20
global_batch = 7
micro_batch = 2
precision = "fp32"
eval_batches = 3
log_every = 1
[checkpoint]
every = 5
"""
ANOTHER = '[[data.sources]]\npath = "more.npy"\nweight = 0.5\n'
LONG = 600  # seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    texts = documents()
    for number, part in enumerate((texts[:250], texts[250:])):
        lines = [json.dumps({"text": bytes(text[:-1]).decode("latin1")}) + "\n" for text in part]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    build = hpczero("data", "build", "-o", "own.h5", "0.jsonl", "--validation-fraction", "0.2")
    assert launch(build, LONG, folder).code == 0
    write_megatron(folder / "megatron", texts[250:])
    draws = np.random.default_rng(3)
    np.save(folder / "array.npy", draws.integers(0, 257, 9_000, "<u2"))
    np.save(folder / "more.npy", draws.integers(0, 100, 9_000, "<u2"))
    (folder / "spec.toml").write_text(SPEC)
    return folder


def run(folder: Path, ranks: int, name: str, *more: str, code: int = 0) -> str:
    words = [*mpirun(ranks), *hpczero("run", "spec.toml", "--set", f"name={name}", *more)]
    ended = launch(words, LONG, folder)
    assert ended.code == code, ended.out + ended.err
    return ended.out + ended.err


def losses(folder: Path, name: str) -> list[float]:
    lines = lines_of(folder / "runs" / name / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


def events(folder: Path, name: str, kind: str) -> list[Mapping[str, Any]]:
    lines = lines_of(folder / "runs" / name / "events.jsonl")
    return [line for line in lines if line["event"] == kind]


@pytest.mark.slow
def test_a_run_stopped_and_resumed_on_other_ranks_is_the_run_without_interruption(
    folder: Path,
) -> None:
    run(folder, 2, "parts", "--set", "train.steps=10", "--set", "schedule.name=constant")
    run(folder, 1, "constant", "--set", "schedule.name=constant")
    run(folder, 3, "parts", "--set", "schedule.name=constant")
    whole = losses(folder, "constant")
    assert len(whole) == 20
    assert losses(folder, "parts") == pytest.approx(whole, rel=2e-5)


@pytest.mark.slow
def test_each_source_is_evaluated_and_eval_finds_the_same(folder: Path) -> None:
    run(folder, 2, "evaluated", "--set", "train.eval_batches=1000")
    [facts] = events(folder, "evaluated", "eval")
    of_sources = facts["validation_losses"]
    assert list(of_sources) == ["own.h5", "megatron.idx", "array.npy"]
    assert facts["samples_of_sources"] == {"own.h5": 98, "megatron.idx": 28, "array.npy": 14}
    shares = (0.7, 0.2, 0.1)
    together = sum(share * one for share, one in zip(shares, of_sources.values(), strict=True))
    assert facts["validation_loss"] == pytest.approx(together, rel=1e-6)
    words = hpczero("eval", "runs/evaluated", "--split", "validation", "--json")
    ended = launch([*mpirun(2), *words, "--precision", "fp32"], LONG, folder)
    assert ended.code == 0, ended
    results = json.loads(ended.out)["results"]
    assert [Path(one["path"]).name for one in results] == list(of_sources)
    found = [one["loss"] for one in results]
    assert found == pytest.approx(list(of_sources.values()), rel=1e-5)


@pytest.mark.slow
def test_tokens_of_others_are_evaluated_as_those_of_a_token_file(folder: Path) -> None:
    run(folder, 1, "judge", "--set", "train.steps=3", "--set", "train.eval_batches=0")
    with h5py.File(folder / "own.h5") as file:
        np.save(folder / "same.npy", file["train/tokens"][:])
    words = ("eval", "runs/judge", "--precision", "fp32", "--json")
    found = []
    for name, split in (("own.h5", "train"), ("same.npy", "all")):
        ended = launch(hpczero(*words, name, "--split", split), LONG, folder)
        assert ended.code == 0, ended
        found.append(json.loads(ended.out)["results"])
    [own], parts = found
    assert [part["tokenizer"] for part in parts] == ["unknown"] * 2
    assert [part["bits_per_byte"] for part in parts] == [None] * 2
    counts = [part["tokens"] for part in parts]
    assert own["tokens"] - sum(counts) in (0, 16, 32), "windows do not cross the split"
    together = sum(part["loss"] * count for part, count in zip(parts, counts, strict=True))
    assert together / sum(counts) == pytest.approx(own["loss"], rel=2e-3)


@pytest.mark.slow
def test_a_source_that_is_added_is_said_and_logged(folder: Path) -> None:
    run(folder, 1, "added", "--set", "train.steps=10")
    before = losses(folder, "added")
    (folder / "spec.toml").write_text(SPEC + ANOTHER)
    try:
        said = run(folder, 2, "added")
    finally:
        (folder / "spec.toml").write_text(SPEC)
    assert "data.sources: more.npy is new, with weight 0.5" in said
    told = [line["what"] for line in events(folder, "added", "WARN")]
    assert "data.sources: more.npy is new, with weight 0.5" in told
    # 70 samples of three sources, then 70 of which the new one has a third
    *_, last = events(folder, "added", "eval")
    assert list(last["samples_of_sources"].values()) == [49 + 33, 14 + 9, 7 + 5, 23]
    after = losses(folder, "added")
    assert after[:10] == before
    assert len(after) == 20
    run(folder, 1, "added", "--set", "train.steps=25")
    warnings = [line["what"] for line in events(folder, "added", "WARN")]
    assert "data.sources: more.npy is not read any more" in warnings


@pytest.mark.slow
def test_epochs_that_end_before_the_steps_are_refused_before_the_first(folder: Path) -> None:
    (folder / "spec.toml").write_text(SPEC.replace("weight", "epochs = 0.05\nweight"))
    try:
        told = launch(hpczero("check", "spec.toml"), LONG, folder).out
        said = run(folder, 2, "ends", code=2)
    finally:
        (folder / "spec.toml").write_text(SPEC)
    assert "their epochs end after" in told
    assert "data.sources: their epochs allow" in said
    assert said.count("epochs allow") == 1, "one message"


@pytest.mark.slow
def test_a_run_on_one_source_goes_on_with_several_and_not_back(folder: Path) -> None:
    head, _, rest = SPEC.partition("[[data.sources]]")
    single = head + 'source = "own.h5"\n' + rest[rest.index("[train]") :]
    (folder / "spec.toml").write_text(single)
    try:
        run(folder, 1, "grown", "--set", "train.steps=5")
        (folder / "spec.toml").write_text(SPEC)
        said = run(folder, 2, "grown", "--set", "train.steps=10")
        assert "data.sources: megatron.idx is new, with weight 0.2" in said
        assert len(losses(folder, "grown")) == 10
        (folder / "spec.toml").write_text(single)
        refused = run(folder, 1, "grown", code=2)
    finally:
        (folder / "spec.toml").write_text(SPEC)
    assert "is a checkpoint of a run on a mixture" in refused
