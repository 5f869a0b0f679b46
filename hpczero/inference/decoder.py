"""A model of a family that generates, and its layers up to the head."""

from typing import Any, Protocol

from torch import Tensor

from hpczero.model.batch import MicroBatch


class Decoder(Protocol):
    """Layers, of which the last, the head, has `scores` beside its loss."""

    def layers(self) -> list[Any]: ...


def hidden_states(model: Decoder, batch: MicroBatch) -> tuple[Tensor, Any]:
    """Return what the head makes logits of [samples, seq, hidden], and the head."""
    *layers, head = model.layers()
    x = batch.tokens
    for layer in layers:
        x = layer(x, batch)
    return x, head
