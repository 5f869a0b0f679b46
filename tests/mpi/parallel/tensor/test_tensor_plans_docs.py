"""The examples of docs/tensor-plans.md: Llama's runs, the plans are those that are tested."""

import re
from typing import Any

import pytest

from hpczero.comm.world import World
from tests.support.launch import CHECKOUT
from tests.support.tensor_plans import BERT, GPT2, LLAMA, transformers_or_skip

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4), pytest.mark.usual(2)]

PAGE = CHECKOUT / "docs" / "tensor-plans.md"


def run(heading: str, world: World) -> dict[str, Any]:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found
    code = found[1].replace("tensor_plan=plan)", "tensor_plan=plan, world=world)")
    names: dict[str, Any] = {"__name__": "example", "world": world}
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), names)
    return names


@pytest.mark.slow
def test_llama(world: World) -> None:
    transformers_or_skip()
    names = run("Llama", world)
    assert names["plan"] == LLAMA
    assert names["loss"].item() < 4.55, "ln 100 = 4.6 at the beginning"
    assert bool(names["weights"]) == (world.rank == 0)


def test_gpt2_and_bert(world: World) -> None:
    assert run("GPT-2", world)["plan"] == GPT2
    assert run("BERT", world)["plan"] == BERT
