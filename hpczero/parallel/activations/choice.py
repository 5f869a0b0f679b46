"""The layers whose activations are not all kept (pure)."""

from hpczero.model.shapes import Layer
from hpczero.spec.schema import Memory


def recomputed(memory: Memory, layer: Layer) -> str:
    """Return what is computed again in the layer's backward: "none", "selective" or "block"."""
    kind, _, number = layer.name.partition(".")
    if kind != "blocks" or int(number) % memory.recompute_every:
        return "none"
    return memory.recompute
