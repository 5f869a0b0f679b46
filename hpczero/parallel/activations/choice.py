"""The layers whose activations are not all kept (pure)."""

from hpczero.model.shapes import Layer
from hpczero.spec.schema import Memory, Spec

# What so many blocks of a chunk keep stays on the device where the others' goes to the host: for
# all micro-batches together.
STAY = 2


def recomputed(memory: Memory, layer: Layer) -> str:
    """Return what is computed again in the layer's backward: "none", "selective" or "block"."""
    kind, _, number = layer.name.partition(".")
    if kind != "blocks" or int(number) % memory.recompute_every:
        return "none"
    return memory.recompute


def partitions(spec: Spec) -> bool:
    """Return True if the inputs of blocks that are computed again are cut over tensor ranks.

    With sequence parallelism they are anyway.
    """
    parallel = spec.parallel
    wanted = spec.memory.partition_activations and parallel.tensor > 1
    return wanted and not parallel.sequence_parallel
