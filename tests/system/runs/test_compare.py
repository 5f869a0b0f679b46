"""`hpczero compare` and `runs` over runs that have trained."""

import csv
import io
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.support.launch import hpczero, launch
from tests.support.runs import lines_of
from tests.support.tiny_run import SPEC, train

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")
pytestmark = pytest.mark.slow

TOKENS = 5 * 16  # of a step


def settings(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds, and a run of larger batches on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "spec.toml").write_text(SPEC)
    for seed in (1, 2):
        assert train(folder, 0, *settings(name=f"small-{seed}", seed=seed)).code == 0
    large = {"name": "large", "train.global_batch": 10, "train.steps": 3}
    assert train(folder, 2, *settings(**large)).code == 0
    return folder


def said(folder: Path, *arguments: str) -> str:
    done = launch(hpczero(*arguments), 60, folder)
    assert done.code == 0, done
    for line in done.err.splitlines():
        assert "had read from 400 to 480 tokens" in line
    return done.out


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return lines_of(folder / "runs" / name / "metrics.jsonl")


def test_what_trained_is_compared_at_equal_tokens(trained: Path) -> None:
    found = json.loads(said(trained, "compare", "runs", "--json"))
    of_name = {group["name"]: group for group in found["groups"]}
    assert {name: group["seeds"] for name, group in of_name.items()} == {
        "small": [1, 2],
        "large": [1],
    }
    last = [metrics(trained, f"small-{seed}")[-1]["validation_loss"] for seed in (1, 2)]
    assert of_name["small"]["validation_loss"]["mean"] == pytest.approx(fmean(last))
    assert of_name["small"]["validation_loss"]["deviation"] == pytest.approx(stdev(last))
    assert {one["key"] for one in found["differences"]} == {"train.global_batch", "train.steps"}
    table = found["tables"]["tokens"]
    assert (table["common"], table["points"][-1]) == (5 * TOKENS, 5 * TOKENS)
    row = [group["name"] for group in found["groups"]].index("large")
    at_two = metrics(trained, "large")[1]["loss"]  # its third step ends later
    assert table["training"][row][-1]["mean"] == pytest.approx(at_two)
    assert found["best"]["noise"] == "seeds of one"
    (large,) = [run for run in found["runs"] if run["name"] == "large"]
    assert (large["ranks"], large["step"], large["tokens"]) == (2, 3, 6 * TOKENS)
    seconds = sum(line["step_seconds"] for line in metrics(trained, "large"))
    assert large["seconds"] == pytest.approx(seconds)
    assert large["curves"]["training"]["clock"][-1] > seconds


def test_in_words_and_as_a_table_of_all_points(trained: Path) -> None:
    words = said(trained, "compare", "runs/small-1", "small-2", "large")
    assert "3 runs in 2 groups, by validation loss" in words
    assert "training loss over tokens" in words or "validation loss over tokens" in words
    assert "\nbest: " in words
    rows = list(csv.DictReader(io.StringIO(said(trained, "compare", "runs", "--csv", "-"))))
    training = [row for row in rows if row["figure"] == "training" and row["run"] == "large"]
    losses = [float(row["loss"]) for row in training]
    assert losses == [line["loss"] for line in metrics(trained, "large")]


def test_runs_lists_them_by_their_validation_loss(trained: Path) -> None:
    head, *rows = said(trained, "runs", "--sort", "validation").splitlines()
    assert head.split()[-2:] == ["validation", "age"]
    names = [row.split()[0] for row in rows]
    losses = {name: metrics(trained, name)[-1]["validation_loss"] for name in names}
    assert names == sorted(losses, key=losses.__getitem__)
    assert len(names) == 3
    assert f"{losses[names[0]]:.4f}" in rows[0]
