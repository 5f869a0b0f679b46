"""The cases of the grids' tests, the specs that they stand for, and what one rank alone makes of
them.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from hpczero.comm.world import World
from hpczero.device import CPU
from hpczero.model import families
from hpczero.model.shapes import ZEROS
from hpczero.parallel.zero.weights import DTYPES
from hpczero.spec.attention import Attention
from hpczero.spec.schema import (
    Data,
    Memory,
    Model,
    Optimizer,
    Parallel,
    Schedule,
    Spec,
    Train,
    Zero,
)
from tests.support.covering import Case, covering
from tests.support.training import Record, assert_same, train

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
EVERYTHING = (
    "grid",
    "schedule",
    "sequence",
    "stage",
    "shared",
)  # whose full product --slow tries, of 1, 2, 4 and 8 ranks

PLAIN: Case = {
    "schedule": "1f1b",
    "sequence": False,
    "stage": 1,
    "shared": False,
    "precision": "fp32",
    "tied": True,
    "dropout": 0.1,
    "batch": (5, 2),
}


def factors(ranks: int) -> dict[str, Sequence[Any]]:
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return {
        "grid": [
            (tensor, pipeline)
            for tensor, pipeline in product(sizes, repeat=2)
            if ranks % (tensor * pipeline) == 0
        ],
        "schedule": ["1f1b", "gpipe", "interleaved"],
        "sequence": [False, True],
        "stage": [0, 1, 2, 3],
        "shared": [False, True],
        "precision": ["fp32", "bf16", "fp16"],
        "tied": [True, False],
        "dropout": [0.1, 0.0],
        "batch": [
            (5, 2),
            (7, 1),
            (4, 8),
        ],  # global, micro: sizes that differ, some of them empty; many; one
        "per_node": [0, 3] if ranks > 3 else [0],
        "order": ["auto", "pipeline,data,tensor"],
        "documents": ["packed", "masked", "padded"],
        "length": [0, 21],  # tokens of a sequence; 0: as many as the model takes
        "family": ["gpt", "llama", "fewer keys", "relative", *BERT, *T5],
        "attention": [*ATTENTION],
        "grows": [False, True],  # the first two steps have sequences of a third
        "optimizer": ["adamw", "lamb", "lion", "muon"],
    }


BERT = {
    "bert": {"sentences": "next"},
    "bert, norms before": {"sentences": "order", "norm_order": "pre"},
}
T5 = {
    "t5": {},
    "t5, as first published": {"feed_forward": "relu", "encoder_layers": 1},
}
PACKED = (None, "packed")
ATTENTION: dict[str, dict[str, Any]] = {
    "dense": {},
    "bigbird": {"kind": "bigbird", "block": 8, "window": 1, "random": 1, "heads": "different"},
    "fixed": {"kind": "fixed", "block": 8, "window": 2, "heads": "different"},
    "of each kind": {
        "kind": ("local", "longformer", "dense", "strided", "variable"),
        "block": (8, 9, 16),
        "window": 2,
        "groups": (1, 2),
        "heads": "different",
    },
}


def possible(case: Case) -> bool:
    """Leave out settings of an axis that is not there, windows beside blocks, what is for models
    that predict the next token alone, and T5 in half precision with short sequences: of so few
    targets the loss, dense or in blocks, is off by more than a rounding after three steps.
    """
    family = case.get("family")
    masks = family in BERT or family in T5
    if masks and (case.get("grows") or case.get("documents") not in PACKED):
        return False
    if family == "relative" and case.get("attention", "dense") != "dense":
        return False
    rounds = case.get("precision", "fp32") != "fp32"
    if family in T5 and rounds and case.get("length"):
        return False
    tensor, pipeline = case.get("grid", (2, 2))
    schedule, sequence = case.get("schedule", "1f1b"), case.get("sequence", False)
    return (pipeline > 1 or schedule == "1f1b") and (tensor > 1 or not sequence)


@cache  # it takes more than a second
def selection(ranks: int, everything: bool = False) -> list[Case]:
    return covering(
        factors(ranks), EVERYTHING if everything and ranks in (1, 2, 4, 8) else (), possible
    )


def spec_of(case: Case, steps: int = 3, **train: Any) -> Spec:
    """Nothing divides: sequence 33, vocabulary 257, 6 heads or one more than ranks that share
    them, 7 layers or one more than parts.
    """
    (tensor, pipeline), (global_batch, micro_batch), chunks = (
        case["grid"],
        case["batch"],
        CHUNKS[case["schedule"]],
    )
    blocks = case.get("blocks", max(5, pipeline * chunks - 1))
    shape = {"layers": blocks, "hidden": 24, "heads": max(6, tensor + 1), "seq_len": 33}
    shape["vocab"] = 257
    batches = {
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "steps": steps,
        "eval_batches": 1,
    }
    layout = {
        "tensor": tensor,
        "pipeline": pipeline,
        "sequence_parallel": case["sequence"],
        "order": case.get("order", "auto"),
    }
    states = {"stage": case["stage"], "node_shared": case["shared"]}
    states["shard_ranks"] = case.get("shards", "all")
    family = of_family(case.get("family", "gpt"), shape["heads"])
    family["attention"] = Attention(**ATTENTION[case.get("attention", "dense")])
    return Spec(
        model=Model(**shape, **family, dropout=case["dropout"], tied_embeddings=case["tied"]),
        train=Train(
            **{
                **batches,
                "precision": case["precision"],
                "grad_clip": 0.5,
                "loss_scale": 1024.0,
                **train,
            }
        ),
        optimizer=Optimizer(name=case.get("optimizer", "adamw"), lr=3e-3, eps=1e-4),
        **sequences(case, shape["seq_len"]),
        zero=Zero(**states),
        parallel=Parallel(**layout, schedule=case["schedule"], chunks=chunks),
    )


def sequences(case: Case, longest: int) -> dict[str, Any]:
    length = case.get("length", 0)
    whole = length or longest
    grows = ((0, whole // 3), (2, whole)) if case.get("grows") else ()
    documents = case.get("documents", "packed")
    return {
        "data": Data(source="synthetic", documents=documents, seq_len=length),
        "schedule": Schedule(seq_len=grows),
    }


def of_family(name: str, heads: int) -> dict[str, Any]:
    """Llama with a half or a third of its heads for keys; a relative with all that others have,
    and one head.
    """
    if name == "gpt":
        return {}
    if name in BERT:
        return {"family": "bert", "masked_fraction": 0.3, **BERT[name]}
    if name in T5:
        return {"family": "t5", "masked_fraction": 0.3, "span_length": 2.0, **T5[name]}
    if name in ("llama", "fewer keys"):
        share = 2 if name == "llama" else 3
        return {"family": "llama", "kv_heads": heads // share if heads % share == 0 else heads}
    return {
        "family": "llama",
        "kv_heads": 1,
        "head_dim": 10,
        "activation": "gelu",
        "rope_fraction": 0.6,
        "window": 7,
        "window_pattern": 2,
        "rope_local_base": 100.0,
        "attention_cap": 5.0,
        "logit_cap": 8.0,
        "embedding_scale": 2.0,
        **dict.fromkeys(("norm_offset", "post_norms", "qk_norm"), True),
        **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), True),
    }


def on_grid(world: World, case: Case, spec: Spec) -> Record:
    nodes = world.part(range(world.size), case.get("per_node", 0))
    record = train(nodes, spec)
    nodes.close()
    return record


class Serial:
    """Runs of a spec on rank 0 alone, once for every model, batch and number of steps."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def __call__(self, world: World, spec: Spec) -> Record:
        spec = spec.model_copy(
            update={
                "parallel": Parallel(),
                "zero": Zero(stage=0, node_shared=False),
                "memory": Memory(),
            }
        )
        name = spec.model_dump_json()
        if name not in self._records:
            alone = world.part([0])
            alone.use(CPU)
            self._records[name] = train(alone, spec)
            alone.close()
        return self._records[name]


