"""What a model consists of, as plain data: spec -> layers -> parameters (no torch; the planner and checkpoints live on this).

The torch models are tested equal to it. Legend: a parameter's `split` is the dimension that tensor-parallel ranks share out among themselves
(None: every one of them holds it whole).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from hpczero.spec.schema import Model


@dataclass(frozen=True)
class Initial:
    """How a parameter begins: "normal" of mean 0 and the given standard deviation, "zeros" or "ones"."""

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
        """Weight decay is for matrices; biases and norms have none."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Layer:
    """One entry of the model's list of layers; `uses` names parameters of another layer that it works with (tied embeddings). `around`: some of
    its parameters are in use while other layers run.
    """

    name: str
    parameters: tuple[Parameter, ...]
    uses: tuple[str, ...] = ()
    around: bool = False

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def names(self) -> set[str]:
        """Of all parameters that it works with."""
        return {parameter.name for parameter in self.parameters} | set(self.uses)


def head_dim(model: Model) -> int:
    return model.head_dim or -(-model.hidden // model.heads)


def ffn(model: Model) -> int:
    return model.ffn or 4 * model.hidden


def layers(model: Model) -> list[Layer]:
    return _FAMILIES[model.family](model)


def known(model: Model) -> bool:
    """A family of hpczero's own; what "package.module:factory" makes is not known without building it."""
    return model.family in _FAMILIES


def layer_count(model: Model) -> int:
    """len(layers(model)): those before and after the blocks do not depend on how many blocks there are."""
    return model.layers + len(layers(model.model_copy(update={"layers": 0})))


def parameter_count(model: Model) -> int:
    return sum(layer.size for layer in layers(model))


def _gpt(model: Model) -> list[Layer]:
    """GPT-2's architecture and initial values: Radford et al. 2019; projections into the residual stream start smaller by 1/sqrt(2 x layers)."""
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
        head = Layer(
            "head",
            (*norm, Parameter("head.logits.weight", (model.vocab, model.hidden), normal, split=0)),
        )
    return [embedding, *blocks, head]


def _gpt_block(name: str, model: Model, normal: Initial) -> Layer:
    hidden, inner, wide = model.hidden, model.heads * head_dim(model), ffn(model)
    into_residual = Initial("normal", normal.std / (2 * model.layers) ** 0.5)
    return Layer(
        name,
        (
            *_norm(f"{name}.attention.norm", hidden),
            Parameter(
                f"{name}.attention.qkv.weight",
                (3, inner, hidden),
                normal,
                split=1,
                grain=head_dim(model),
            ),
            Parameter(
                f"{name}.attention.qkv.bias", (3, inner), ZEROS, split=1, grain=head_dim(model)
            ),
            Parameter(
                f"{name}.attention.output.weight",
                (hidden, inner),
                into_residual,
                split=1,
                grain=head_dim(model),
            ),
            Parameter(f"{name}.attention.output.bias", (hidden,), ZEROS),
            *_norm(f"{name}.feed_forward.norm", hidden),
            Parameter(f"{name}.feed_forward.up.weight", (wide, hidden), normal, split=0),
            Parameter(f"{name}.feed_forward.up.bias", (wide,), ZEROS, split=0),
            Parameter(f"{name}.feed_forward.down.weight", (hidden, wide), into_residual, split=1),
            Parameter(f"{name}.feed_forward.down.bias", (hidden,), ZEROS),
        ),
    )


def _norm(name: str, hidden: int) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.weight", (hidden,), ONES), Parameter(f"{name}.bias", (hidden,), ZEROS)


_FAMILIES: dict[str, Callable[[Model], list[Layer]]] = {"gpt": _gpt}
