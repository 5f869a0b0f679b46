"""Specs of modules that users cut into stages."""

from typing import Any

from hpczero.spec.schema import Data, Model, Optimizer, Parallel, Spec, Train, Zero


def spec_of(
    family: str,
    stage: int = 0,
    shared: bool = False,
    steps: int = 4,
    precision: str = "fp32",
    **parallel: Any,
) -> Spec:
    """Nothing divides: 5 samples in micro-batches of 2, of 9 tokens."""
    return Spec(
        model=Model(family=f"tests.support.models:{family}", hidden=12, seq_len=9, vocab=31),
        data=Data(source="synthetic"),
        train=Train(
            global_batch=5,
            micro_batch=2,
            precision=precision,
            steps=steps,
            eval_batches=1,
            grad_clip=0.5,
        ),
        optimizer=Optimizer(lr=1e-2, eps=1e-6),
        zero=Zero(stage=stage, node_shared=shared),
        parallel=Parallel(**parallel),
    )
