"""Layers and parameters of a model as plain data, without torch, for the planner and checkpoints.

Tests hold the torch models equal to it. Legend: a parameter's `split` is the dimension that is
sharded over tensor-parallel ranks (None: each of them holds the whole parameter).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from hpczero.spec.schema import Model


@dataclass(frozen=True)
class Initial:
    """Initial values of a parameter: "zeros", "ones", or "normal" with mean 0 and deviation std."""

    kind: str
    std: float = 0.0


ZEROS = Initial("zeros")
ONES = Initial("ones")


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    initial: Initial
    split: int | None = None
    grain: int = 1  # elements along `split` that stay together (the columns of a head)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Return True for a matrix: weight decay does not apply to biases and norms."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Layer:
    """One entry of the model's list of layers.

    `uses` names parameters of another layer that it works with (tied embeddings).
    `around`: some of its parameters are in use while other layers run.
    """

    name: str
    parameters: tuple[Parameter, ...]
    uses: tuple[str, ...] = ()
    around: bool = False

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def kind(self) -> str:
        """The name without its number: "blocks" of "blocks.3"."""
        return self.name.partition(".")[0]

    @property
    def names(self) -> set[str]:
        """Names of all parameters that the layer works with."""
        return {parameter.name for parameter in self.parameters} | set(self.uses)


def head_dim(model: Model) -> int:
    return model.head_dim or -(-model.hidden // model.heads)


def ffn(model: Model) -> int:
    return model.ffn or 4 * model.hidden


def layers(model: Model) -> list[Layer]:
    return _FAMILIES[model.family](model)


def known(model: Model) -> bool:
    """Return True for hpczero's own families.

    The layers of "package.module:factory" are not known without building the model.
    """
    return model.family in _FAMILIES


def layer_count(model: Model) -> int:
    """Return len(layers(model)) without listing the blocks."""
    return model.layers + len(layers(model.model_copy(update={"layers": 0})))


def parameter_count(model: Model) -> int:
    return sum(layer.size for layer in layers(model))


def _gpt(model: Model) -> list[Layer]:
    """GPT-2's architecture and initial values (Radford et al. 2019).

    Projections into the residual stream start smaller, by 1/sqrt(2 x layers).
    """
    normal = Initial("normal", 0.02)
    embedding = Layer(
        "embedding",
        (
            Parameter("embedding.lookup.tokens", (model.vocab, model.hidden), normal, split=0),
            Parameter("embedding.lookup.positions", (model.seq_len, model.hidden), normal),
        ),
    )
    blocks = [_gpt_block(f"blocks.{index}", model, normal) for index in range(model.layers)]
    norm = _norm("head.norm", model.hidden)
    if model.tied_embeddings:
        head = Layer("head", norm, uses=("embedding.lookup.tokens",))
    else:
        logits = Parameter("head.logits.weight", (model.vocab, model.hidden), normal, split=0)
        head = Layer("head", (*norm, logits))
    return [embedding, *blocks, head]


def _gpt_block(name: str, model: Model, normal: Initial) -> Layer:
    hidden = model.hidden
    wide = ffn(model)
    grain = head_dim(model)
    inner = model.heads * grain
    into_residual = Initial("normal", normal.std / (2 * model.layers) ** 0.5)
    attention = f"{name}.attention"
    feed_forward = f"{name}.feed_forward"
    parameters = (
        *_norm(f"{attention}.norm", hidden),
        Parameter(f"{attention}.qkv.weight", (3, inner, hidden), normal, split=1, grain=grain),
        Parameter(f"{attention}.qkv.bias", (3, inner), ZEROS, split=1, grain=grain),
        Parameter(
            f"{attention}.output.weight", (hidden, inner), into_residual, split=1, grain=grain
        ),
        Parameter(f"{attention}.output.bias", (hidden,), ZEROS),
        *_norm(f"{feed_forward}.norm", hidden),
        Parameter(f"{feed_forward}.up.weight", (wide, hidden), normal, split=0),
        Parameter(f"{feed_forward}.up.bias", (wide,), ZEROS, split=0),
        Parameter(f"{feed_forward}.down.weight", (hidden, wide), into_residual, split=1),
        Parameter(f"{feed_forward}.down.bias", (hidden,), ZEROS),
    )
    return Layer(name, parameters)


def _norm(name: str, hidden: int) -> tuple[Parameter, Parameter]:
    weight = Parameter(f"{name}.weight", (hidden,), ONES)
    return weight, Parameter(f"{name}.bias", (hidden,), ZEROS)


_FAMILIES: dict[str, Callable[[Model], list[Layer]]] = {"gpt": _gpt}
