"""Layers and stages for tests of the pipeline's executor, and the serial run to compare with."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Otherwise the first backward from a given gradient imports it, in one stage after the other.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn
from torch.nn import functional

from hpczero.data.samples import micro_batches_of
from hpczero.model.batch import MicroBatch

HIDDEN, VOCABULARY, SEQ = 12, 19, 5


LARGE = 1 << 15


BATCHES = {  # samples of each micro-batch
    "one": [2],
    "uneven": [len(part) for part in micro_batches_of(0, 5, 2, 1)],
    "many": [2] * 7,
    "all different": [3, 1, 4, 2, 5],
    "empty": [2, 0, 1, 0],
}


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        assert x is None
        return self.tokens(batch.tokens)


class Block(nn.Module):
    """A layer whose output depends on the numbers of the samples, as dropout's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        kept = 1 + (batch.samples % 3).to(x.dtype)[:, None, None]
        return x + self.down(torch.tanh(self.up(x)) * kept)


class View(nn.Module):
    """A layer whose output is a view of its input, and its gradient a view of its output's."""

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return x.view(x.shape)


class Transposed(nn.Module):
    """A layer whose output is not contiguous."""

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return (x.transpose(0, 2) * 1.5).transpose(0, 2)


class Deaf(nn.Module):
    """A layer that ignores its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return self.value.expand(x.shape)


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return functional.cross_entropy(
            self.linear(x).flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )


def model(
    count: int, width: int = HIDDEN, inner: Sequence[Callable[[], nn.Module]] = ()
) -> list[nn.Module]:
    """Return `count` layers, equal on every rank; `inner` make the first of the inner ones."""
    torch.manual_seed(5)
    special = [make() for make in inner]
    return [
        Embedding(width),
        *special,
        *(Block(width) for _ in range(count - 2 - len(special))),
        Head(width),
    ]


def cut_batches(kind: str) -> list[MicroBatch]:
    torch.manual_seed(7)
    sizes = BATCHES[kind]
    text = torch.randint(VOCABULARY, (sum(sizes), SEQ + 1))
    rows = torch.arange(sum(sizes)).split(sizes)
    return [MicroBatch(text[own, :-1], text[own, 1:], own, step=0, seed=1) for own in rows]


def serial(
    layers: list[nn.Module], batches: Sequence[MicroBatch]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The losses, and all parameters' gradients, of one process that runs all layers."""
    losses = []
    for batch in batches:
        x: Any = None
        for layer in layers:
            x = layer(x, batch)
        (x / 10).backward()
        losses.append(x.detach())
    gradients = [parameter.grad for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    return losses, gradients


@dataclass
class Stage:
    """One rank's parts of the model. It records the calls of backward, and of how many
    micro-batches activations are alive.
    """

    chunks: list[list[nn.Module]]
    delay: float = 0.0
    poll: Callable[[], None] = lambda: None
    lasts: list[tuple[int, bool]] = field(default_factory=list)
    alive: "weakref.WeakSet[Saved]" = field(default_factory=weakref.WeakSet)
    most_alive: int = 0

    def forward(self, chunk: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        time.sleep(self.delay)
        number = object()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.save(number, tensor), lambda saved: saved.tensor
        ):
            result: Any = x
            for layer in self.chunks[chunk]:
                result = layer(result, batch)
                self.poll()
        self.most_alive = max(self.most_alive, len({saved.number for saved in self.alive}))
        return result

    def save(self, number: object, tensor: Tensor) -> "Saved":
        saved = Saved(number, tensor)
        self.alive.add(saved)
        return saved

    def backward(self, chunk: int, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        time.sleep(self.delay)
        self.lasts.append((chunk, last))
        if gradient is None:
            (output / 10).backward()
        else:
            assert gradient.shape == output.shape
            output.backward(gradient)

    def gradients(self) -> list[Tensor | None]:
        return [
            parameter.grad
            for part in self.chunks
            for layer in part
            for parameter in layer.parameters()
        ]


@dataclass(eq=False)
class Saved:
    """A tensor that autograd keeps for the backward of a micro-batch."""

    number: object
    tensor: Tensor


class Scale(nn.Module):
    """A layer for messages of LARGE elements a token; the first one makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        if x is None:
            x = batch.samples.float()[:, None, None].expand(*batch.tokens.shape, LARGE) / 100
        return x * self.factor


class Sum(nn.Module):
    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return x.sum()
