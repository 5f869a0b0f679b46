"""The examples of docs/optimizers.md run, on all ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.comm.world import World
from tests.support.launch import CHECKOUT

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]

PAGE = (CHECKOUT / "docs" / "optimizers.md").read_text()


def printed(heading: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Run the Python block below a heading; return what it prints."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(found[1], f"optimizers.md: {heading}", "exec"), names)
    return list(map(float, capsys.readouterr().out.split()))


def test_groups_of_parameters(whole: World, capsys: pytest.CaptureFixture[str]) -> None:
    losses = printed("Groups of parameters", capsys)
    assert whole.rank or losses[-1] < losses[0]


@pytest.mark.slow
def test_another_optimizer(whole: World, capsys: pytest.CaptureFixture[str]) -> None:
    losses = printed("Another optimizer", capsys)
    assert whole.rank or (len(losses) == 4 and max(losses) < 4), "8 to begin with"


def test_a_moving_average(
    whole: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    losses = printed("A moving average of the weights", capsys)
    if whole.rank == 0:
        assert losses[0] < 4, "8 to begin with"
        assert torch.load(tmp_path / "average.pt", weights_only=True)["2.bias"].shape == (1,)
