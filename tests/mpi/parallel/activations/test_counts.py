"""Recomputed are as many products and attentions as are said, in the very calls."""

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.dataset import SyntheticSource
from hpczero.parallel.activations import choice
from hpczero.parallel.parallelize import assemble
from hpczero.planner.volumes import resolved
from hpczero.spec.load import from_dict
from hpczero.train.batches import Batches

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2), pytest.mark.usual(2)]

PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul")
ATTENTION = ("aten::_scaled_dot_product_flash_attention_for_cpu",)
BLOCKS = 3


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count[function._schema.name] += 1
        return function(*args, **(kwargs or {}))

    def of(self, names: tuple[str, ...]) -> int:
        return sum(self.count[name] for name in names)


def calls(world: World, family: str, stage: int, **memory: Any) -> tuple[Calls, Calls]:
    """The operations of a forward and of its backward."""
    spec = from_dict(
        {
            "model": {"family": family, "layers": BLOCKS, "hidden": 32, "heads": 4, "seq_len": 16},
            "data": {"source": "synthetic"},
            "train": {"precision": "fp32", "global_batch": 2, "micro_batch": 2},
            "zero": {"stage": stage},
            "parallel": {"tensor": world.size},
            "memory": memory,
        }
    ).spec
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    runner = assemble(spec, world, grid, accumulates=False)
    source = SyntheticSource(1, spec.model.vocab, spec.text_len)
    (batch,) = Batches(spec, source, 0, 1).training(0)
    with Calls() as forward:
        loss = runner._forward(batch)  # type: ignore[union-attr]
    with Calls() as backward:
        runner.engine.backward(loss, True)
    runner.engine.close()
    return forward, backward


# family -> products and PyTorch's attentions of each block: T5's own has products for its bias, and
# its decoder looks at the encoder, of which there is one block
OF_BLOCKS = {
    "gpt": [(4, 1)] * BLOCKS,
    "llama": [(6, 1)] * BLOCKS,
    "bert": [(4, 1)] * BLOCKS,
    "t5": [(6, 0), (9, 1), (9, 1)],
}


@pytest.mark.parametrize("family", OF_BLOCKS)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.few(4)
def test_what_runs_twice(world: World, family: str, stage: int) -> None:
    forward, backward = calls(world, family, stage)
    of_head = 2 if family == "bert" else 1
    of_blocks = OF_BLOCKS[family]
    every_second = [0, 1] if family == "t5" else [0, 2]  # of each kind
    attentions = sum(count for _, count in of_blocks)
    assert forward.of(PRODUCTS) - of_head == sum(count for count, _ in of_blocks)
    assert (forward.of(ATTENTION), backward.of(ATTENTION)) == (attentions, 0)
    for every, recompute, again in (
        (1, "selective", []),
        (1, "block", range(BLOCKS)),
        (2, "block", every_second),
    ):
        first, second = calls(world, family, stage, recompute=recompute, recompute_every=every)
        products, of_attention = (sum(of_blocks[at][what] for at in again) for what in range(2))
        assert first.of(PRODUCTS) == forward.of(PRODUCTS)
        assert second.of(PRODUCTS) == backward.of(PRODUCTS) + products
        assert (first.of(ATTENTION), second.of(ATTENTION)) == (attentions, of_attention)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_by_pieces_makes_each_product_once(world: World, stage: int) -> None:
    forward, backward = calls(world, "gpt", stage)
    rows = 2 * 16
    for piece in (rows, 11):
        pieces = -(-rows // piece)
        first, second = calls(world, "gpt", stage, loss_chunk=piece)
        assert first.of(PRODUCTS) == forward.of(PRODUCTS) - 1
        of_pieces = second.of(PRODUCTS) + second.of(("aten::addmm_",))
        assert of_pieces == backward.of(PRODUCTS) - 2 + 3 * pieces


def test_pieces_are_what_the_planner_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto": eight of them, or none where the micro-batch is small."""
    _, backward = calls(world, "gpt", 0)
    _, small = calls(world, "gpt", 0, loss_chunk="auto")
    monkeypatch.setattr(choice, "_LEAST", 4)
    _, eight = calls(world, "gpt", 0, loss_chunk="auto")
    assert small.count == backward.count
    assert eight.of(("aten::addmm_",)) == 8 - 1
