"""The examples of docs/any-model.md and docs/your-loop.md run, on all ranks."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hpczero.comm.world import World
from hpczero.spec.schema import Model, Parallel, Zero
from tests.support.launch import CHECKOUT
from tests.support.training import assert_same, train
from tests.support.user_stages import spec_of

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]

PAGE = "any-model"


def example(heading: str, page: str) -> str:
    """The first Python block below a heading."""
    text = (CHECKOUT / "docs" / f"{page}.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def run(heading: str, page: str = PAGE) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example(heading, page), f"{page}: {heading}", "exec"), names)
    return names


def test_a_loop_of_your_own(
    whole: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run("A loop of your own")
    if whole.rank:
        assert not (tmp_path / "weights.pt").exists()
        return
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert torch.load(tmp_path / "weights.pt", weights_only=True)["2.1.weight"].shape == (
        10,
        32 * 14 * 14,
    )


def test_the_batches_of_a_run(
    whole: World,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = str(tmp_path_factory.mktemp("loop"))
    monkeypatch.chdir(whole.broadcast_object(made))
    run("Data", "your-loop")
    steps = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ([] if whole.rank else list(map(str, range(1, 11))))


def test_a_model_from_transformers(whole: World, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install hpczero[test]"
    )
    run("A model from `transformers`")
    evaluated, norm = map(float, capsys.readouterr().out.split())
    assert 0 < evaluated < 4.6, "ln 128 = 4.85 at the beginning"
    assert norm > 0


def test_by_name(whole: World) -> None:
    names = run("By name, in a spec")
    module = names["build"](Model(hidden=8, vocab=11))
    assert (
        sum(own.numel() for own in module.parameters())
        == 11 * 8 + 8 * 32 + 32 + 32 * 8 + 8 + 8 * 11 + 11
    )


def test_as_a_pipeline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    example = ModuleType("example")
    example.__dict__.update(run("As a pipeline"))
    monkeypatch.setitem(sys.modules, "example", example)
    model = Model(family="example:build", layers=3, hidden=12, seq_len=9, vocab=31)
    spec = spec_of("Layered").model_copy(update={"model": model})
    alone = world.part([world.rank])
    expected = train(alone, spec)
    alone.close()
    if world.size in (2, 4):
        parallel = {
            "parallel": Parallel(pipeline=2, schedule="interleaved", chunks=2),
            "zero": Zero(stage=3, node_shared=False),
        }
        assert_same(expected, train(world, spec.model_copy(update=parallel)))
