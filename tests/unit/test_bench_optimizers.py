"""The runs that `scripts/bench_optimizers.py` keeps in a folder, and reads again."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import CHECKOUT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; in place of a run it writes a loss of 0 after the last step."""
    monkeypatch.syspath_prepend(CHECKOUT / "scripts")
    import bench_optimizers

    def run(command: Sequence[str], *, cwd: Path, **_: Any) -> Any:
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        folder = cwd / "runs" / json.loads(settings["name"])
        folder.mkdir(parents=True)
        line = {"step": int(settings["train.steps"]), "validation_loss": 0.0}
        (folder / "metrics.jsonl").write_text(json.dumps(line))
        (folder / "summary.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bench_optimizers.subprocess, "run", run)
    return bench_optimizers


def curves(bench: Any, folder: Path, steps: int, finely: bool = False) -> list[dict[int, float]]:
    trials = bench.Trials(folder, "gpt", 2, finely)
    one = bench.Contender("Lion", "lion", 8, steps, (1e-3,))
    found: list[dict[int, float]] = trials.curves([(one, 1e-3, seed) for seed in (1, 2)])
    return found


def test_curves_of_other_steps_are_other_runs(bench: Any, tmp_path: Path) -> None:
    assert curves(bench, tmp_path, 16) == [{16: 0.0}] * 2
    assert curves(bench, tmp_path, 32) == [{32: 0.0}] * 2
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 4
    assert curves(bench, tmp_path, 16) == [{16: 0.0}] * 2
    assert sorted((tmp_path / "runs").iterdir()) == runs, "what has run is not run again"
    assert curves(bench, tmp_path, 16, finely=True) == [{16: 0.0}] * 2
    assert len(list((tmp_path / "runs").iterdir())) == 6
