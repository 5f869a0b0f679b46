"""The bytes that a block keeps for its backward are those that the planner counts."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.dataset import SyntheticSource
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers
from hpczero.parallel.parallelize import assemble
from hpczero.planner.activations import moments_of
from hpczero.planner.volumes import resolved
from hpczero.spec.load import from_dict
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from tests.support.kept_bytes import Born

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4), pytest.mark.usual(2)]

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "dropout": 0.1},
    "llama": {"family": "llama", "kv_heads": 4},
    "fewer keys": {"family": "llama", "kv_heads": 4, "heads": 8, "head_dim": 8},
    "relative": {"family": "llama", "qk_norm": True, "post_norms": True, "attention_cap": 5.0},
    "blocks": {"family": "llama", "kv_heads": 4, "attention": {"kind": "bigbird", "block": 16}},
    "blocks, cap": {
        "family": "llama",
        "attention_cap": 5.0,
        "attention": {"kind": "local", "block": 16, "window": 2},
    },
    "torch": {"family": "llama", "kernels": "torch", "norm_offset": True},
    "bert": {"family": "bert", "dropout": 0.1},
    "bert, norms before": {"family": "bert", "norm_order": "pre"},
    "t5": {"family": "t5", "dropout": 0.1},
    "t5's encoder": {"family": "t5", "encoder_layers": 1},
    "t5 in blocks": {"family": "t5", "attention": {"kind": "longformer", "block": 8, "window": 2}},
    "t5's encoder in blocks": {
        "family": "t5",
        "encoder_layers": 1,
        "attention": {"kind": "local", "block": 8, "window": 2},
    },
    "t5's encoder in blocks, torch": {
        "family": "t5",
        "encoder_layers": 1,
        "attention": {"kind": "fixed", "block": 8, "window": 2},
        "kernels": "torch",
    },
    "t5 as first published": {"family": "t5", "feed_forward": "relu", "kernels": "torch"},
    "t5's encoder, torch": {"family": "t5", "encoder_layers": 1, "kernels": "torch"},
}
SAMPLES = 2


def specs(world: World, family: str) -> Iterator[Spec]:
    for recompute, precision, sequence, partition in product(
        ("none", "selective", "block"), ("fp32", "bf16"), (False, True), (False, True)
    ):
        if world.size == 1 and (sequence or partition):
            continue
        if partition and recompute != "block":
            continue
        shape = {"hidden": 64, "heads": 4, "seq_len": 64, "vocab": 257} | FAMILIES[family]
        yield from_dict(
            {
                "model": shape,
                "data": {"source": "synthetic"},
                "train": {"precision": precision, "global_batch": 2, "micro_batch": SAMPLES},
                "zero": {"stage": 0},
                "parallel": {"tensor": world.size, "sequence_parallel": sequence},
                "memory": {"recompute": recompute, "partition_activations": partition},
            }
        ).spec


def with_layers(spec: Spec, count: int) -> Spec:
    """Return the spec with so many blocks; an encoder said to have one has all but one of them."""
    layers = {"layers": count}
    if spec.model.encoder_layers:
        layers["encoder_layers"] = count - 1
    return spec.model_copy(update={"model": spec.model.model_copy(update=layers)})


def kept(world: World, spec: Spec) -> int:
    """The bytes that are made in a forward and still there after it."""
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    runner = assemble(spec, world, grid, accumulates=False)
    (batch,) = Batches(spec, SyntheticSource(1, 257, spec.text_len), 0, 1).training(0)
    with Born() as born:
        loss = runner._forward(batch)  # type: ignore[union-attr]
        size = born.alive()
    runner.engine.backward(loss, True)
    runner.engine.close()
    return size


def counted(spec: Spec) -> float:
    by_kernels = spec.model.kernels == "auto"
    kernels = KERNELS_THAT_CHANGE_MEMORY["cpu"] if by_kernels else frozenset[str]()
    return moments_of(spec, SAMPLES, layers(spec.model), kernels).kept


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(2)
def test_a_block_keeps_what_is_counted(world: World, family: str) -> None:
    for spec in specs(world, family):
        two, three = (with_layers(spec, count) for count in (2, 3))
        measured = kept(world, three) - kept(world, two)
        how = (spec.memory.recompute, spec.train.precision, spec.parallel.sequence_parallel)
        assert measured == pytest.approx(counted(three) - counted(two), rel=0.03), how
