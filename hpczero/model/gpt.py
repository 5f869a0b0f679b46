"""GPT (Radford et al. 2019) in plain PyTorch that knows no parallelism.

Learned positions, pre-norm blocks, GELU, tied embeddings. A model is a list of layers, each called
as layer(x, batch): the first makes x from the batch's tokens, the last returns the summed loss.
A layer reads its numbers of heads and columns off its weights, so one that holds a tensor-parallel
shard of them works unchanged. A layout replaces or redirects modules, so each operation that it
may treat specially is a module with a name.

Legend: [samples, seq, hidden], heads x head_dim = inner.
"""

from functools import partial

import torch
from torch import nn

from hpczero.model import maps, shapes
from hpczero.model.attention import AttentionCore
from hpczero.model.batch import MicroBatch
from hpczero.model.modules import CrossEntropy, Dropout, Layered, Linear, StackedLinear
from hpczero.spec.schema import Model
from hpczero_kernels.operations import OPERATIONS


class GPT(Layered):
    def __init__(self, model: Model) -> None:
        blocks = (Block(model, index) for index in range(model.layers))
        super().__init__(model, embedding=Embedding(model), blocks=blocks, head=Head(model))


class Norm(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.hidden))
        self.bias = nn.Parameter(torch.empty(model.hidden))
        self.eps = model.norm_eps
        self.layer_norm = OPERATIONS[model.kernels].layer_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(x, self.weight, self.bias, self.eps)


class Lookup(nn.Module):
    """Embeddings of tokens plus embeddings of their positions."""

    def __init__(self, vocab: int, seq_len: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocab, hidden))
        self.positions = nn.Parameter(torch.empty(seq_len, hidden))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        vectors = maps.embedding(tokens, self.tokens)
        return vectors + maps.of_positions(self.positions, tokens.shape[1], positions)


class Embedding(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lookup = Lookup(model.vocab, model.seq_len, model.hidden)
        self.dropout = Dropout(model, "embedding")

    def forward(self, tokens: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.dropout(self.lookup(tokens, batch.positions), batch)


class Sublayer(nn.Module):
    """Add a result to the residual stream; the norm is of what it is made from, or of the sum."""

    norm: nn.Module
    dropout: nn.Module

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm_is_last = shapes.norms_are_last(model)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        if self.norm_is_last:
            summed: torch.Tensor = self.norm(self.dropout(self.result(x, batch), batch, x))
            return summed
        added: torch.Tensor = self.dropout(self.result(self.norm(x), batch), batch, x)
        return added

    def result(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return what is added to the residual stream."""
        raise NotImplementedError


class Attention(Sublayer):
    def __init__(self, model: Model, index: int) -> None:
        super().__init__(model)
        self.head_dim = shapes.head_dim(model)
        self.core = AttentionCore(model, index)
        inner = model.heads * self.head_dim
        self.norm = Norm(model)
        self.qkv = StackedLinear(model.hidden, 3, inner)
        self.output = Linear(inner, model.hidden)
        self.dropout = Dropout(model, f"blocks.{index}.attention")

    def result(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        # [samples, seq, 3, heads, head_dim]
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [samples, heads, seq, head_dim]
        mixed = self.core(query, key, value, batch)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(Sublayer):
    def __init__(self, model: Model, index: int) -> None:
        super().__init__(model)
        self.norm = Norm(model)
        self.up = Linear(model.hidden, shapes.ffn(model))
        self.down = Linear(shapes.ffn(model), model.hidden)
        self.dropout = Dropout(model, f"blocks.{index}.feed_forward")
        by_tanh = model.family != "bert"
        self.gelu = partial(OPERATIONS[model.kernels].gelu, by_tanh=by_tanh)

    def result(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.down(self.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        self.attention = Attention(model, index)
        self.feed_forward = FeedForward(model, index)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.feed_forward(self.attention(x, batch), batch)


class Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = Norm(model)
        self.logits = Linear(model.hidden, model.vocab, bias=False)
        self.loss = CrossEntropy(model)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.loss(self.scores(x), batch.targets, batch.weights, batch.by_sample)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that may follow."""
        return self.logits(self.norm(x))
