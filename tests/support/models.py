"""Small modules with the habits of other people's models."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Model

SIDE, CLASSES = 8, 10


class Convolutions(nn.Module):
    """[samples, 3, 8, 8] and classes [samples] -> the summed loss."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if normalised else nn.Identity
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU()),
            nn.Sequential(nn.Conv2d(16, 24, 3, stride=2, padding=1), norm(24), nn.ReLU()),
            nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=2), norm(24), nn.ReLU()),
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = self.features(x.to(self.scale.dtype)).mean((2, 3))
        return functional.cross_entropy(
            (self.head(features) * self.scale).float(), y, reduction="sum"
        )


@dataclass
class Output:
    values: torch.Tensor
    extra: tuple[torch.Tensor, ...]


class Block(nn.Module):
    """Its output is a dataclass; its own parts are called twice, nested."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )

    def once(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> Output:
        first = x + self.once(x)
        return Output(first + self.once(first), (first.detach(),))


class Odd(nn.Module):
    """Tied, unused, frozen, shared and tiny parameters, parameters beside the layers, a
    container's own, a buffer, an integer; dictionaries out.
    """

    def __init__(self, width: int = 24, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.blocks.append(self.blocks[0])  # runs twice in a forward
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])
        self.offset = nn.Parameter(torch.tensor(0.1))
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.unused = nn.Linear(width, 7)
        self.head = nn.Linear(width, 40)
        self.head.weight = self.embedding.weight
        self.blocks[1].up.weight.requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.counter = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("shift", torch.linspace(0, 1, width))

    def forward(self, tokens: torch.Tensor, skip: bool = False) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens) + self.shift.to(self.offset.dtype)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            ).values
        x = x * self.gains[0] * self.gains[1] + self.offset
        x = x + self.recurrent(x)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if not skip:
            x = x + self.unused(x).mean(-1, keepdim=True)
        logits = functional.linear(x, weight=self.embedding.weight, bias=self.head.bias)[
            :, :-1
        ]  # outside of the layers that hold them
        loss = functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum"
        )
        return {"loss": loss, "logits": logits}


class Tower(nn.Module):
    """Layers of one size, several of them in one checkpoint."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.layers[3].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for half in (self.layers[:4], self.layers[4:]):
            x = (
                checkpoint(self.run, half, x, use_reentrant=False)
                if self.checkpointed
                else self.run(half, x)
            )
        return x.square().sum()

    def run(self, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = torch.tanh(layer(x)) * layer.weight.shape[0] ** 0.5
        return x


class TextModel(nn.Module):
    """A module that model.family may name: gets micro-batches, gives the summed loss."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.body = nn.Sequential(
            *(nn.Linear(model.hidden, model.hidden) for _ in range(model.layers))
        )
        self.head = nn.Linear(model.hidden, model.vocab)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logits = self.head(self.body(self.embedding(batch.tokens)))
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum"
        )


class Table(nn.Module):
    """Gives a view of its weight, which is read when other layers have run."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))

    def forward(self, count: int) -> torch.Tensor:
        return self.weight[:count]


class Positions(nn.Module):
    """Vectors with places; works in place on what a linear map of three dimensions gives."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(64, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.table(x.shape[-1])
        x = x.to(places.dtype).unsqueeze(1).expand(-1, x.shape[-1], -1)
        for layer in self.layers:
            x = x + layer(x)
        return (x + places).square().sum()


class Pair(nn.Module):
    """A layer that may leave out a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.skips = nn.Linear(16, 16), nn.Linear(16, 16), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(x)
        return x if self.skips else x + self.other(x)


class Mixed(nn.Module):
    """A layer whose output has another shape than its input; frozen in part, without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(inputs),
            nn.Linear(inputs, 2 * inputs),
            nn.Linear(2 * inputs, outputs, bias=False),
        )
        self.norm.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Head(nn.Module):
    """Knows the embedding, whose weight it uses."""

    def __init__(self, hidden: int, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(hidden), nn.Linear(*reversed(embedding.weight.shape))
        self.logits.weight = embedding.weight
        self.register_buffer("scale", torch.full((), 1.5))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x)) * self.scale.to(x.dtype)


class Layered(nn.Module):
    """A module that a pipeline can run: widths that change from layer to layer, an embedding that
    the head has too, one module that runs twice.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden, wide = model.hidden, model.hidden + 8
        self.embedding = nn.Embedding(model.vocab, hidden)
        self.again = Mixed(hidden, hidden)
        self.body = nn.Sequential(
            Mixed(hidden, wide), nn.Linear(wide, wide), nn.GELU(), Mixed(wide, hidden)
        )
        self.head = Head(hidden, self.embedding)

    def layers(self) -> list[nn.Module]:
        return [self.embedding, self.again, *self.body, self.again, self.head]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            output.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        x = batch.tokens
        for layer in self.layers():
            x = layer(x)
        return self.loss(x, batch.targets)


class Twice(Layered):
    def layers(self) -> list[nn.Module]:
        return [self.embedding, self.again, *self.body, self.again, self.head]

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.body = nn.Sequential(Mixed(model.hidden, model.hidden))


def layered_on_meta(model: Model) -> nn.Module:
    with torch.device("meta"):
        return Layered(model)


class Again(nn.Module):
    """While backward goes on it computes with its layer once more, and keeps what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        out.register_hook(lambda _: self.keep(x))
        return out.square().mean()

    def keep(self, x: torch.Tensor) -> None:
        with torch.enable_grad():
            self.kept = self.layer(torch.tanh(self.layer(x))).square().mean()
