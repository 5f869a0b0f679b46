"""The causes of a step's seconds in words, and what would shrink them in a given job (pure)."""

from collections.abc import Iterator

from hpczero.model.families import layer_count
from hpczero.spec.schema import Spec

CALLED = {
    "compute": "products of matrices",
    "attention": "attention between its maps",
    "memory": "operations between the products, through the device's memory",
    "launch": "the device waits for the host to start operations",
    "tensor": "collectives of tensor ranks",
    "bubble": "stages of the pipeline that wait",
    "messages": "messages between stages",
    "data": "sums and gathers over data ranks that nothing hides",
    "optimizer": "the update of the weights",
    "offload": "states or activations that come and go",
    "checkpoint": "checkpoints",
    "overhead": "what a step takes besides",
}
_FEW_TOKENS = 4096  # of a micro-batch


def sentence(cause: str, spec: Spec) -> str:
    """Return what a cause is, and what would shrink it."""
    ways = list(_ways(cause, spec))
    return f"{CALLED[cause]}: less with {' or '.join(ways)}" if ways else CALLED[cause]


def _ways(cause: str, spec: Spec) -> Iterator[str]:
    parallel, zero, memory = spec.parallel, spec.zero, spec.memory
    more_tokens = "more tokens a step (train.global_batch)"
    if cause in ("compute", "attention", "memory") and memory.recompute != "none":
        yield "less of memory.recompute"
    if cause in ("compute", "launch", "tensor") and parallel.tensor > 1:
        yield "less of parallel.tensor"
    if cause in ("compute", "launch") and spec.train.micro_batch * spec.seq_len < _FEW_TOKENS:
        yield "a larger train.micro_batch"
    if cause == "attention":
        yield "shorter sequences"
    if cause == "memory" and parallel.tensor > 1 and not parallel.sequence_parallel:
        yield "parallel.sequence_parallel"
    if cause == "memory" and spec.model.kernels == "torch":
        yield "hpczero's kernels (model.kernels)"
    if cause == "tensor":
        yield "tensor ranks innermost in a node (parallel.order)"
    if cause in ("bubble", "messages"):
        yield "fewer stages (parallel.pipeline)"
    if cause == "bubble":
        yield "more micro-batches a step"
        if parallel.chunks == 1 and layer_count(spec.model) >= 2 * parallel.pipeline:
            yield 'parallel.schedule = "interleaved" with chunks'
    if cause == "messages" and parallel.chunks > 1:
        yield "fewer of parallel.chunks"
    if cause == "data" and zero.shard_ranks == "all":
        yield 'zero.shard_ranks = "node" on several nodes'
    if cause == "data" and zero.stage > 1:
        yield "a lower zero.stage or fewer micro-batches"
    if cause == "optimizer" and zero.stage == 0:
        yield "zero.stage = 1 or more"
    if cause == "offload":
        yield "zero.offload or memory.offload_activations less"
    if cause == "checkpoint":
        yield "a larger checkpoint.every"
    if cause in ("data", "optimizer", "offload", "overhead"):
        yield more_tokens