def assert_agrees(found: Record, serial: Serial, world: World, spec: Spec) -> None:
    """All ranks with each other, to the bit, and rank 0 with what it then makes alone, while the
    others rest.

    In fp32 as `assert_same` has it. In half precision every partial sum is rounded: a few
    roundings in a gradient, or three times what one rank alone is off in fp32; far less in what
    is averaged over all tokens.
    """
    assert_all_ranks_say(world, found)
    if world.rank > 0:
        return
    expected = serial(world, spec)
    if spec.train.precision == "fp32":
        kept = steady(expected, spec)
        if spec.optimizer.name == "lion":
            kept = unturned(expected, found, spec, kept)
        assert_same(expected, found, kept)
        return
    one_rounding = torch.finfo(DTYPES[spec.train.precision]).eps
    exact = serial(world, in_fp32(spec)).gradients
    scale = spec.train.loss_scale if spec.train.precision == "fp16" else 1.0
    for name, gradient in expected.gradients.items():
        # where most of what is summed cancels, roundings are more than a few, on one rank as well
        own_error = (gradient - scale * exact[name]).norm()
        bound = max(8 * one_rounding * gradient.norm(), 3 * own_error)
        assert (gradient - found.gradients[name]).norm() < bound, name
    assert found.losses == pytest.approx(expected.losses, rel=one_rounding / 8)
    # of gradients that near, the norm is what has to be right: theirs, on either grid
    of_gradients = expected.norms[0] / _norm(expected.gradients)
    assert found.norms[0] / _norm(found.gradients) == pytest.approx(of_gradients, rel=1e-6)
    # a padded sequence has a third of the targets to average over, and fewer; so has a masked one
    tokens = 4 if spec.data.documents == "padded" or spec.model.masks else 8
    assert found.validation_losses == pytest.approx(
        expected.validation_losses, rel=one_rounding / tokens
    )


