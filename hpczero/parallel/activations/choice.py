"""The layers whose activations are not all kept (pure)."""

from hpczero.model.shapes import Layer
from hpczero.spec.schema import Memory, Spec

_LITTLE = 64 << 20  # bytes of logits that need not be made by pieces
_MOST_PIECES = 8  # each rounds the weight's gradient in half precision


def recomputed(memory: Memory, layer: Layer) -> str:
    """Return what is computed again in the layer's backward: "none", "selective" or "block"."""
    kind, _, number = layer.name.partition(".")
    if kind != "blocks" or int(number) % memory.recompute_every:
        return "none"
    return memory.recompute


def loss_rows(spec: Spec) -> int:
    """Return of how many positions the logits exist at a time; 0: of all, in the usual way."""
    if spec.memory.loss_chunk:
        return spec.memory.loss_chunk
    rows = min(spec.train.micro_batch, spec.train.global_batch) * spec.seq_len
    width = 4 if spec.train.precision == "fp32" else 2
    row_bytes = spec.model.vocab * width / spec.parallel.tensor
    if rows * row_bytes <= _LITTLE:
        return 0
    return max(-(-rows // _MOST_PIECES), int(_LITTLE / row_bytes), 1)
