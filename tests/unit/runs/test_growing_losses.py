"""The losses of a file that grows."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpczero.runs.growing_losses import GrowingLosses
from tests.support.run_files import BEGAN, moment


def add(path: Path, steps: Sequence[int], mode: str = "a") -> None:
    with path.open(mode) as file:
        for step in steps:
            line = {"step": step, "loss": float(step), "time": moment(step)}
            file.write(json.dumps(line) + "\n")


def test_losses_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = GrowingLosses(path)
    losses.read()
    assert len(losses.steps) == 0
    add(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    losses.read()
    assert losses.steps.tolist() == [1, 2]
    with path.open("a") as file:
        file.write('ss": 9}\n')
    losses.read()
    assert losses.losses.tolist() == [1, 2, 9]
    add(path, [3, 4])
    losses.read()
    assert losses.losses.tolist() == [1, 2, 3, 4], "a step that came again counts once"
    assert losses.written == BEGAN + 4


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = GrowingLosses(path)
    add(path, range(1, 50))
    losses.read()
    add(tmp_path / "new", range(1, 20))
    (tmp_path / "new").rename(path)
    losses.read()
    assert losses.steps[-1] == 19


def test_of_a_long_file_the_newest_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.runs.growing_losses._MOST", 1000)
    path = tmp_path / "metrics.jsonl"
    add(path, range(1, 500))
    losses = GrowingLosses(path)
    losses.read()
    assert 5 < len(losses.steps) < 20
    assert losses.steps[-1] == 499
