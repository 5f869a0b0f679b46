"""GPT (Radford et al. 2019): learned positions, pre-norm blocks, GELU, tied embeddings. Plain PyTorch that knows no parallelism.

A model is a list of layers, each called as layer(x, batch); the first makes x from the batch's tokens, the last turns it into the
summed loss. How many heads and columns a layer has is read off its weights, so a layer that holds a part of them works as it is. What a layout
may treat in a way of its own is a module with a name.
Legend: [samples, seq, hidden], heads x head_dim = inner.
"""

import torch
from torch import nn
from torch.nn import functional

from hpczero.model import shapes
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Model
from hpczero_kernels.attention import attention, attention_reference
from hpczero_kernels.dropout import Place, dropout
from hpczero_kernels.philox import key_of


class GPT(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = Embedding(model)
        self.blocks = nn.ModuleList(Block(model, f"blocks.{index}") for index in range(model.layers))
        self.head = Head(model)
        if model.tied_embeddings:
            self.head.logits.weight = self.embedding.lookup.tokens

    def layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """The summed cross-entropy of the batch's targets, in fp32."""
        x = batch.tokens
        for layer in self.layers():
            x = layer(x, batch)
        return x


class Dropout(nn.Module):
    """Dropout that depends on (seed, step, sample, site, index), not on the order of execution."""

    def __init__(self, probability: float, site: str) -> None:
        super().__init__()
        self.probability, self.site = probability, site

    def forward(self, x: torch.Tensor, batch: MicroBatch, place: Place | None = None) -> torch.Tensor:
        if not self.training or self.probability == 0:
            return x
        return dropout(x, self.probability, key_of(batch.seed, "dropout", self.site, batch.step), batch.samples, place)


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.bias = nn.Parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class StackedLinear(nn.Module):
    """Several linear maps of the same input, in one weight [maps, outputs, inputs]: a part of the outputs of all of them is one rectangle."""

    def __init__(self, inputs: int, maps: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(maps, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(maps, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., maps, outputs]"""
        return functional.linear(x, self.weight.flatten(0, 1), self.bias.flatten()).unflatten(-1, self.bias.shape)


class Lookup(nn.Module):
    """The vectors of tokens and of their positions."""

    def __init__(self, vocab: int, seq_len: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocab, hidden))
        self.positions = nn.Parameter(torch.empty(seq_len, hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.tokens) + self.positions[: tokens.shape[1]]


class CrossEntropy(nn.Module):
    """Logits [samples, seq, vocab] and targets [samples, seq] -> the sum over all targets, in fp32."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Embedding(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lookup = Lookup(model.vocab, model.seq_len, model.hidden)
        self.dropout = Dropout(model.dropout, "embedding")

    def forward(self, tokens: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.dropout(self.lookup(tokens), batch)


class Attention(nn.Module):
    def __init__(self, model: Model, name: str) -> None:
        super().__init__()
        self.head_dim = shapes.head_dim(model)
        self.attention = attention if model.kernels == "auto" else attention_reference
        inner = model.heads * self.head_dim
        self.norm = Norm(model.hidden)
        self.qkv = StackedLinear(model.hidden, 3, inner)
        self.output = Linear(inner, model.hidden)
        self.dropout = Dropout(model.dropout, f"{name}.attention")

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim))  # [samples, seq, 3, heads, head_dim]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [samples, heads, seq, head_dim]
        mixed = self.attention(query, key, value)
        return self.dropout(self.output(mixed.transpose(1, 2).flatten(2)), batch)


class FeedForward(nn.Module):
    def __init__(self, model: Model, name: str) -> None:
        super().__init__()
        self.norm = Norm(model.hidden)
        self.up = Linear(model.hidden, shapes.ffn(model))
        self.down = Linear(shapes.ffn(model), model.hidden)
        self.dropout = Dropout(model.dropout, f"{name}.feed_forward")

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        wide = functional.gelu(self.up(self.norm(x)), approximate="tanh")
        return self.dropout(self.down(wide), batch)


class Block(nn.Module):
    def __init__(self, model: Model, name: str) -> None:
        super().__init__()
        self.attention = Attention(model, name)
        self.feed_forward = FeedForward(model, name)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        x = x + self.attention(x, batch)
        return x + self.feed_forward(x, batch)


class Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = Norm(model.hidden)
        self.logits = Linear(model.hidden, model.vocab, bias=False)
        self.loss = CrossEntropy(model.vocab)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.loss(self.logits(self.norm(x)), batch.targets)
