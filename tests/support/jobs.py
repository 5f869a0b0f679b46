"""Jobs of any grid for what is told of them beforehand: volumes and memory."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

from hpczero.comm.world import World
from hpczero.spec.optimizer import Outer
from hpczero.spec.rules import AXES, contradictions
from hpczero.spec.schema import (
    Comm,
    Data,
    Memory,
    Model,
    Optimizer,
    Parallel,
    Spec,
    Train,
    Zero,
)

MODEL = Model(layers=7, hidden=24, heads=6, seq_len=17, vocab=61)

BERT: list[dict[str, Any]] = [
    {"family": "bert", "sentences": "next"},
    {"family": "bert", "norm_order": "pre", "sentences": "order", "masked_fraction": 0.4},
    {"family": "bert", "norm_order": "pre"},
]

T5: list[dict[str, Any]] = [
    {"family": "t5", "encoder_layers": 3},
    {"family": "t5", "feed_forward": "relu", "masked_fraction": 0.3, "span_length": 2.0},
]

# what replicas exchange, other than plain sums -> tables of the spec
EXCHANGES: dict[str, dict[str, Any]] = {
    "compressed": {"comm": Comm(compress="int8")},
    "signs": {"optimizer": Optimizer(name="one_bit_adam", freeze=1)},
    **{
        form: {"optimizer": Optimizer(outer=Outer(every=1, precision=form))}
        for form in ("fp32", "bf16", "int8", "int4")
    },
}


@contextmanager
def laid_out(world: World, ranks_per_node: int) -> Iterator[World]:
    part = world.part(range(world.size), ranks_per_node)
    yield part
    part.close()


def job(
    batch: int = 7,
    micro_batch: int = 2,
    precision: Any = "bf16",
    tied: bool = True,
    zero: Any = None,
    memory: Any = None,
    **parallel: Any,
) -> Spec:
    return Spec(
        model=MODEL.model_copy(update={"tied_embeddings": tied}),
        data=Data(source="synthetic"),
        train=Train(
            global_batch=batch,
            micro_batch=micro_batch,
            precision=precision,
            steps=3,
            eval_batches=0,
        ),
        zero=Zero(**(zero or {})),
        memory=Memory(**(memory or {})),
        parallel=Parallel(**parallel),
    )


def any_job(choice: random.Random, ranks: int) -> Spec:
    """Draw a job of this number of ranks: any grid, in any order, with anything else that changes
    what is sent.
    """
    tensor = choice.choice([size for size in (1, 2, 3, 4, 6) if ranks % size == 0])
    pipeline = choice.choice([size for size in (1, 2, 3, 4, 8) if ranks % (size * tensor) == 0])
    schedule, chunks = choice.choice(
        [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
    )
    if pipeline == 1 or pipeline * chunks > MODEL.layers + 2:
        schedule, chunks = choice.choice(["gpipe", "1f1b"]), 1
    spec = job(
        batch=choice.randint(1, 14),
        micro_batch=choice.randint(1, 3),
        precision=choice.choice(["fp32", "bf16"]),
        tied=choice.random() < 0.6,
        zero={"stage": choice.randrange(4), "node_shared": choice.choice([False, True, "auto"])},
        tensor=tensor,
        pipeline=pipeline,
        sequence_parallel=tensor > 1 and choice.random() < 0.5,
        schedule=schedule,
        chunks=chunks,
        order=choice.choice(["auto", *map(",".join, permutations(AXES))]),
        memory={
            "recompute": choice.choice(["none", "selective", "block", "block"]),
            "recompute_every": choice.choice([1, 1, 2, 3]),
            "partition_activations": choice.choice([False, True]),
            "loss_chunk": choice.choice([0, 0, 9, 100]),
        },
    )
    data = ranks // (tensor * pipeline)
    shards = choice.choice(["all", "node", *(size for size in range(1, data) if data % size == 0)])
    zero = spec.zero.model_copy(update={"shard_ranks": shards})
    optimizer = Optimizer(name=choice.choice(["adamw", "adamw", "lion", "lamb", "muon"]))
    spec = spec.model_copy(update={"zero": zero, "optimizer": optimizer})
    if masks := choice.choice([None, None, None, *BERT, *T5]):
        model = spec.model.model_copy(update=masks)
        memory = spec.memory.model_copy(update={"loss_chunk": 0})
        spec = spec.model_copy(update={"model": model, "memory": memory})
    assert not contradictions(spec), contradictions(spec)
    return spec
