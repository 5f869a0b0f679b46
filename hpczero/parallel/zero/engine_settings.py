"""The part of a spec that an engine goes by."""

from dataclasses import dataclass

from hpczero.parallel.zero.update_plan import PLAIN_ADAMW, UpdatePlan
from hpczero.spec.schema import Optimizer, Train, Zero


@dataclass(frozen=True)
class EngineSettings:
    """The spec's part that an engine goes by.

    `accumulates`: a step has several micro-batches (their sum is kept in fp32). `own_model`: the
    module is one of `hpczero.model`, where a layer's parameters are used while it runs and by
    nobody else, and linear maps whose gradients autograd would make are those of `model.maps`.
    """

    train: Train
    optimizer: Optimizer
    zero: Zero
    seed: int
    accumulates: bool
    threads: int = 1
    own_model: bool = False
    update: UpdatePlan = PLAIN_ADAMW
    compress: bool = False  # sums over replicas, in 8 bits
    compress_gathers: bool = False  # of weights, in 8 bits
    warmup_steps: int = 0  # of the learning rate
