"""T5 (Raffel et al. 2020) in plain PyTorch that knows no parallelism: an encoder and a decoder.

RMSNorm before each part, no biases, attention with a learned bias for distances instead of
positions and without a scale, a feed-forward part that is gated (version 1.1) or has a ReLU (as
first published, where the head also shares the embedding, and scales its logits by 1 / sqrt(hidden)
for that).

Both streams lie side by side in one tensor, which every block takes and returns: those of the
encoder change its part, those of the decoder the other, and look at the first. So it runs on any
grid like a model of one stream.

Legend: [samples, encoder's positions + decoder's, hidden].
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from hpczero.model import shapes
from hpczero.model.attention import AttentionCore
from hpczero.model.batch import MicroBatch
from hpczero.model.gpt import Sublayer
from hpczero.model.llama import AttentionInputs, Lookup, Norm
from hpczero.model.modules import CrossEntropy, Dropout, Layered, Linear, StackedLinear
from hpczero.spec.schema import Model
from hpczero_kernels.operations import OPERATIONS
from hpczero_kernels.relative_attention import Distances, bias_of_distances


class T5(Layered):
    def __init__(self, model: Model) -> None:
        positions = Positions(model)
        super().__init__(
            model,
            embedding=Embedding(model),
            positions=positions,
            encoder=(EncoderBlock(model, at, positions) for at in range(model.encoder_blocks)),
            decoder=(DecoderBlock(model, at, positions) for at in range(model.decoder_blocks)),
            head=Head(model),
        )


class Split(nn.Module):
    """Cut what blocks hand on into the encoder's part and the decoder's."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lengths = model.streams

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        return x.split(self.lengths(batch.tokens.shape[1]), 1)


class Embedding(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lookup = Lookup(model)
        self.streams = Split(model)
        self.encoder_dropout = Dropout(model, "embedding")
        self.decoder_dropout = Dropout(model, "embedding of decoder")

    def forward(self, tokens: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        encoder, decoder = self.streams(self.lookup(tokens), batch)
        return torch.cat(
            [self.encoder_dropout(encoder, batch), self.decoder_dropout(decoder, batch)], 1
        )


class Positions(nn.Module):
    """The learned biases of distances, which all blocks of the encoder or decoder share.

    They are in a layer of their own: it does nothing, and blocks elsewhere use them.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.position_buckets, model.heads
        self.encoder = nn.Parameter(torch.empty(shape))
        self.decoder = nn.Parameter(torch.empty(shape))

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return x


class RelativeCore(AttentionCore):
    """Mix the values of the keys that each query sees, with a bias for each distance."""

    def __init__(self, model: Model, layer: int, bias: nn.Parameter) -> None:
        super().__init__(model, layer)
        self.distances = Distances(model.position_buckets, model.position_reach, self.causal)
        self.bias = bias
        self._to_all = OPERATIONS[model.kernels].relative_attention

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: MicroBatch
    ) -> torch.Tensor:
        if self.rule is None:
            return self._to_all(query, key, value, self.bias, self.distances)
        seq = query.shape[2]
        bias = bias_of_distances(self.bias, self.distances, seq)
        layout = self._layout(self.rule, seq)
        return self._in_blocks(query, key, value, layout, scale=1.0, bias=bias)


class Attention(Sublayer):
    """Attention of one stream to itself."""

    def __init__(self, model: Model, site: str, layer: int, bias: nn.Parameter) -> None:
        super().__init__(model)
        self.head_dim = shapes.head_dim(model)
        self.core = RelativeCore(model, layer, bias)
        inner = model.heads * self.head_dim
        self.norm = Norm(model, model.hidden)
        self.inputs = AttentionInputs(model)
        self.output = Linear(inner, model.hidden, bias=False)
        self.dropout = Dropout(model, site)

    def result(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        query, key, value = (  # each [samples, heads, seq, head_dim]
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.inputs(x)
        )
        mixed = self.core(query, key, value, batch)
        return self.output(mixed.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention of the decoder's stream to the encoder's."""

    def __init__(self, model: Model, site: str) -> None:
        super().__init__()
        self.head_dim = shapes.head_dim(model)
        inner = model.heads * self.head_dim
        self.norm = Norm(model, model.hidden)
        self.query = Linear(model.hidden, inner, bias=False)
        self.memory = StackedLinear(model.hidden, 2, inner, bias=False)
        self.output = Linear(inner, model.hidden, bias=False)
        self.dropout = Dropout(model, site)

    def forward(self, x: torch.Tensor, encoder: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        query = self.query(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        # [samples, seq, 2, heads, head_dim]
        heads = self.memory(encoder).unflatten(-1, (-1, self.head_dim))
        key, value = heads.permute(2, 0, 3, 1, 4)  # each [samples, heads, seq, head_dim]
        mixed = _to_all(query, key, value)
        added: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return self.dropout(added, batch, x)


def _to_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return attention to all keys, without a scale."""
    if not query.shape[1]:  # no head on this tensor rank: PyTorch's attention may end the process
        return query + (key + value).sum(2, keepdim=True)
    return functional.scaled_dot_product_attention(query, key, value, scale=1.0)


class FeedForward(Sublayer):
    def __init__(self, model: Model, site: str) -> None:
        super().__init__(model)
        wide, gate = shapes.ffn(model), shapes.gate(model)
        self.norm = Norm(model, model.hidden)
        self.up = (
            StackedLinear(model.hidden, 2, wide, bias=False)  # gates, then values
            if gate
            else Linear(model.hidden, wide, bias=False)
        )
        self.down = Linear(wide, model.hidden, bias=False)
        self.dropout = Dropout(model, site)
        glu = partial(OPERATIONS[model.kernels].glu, activation=gate)
        self.activation = glu if gate else functional.relu

    def result(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class EncoderBlock(nn.Module):
    def __init__(self, model: Model, index: int, positions: Positions) -> None:
        super().__init__()
        site = f"encoder.{index}"
        self.streams = Split(model)
        self.attention = Attention(model, f"{site}.attention", index, positions.encoder)
        self.feed_forward = FeedForward(model, f"{site}.feed_forward")
        is_last = index == model.encoder_blocks - 1
        self.last_norm = Norm(model, model.hidden) if is_last else nn.Identity()

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        encoder, decoder = self.streams(x, batch)
        encoder = self.feed_forward(self.attention(encoder, batch), batch)
        return torch.cat([self.last_norm(encoder), decoder], 1)


class DecoderBlock(nn.Module):
    def __init__(self, model: Model, index: int, positions: Positions) -> None:
        super().__init__()
        site = f"decoder.{index}"
        self.streams = Split(model)
        layer = model.encoder_blocks + index
        self.attention = Attention(model, f"{site}.attention", layer, positions.decoder)
        self.cross = CrossAttention(model, f"{site}.cross")
        self.feed_forward = FeedForward(model, f"{site}.feed_forward")

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        encoder, decoder = self.streams(x, batch)
        decoder = self.cross(self.attention(decoder, batch), encoder, batch)
        return torch.cat([encoder, self.feed_forward(decoder, batch)], 1)


class Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.streams = Split(model)
        self.norm = Norm(model, model.hidden)
        self.scale = model.hidden**-0.5 if model.tied_embeddings else 1.0
        self.logits = Linear(model.hidden, model.vocab, bias=False)
        self.loss = CrossEntropy(model)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        _, decoder = self.streams(x, batch)
        return self.loss(self.scores(decoder), batch.targets, batch.weights, batch.by_sample)

    def scores(self, decoder: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that may follow."""
        x = self.norm(decoder)
        return self.logits(x * self.scale if self.scale != 1.0 else x)
