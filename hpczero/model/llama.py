"""Llama (Touvron et al. 2023) and its relatives in plain PyTorch that knows no parallelism.

RMSNorm before each part, rotary positions, grouped-query attention, a gated feed-forward part; the
spec's keys make Mistral, Qwen, Gemma and Phi-3 of it. As in `gpt.py` a model is a list of layers,
and a layer reads its numbers of heads and columns off its weights.

Legend: [samples, seq, hidden]; heads x head_dim = inner.
"""

from collections.abc import Sequence

import torch
from torch import nn

from hpczero.model import maps, shapes
from hpczero.model.attention import AttentionCore
from hpczero.model.batch import MicroBatch
from hpczero.model.modules import CrossEntropy, Dropout, Layered, Linear, StackedLinear
from hpczero.model.rotary import Angles
from hpczero.spec.schema import Model
from hpczero_kernels.operations import OPERATIONS


class Llama(Layered):
    def __init__(self, model: Model) -> None:
        angles = Angles(model, local=False), Angles(model, local=True)
        blocks = (Block(model, index, angles) for index in range(model.layers))
        super().__init__(model, embedding=Embedding(model), blocks=blocks, head=Head(model))


class Norm(nn.Module):
    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = model.norm_eps
        self.offset = 1.0 if model.norm_offset else 0.0
        self.rms_norm = OPERATIONS[model.kernels].rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x, self.weight, self.eps, self.offset)


class Lookup(nn.Module):
    """Embeddings of tokens."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(model.vocab, model.hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return maps.embedding(tokens, self.tokens)


class Embedding(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lookup = Lookup(model)
        self.dropout = Dropout(model, "embedding")
        self.scale = model.embedding_scale

    def forward(self, tokens: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        x = self.lookup(tokens)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype).item()  # rounded first, as Gemma's is
        return self.dropout(x, batch)


class AttentionInputs(nn.Module):
    """Queries, keys and values of the same input: three linear maps."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        head_dim = shapes.head_dim(model)
        of_keys = shapes.kv_heads(model) * head_dim
        self.query = Linear(model.hidden, model.heads * head_dim, model.qkv_bias)
        self.key = Linear(model.hidden, of_keys, model.qkv_bias)
        self.value = Linear(model.hidden, of_keys, model.qkv_bias)
        self.heads = model.heads
        self.kv_heads = shapes.kv_heads(model)
        self.head_dim = head_dim

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query(x), self.key(x), self.value(x)


class Attention(nn.Module):
    """Add attention's result to the residual stream."""

    def __init__(self, model: Model, index: int, angles: Sequence[Angles]) -> None:
        super().__init__()
        self.head_dim = shapes.head_dim(model)
        self.core = AttentionCore(model, index)
        self.angles = angles[self.core.window > 0]
        self.rotary = OPERATIONS[model.kernels].rotary
        self.norm = Norm(model, model.hidden)
        self.inputs = AttentionInputs(model)
        self.query_norm = Norm(model, self.head_dim) if model.qk_norm else nn.Identity()
        self.key_norm = Norm(model, self.head_dim) if model.qk_norm else nn.Identity()
        inner = model.heads * self.head_dim
        self.output = Linear(inner, model.hidden, model.output_bias)
        self.post_norm = Norm(model, model.hidden) if model.post_norms else nn.Identity()
        self.dropout = Dropout(model, f"blocks.{index}.attention")

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        # each [samples, seq, heads, head_dim]
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.inputs(self.norm(x))
        )
        length = query.shape[1] if batch.positions is None else batch.reach
        cosines, sines = self.angles(length, batch.positions, query.device)
        query = self.rotary(self.query_norm(query), cosines, sines)
        key = self.rotary(self.key_norm(key), cosines, sines)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = self.core(query, key, value, batch)
        added = self.post_norm(self.output(mixed.transpose(1, 2).flatten(2)))
        return self.dropout(added, batch, x)


class FeedForward(nn.Module):
    """Add the gated feed-forward network's result to the residual stream."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        self.norm = Norm(model, model.hidden)
        self.up = StackedLinear(model.hidden, 2, shapes.ffn(model), model.ffn_bias)
        self.down = Linear(shapes.ffn(model), model.hidden, model.ffn_bias)
        self.post_norm = Norm(model, model.hidden) if model.post_norms else nn.Identity()
        self.dropout = Dropout(model, f"blocks.{index}.feed_forward")
        self.activation = model.activation
        self.glu = OPERATIONS[model.kernels].glu

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        wide = self.glu(self.up(self.norm(x)), self.activation)  # gates, then values
        return self.dropout(self.post_norm(self.down(wide)), batch, x)


class Block(nn.Module):
    def __init__(self, model: Model, index: int, angles: Sequence[Angles]) -> None:
        super().__init__()
        self.attention = Attention(model, index, angles)
        self.feed_forward = FeedForward(model, index)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.feed_forward(self.attention(x, batch), batch)


class Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = Norm(model, model.hidden)
        self.logits = Linear(model.hidden, model.vocab, bias=False)
        self.cap = model.logit_cap
        self.soft_cap = OPERATIONS[model.kernels].soft_cap
        self.loss = CrossEntropy(model)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.loss(self.scores(x), batch.targets, batch.weights, batch.by_sample)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that may follow."""
        logits = self.logits(self.norm(x))
        return self.soft_cap(logits, self.cap) if self.cap else logits
