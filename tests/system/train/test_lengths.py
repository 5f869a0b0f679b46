"""Sequences that grow over the steps of a run: what it says of them, and that it goes on amid one
of the lengths.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import SPEC, train

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

LENGTHS = """
[schedule]
name = "constant"
seq_len = [[0, 4], [2, 8], [4, 16]]
"""


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / "tiny" / name).read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    metrics = lines_of(folder, "metrics.jsonl")
    assert {entry["tokens"] for entry in metrics} == {5 * 16}
    return [entry["loss"] for entry in metrics]


@pytest.mark.slow
def test_a_run_goes_on_amid_a_length(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.toml").write_text(SPEC + LENGTHS)
    assert train(tmp_path / "whole", 2, "--set", "train.steps=6").code == 0
    for steps in (3, 6):
        assert train(tmp_path / "parts", 2, "--set", f"train.steps={steps}").code == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name in ("whole", "parts"):
        said = [e for e in lines_of(tmp_path / name, "events.jsonl") if e["event"] == "sequences"]
        assert [(one["step"], one["seq_len"]) for one in said] == [(3, 8), (5, 16)]
        warned = [e for e in lines_of(tmp_path / name, "events.jsonl") if e["event"] == "WARN"]
        assert not any("cut anew" in str(one) for one in warned)