def in_fp32(spec: Spec) -> Spec:
    return spec.model_copy(
        update={"train": spec.train.model_copy(update={"precision": "fp32", "steps": 1})}
    )


def _norm(gradients: Mapping[str, torch.Tensor]) -> float:
    squares = [gradient.double().square().sum() for gradient in gradients.values()]
    return float(torch.stack(squares).sum().sqrt())


def steady(serial: Record, spec: Spec) -> dict[str, torch.Tensor] | None:
    """Which weights a short run can be judged by. An element whose gradient happens to be nearly
    zero beside the others of its tensor moves in Adam's first steps as its rounding says; 20 steps
    make little of that, three do not. A matrix drowns what is left; what begins at zero, biases
    and norms with an offset, has nothing to drown it in.
    """
    if spec.train.steps >= 20:
        return None

    from_zero = {
        parameter.name
        for layer in families.layers(spec.model)
        for parameter in layer.parameters
        if parameter.initial == ZEROS
    }

    def kept(name: str, gradient: torch.Tensor) -> torch.Tensor:
        tiny = 1e-3 if name in from_zero else 1e-4
        return (gradient == 0) | (gradient.abs() > tiny * gradient.square().mean().sqrt())

    found = {name: kept(name, gradient) for name, gradient in serial.gradients.items()}
    left_out = sum(int((~mask).sum()) for mask in found.values()) / sum(
        mask.numel() for mask in found.values()
    )
    assert left_out < 0.01
    return found


def unturned(
    serial: Record, found: Record, spec: Spec, kept: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Leave out weights whose step by Lion had the other sign: their momentum was nearly zero.

    They are a whole step apart, or several: the bias of keys, which changes no softmax, so that
    its gradient is rounding alone, and of the others hardly any.
    """
    same = {
        name: (weights - found.weights[name]).abs() < spec.optimizer.lr / 4
        for name, weights in serial.weights.items()
    }
    others = {
        name: mask for name, mask in same.items() if not name.endswith((".qkv.bias", ".key.bias"))
    }
    turned = sum(int((~mask).sum()) for mask in others.values())
    assert turned <= 1e-4 * sum(mask.numel() for mask in others.values()), turned
    return {name: mask & kept[name] if kept else mask for name, mask in same.items()}


def assert_all_ranks_say(world: World, found: Record) -> None:
    """The same about every step, to the bit, and they have the same whole gradients and weights."""
    steps = [
        [
            str(metrics.get(name))
            for name in ("loss", "grad_norm", "loss_scale", "skipped", "validation_loss")
        ]
        for metrics in found.metrics_seen
    ]
    tensors = [
        str(whole[name].double().sum().item())
        for whole in (found.gradients, found.weights)
        for name in sorted(whole)
    ]
    assert [steps, tensors] == world.broadcast_object([steps, tensors])


def differences(one: Record, other: Record) -> list[str]:
    """Return what is not the same to the bit: losses and norms of which steps, which weights."""
    numbers = {"loss": (one.losses, other.losses), "norm": (one.norms, other.norms)}
    found = [
        f"{name} of step {step}: {ours!r}, {theirs!r}"
        for name, (first, second) in numbers.items()
        for step, (ours, theirs) in enumerate(zip(first, second, strict=True), 1)
        if ours != theirs
    ]
    return found + [
        name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])
    ]


def bitwise(one: Record, other: Record) -> bool:
    return not differences(one, other)
