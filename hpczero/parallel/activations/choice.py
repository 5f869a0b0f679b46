"""The layers whose activations are not all kept (pure)."""

from hpczero.model.shapes import Layer, index_of
from hpczero.spec.schema import Memory, Spec

# What so many blocks of a chunk keep stays on the device where the others' goes to the host: for
# all micro-batches together.
STAY = 2

# memory.loss_chunk = "auto": the fewest positions of a piece, and the most pieces.
_LEAST = 2048
_PIECES = 8


def recomputed(memory: Memory, layer: Layer) -> str:
    """Return what is computed again in the layer's backward: "none", "selective" or "block"."""
    if not layer.is_block or index_of(layer) % memory.recompute_every:
        return "none"
    return memory.recompute


def loss_rows(memory: Memory, positions: int) -> int:
    """Return the positions of a micro-batch whose logits exist at a time; 0: all, from forward on.

    In half precision each piece rounds the weight's gradient once more, so "auto" makes few pieces.
    """
    if memory.loss_chunk != "auto":
        return memory.loss_chunk
    return max(_LEAST, -(-positions // _PIECES)) if positions >= _LEAST else 0


def partitions(spec: Spec) -> bool:
    """Return True if the inputs of blocks that are computed again are cut over tensor ranks.

    With sequence parallelism they are anyway.
    """
    parallel = spec.parallel
    wanted = spec.memory.partition_activations and parallel.tensor > 1
    return wanted and not parallel.sequence_parallel
