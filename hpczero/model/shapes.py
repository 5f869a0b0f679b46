"""Layers and parameters of a model as plain data, without torch, for the planner and checkpoints.

Tests hold the torch models equal to it. Legend: a parameter's `split` is the dimension that is
sharded over tensor-parallel ranks (None: each of them holds the whole parameter).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import TypeVar

from hpczero.model.work import LayerWork, WorkLayout
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
    # the grain among more ranks than there are grains; 0: each of them holds the whole parameter
    fine_grain: int | None = None  # None: as ever, and some ranks have none
    sections: int = 1  # equal parts along `split` of which each is cut (fused maps)
    is_stack: bool = False  # of linear maps, numbered by the first dimension (fused maps, too)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def divided(self) -> tuple[int, ...]:
        """The shape in which a tensor rank's part is one rectangle: sections have a dimension."""
        if self.split is None or self.sections == 1:
            return self.shape
        length = self.shape[self.split] // self.sections
        return (*self.shape[: self.split], self.sections, length, *self.shape[self.split + 1 :])

    def cut(self, ranks: int) -> tuple[int | None, int]:
        """Return the dimension that so many tensor ranks share, and its grain."""
        if self.split is None or self.fine_grain is None:
            return self.split, self.grain
        if ranks <= -(-self.shape[self.split] // self.sections // self.grain):
            return self.split, self.grain
        return (self.split, self.fine_grain) if self.fine_grain else (None, self.grain)

    @property
    def decays(self) -> bool:
        """Return True for a matrix: weight decay does not apply to biases and norms."""
        return len(self.shape) > 1

    @property
    def is_bias(self) -> bool:
        """Return True for a bias, that of a fused map with a row for each map among them."""
        return self.name.rpartition(".")[2] == "bias"


BLOCKS = ("blocks", "encoder", "decoder")  # kinds of layers


@dataclass(frozen=True)
class Layer:
    """One entry of the model's list of layers.

    `uses` names parameters of another layer that it works with (tied embeddings).
    `around`: some of its parameters are in use while other layers run. `only_forward`: those that
    its backward does not need (rows of them are looked up).
    """

    name: str
    parameters: tuple[Parameter, ...]
    uses: tuple[str, ...] = ()
    around: bool = False
    only_forward: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def kind(self) -> str:
        """The name without its number: "blocks" of "blocks.3"."""
        return self.name.partition(".")[0]

    @property
    def is_block(self) -> bool:
        """True for the layers of which models have many."""
        return self.kind in BLOCKS

    @property
    def names(self) -> set[str]:
        """Names of all parameters that the layer works with."""
        return {parameter.name for parameter in self.parameters} | set(self.uses)


def head_dim(model: Model) -> int:
    return model.head_dim or -(-model.hidden // model.heads)


def is_causal(model: Model, layer: int) -> bool:
    """Return True if no query of a block sees a later key of its stream."""
    return model.family != "bert" and layer >= model.encoder_blocks


def norms_are_last(model: Model) -> bool:
    """Return True if a norm follows each sum with the residual stream, and none precedes it."""
    return model.family == "bert" and model.norm_order == "post"


def kv_heads(model: Model) -> int:
    return model.kv_heads or model.heads


def ffn(model: Model) -> int:
    if model.ffn or model.family != "llama":
        return model.ffn or 4 * model.hidden
    return -(-8 * model.hidden // (3 * 256)) * 256


def gate(model: Model) -> str:
    """Return the function of the gate in T5's feed-forward part; "" if it has none."""
    function = model.feed_forward.removeprefix("gated-")
    return "" if function == model.feed_forward else function


def index_of(block: "Layer") -> int:
    """Return the number of a block among those of its kind."""
    return int(block.name.rpartition(".")[2])


def number_of(model: Model, block: "Layer") -> int:
    """Return the number of a block among all of the model's: those of a decoder come last."""
    return index_of(block) + (model.encoder_blocks if block.kind == "decoder" else 0)


def positions(model: Model, layer: int, seq_len: int) -> int:
    """Return the positions of a sequence that a block works on: those of its stream."""
    return model.streams(seq_len)[-1 if layer >= model.encoder_blocks else 0]


def window(model: Model, layer: int) -> int:
    """Return the number of keys that a query of a block sees; 0: all before it."""
    is_global = model.window_pattern and (layer + 1) % model.window_pattern == 0
    return 0 if is_global else model.window


def keys_without_effect(model: Model) -> set[str]:
    """Return the keys of a llama that change nothing next to its others."""
    scaling = model.rope_scaling
    unused = set()
    if scaling == "none":
        unused.add("rope_factor")
    if scaling not in ("llama3", "yarn"):
        unused.add("rope_original")
    if scaling != "llama3":
        unused |= {"rope_low", "rope_high"}
    if scaling != "yarn":
        unused |= {"rope_fast", "rope_slow", "rope_attention"}
    if not model.window:
        unused |= {"window_pattern", "rope_local_base"}
    elif not model.rope_local_base and scaling == "none":
        unused.add("rope_local_base")  # then it is rope_base, which may be said or not
    return unused


@dataclass(frozen=True)
class Peak:
    """Bytes of activations at the widest of some moments."""

    kept: float = 0.0  # by forward for backward, without logits
    widest: float = 0.0  # all of them: with logits and temporary tensors

    def beside(self, kept: float) -> "Peak":
        """Return it while so many more bytes are kept."""
        return Peak(self.kept + kept, self.widest + kept)

    @classmethod
    def of(cls, moments: Iterable["Peak"]) -> "Peak":
        """Return the widest of these; of equal ones that at which the most is kept."""
        return max(moments, key=lambda peak: (peak.widest, peak.kept))


@dataclass(frozen=True)
class Moments:
    """Bytes of a micro-batch in one chunk of the model."""

    kept: float  # from forward to backward
    forward: Peak
    backward: Peak


@dataclass(frozen=True)
class ChunkLayout:
    """A chunk's layers by kind ("blocks" -> 3), and how they are sharded."""

    layers: Counter[str]
    tensor: int  # ranks
    sequence: bool  # sequence parallelism: activations between the products are sharded too
    sends: bool  # the pipeline has other stages
    kernels: frozenset[str] = frozenset()  # `Platform.kernels`
    # kind of blocks, and "block" or "selective" -> so many of them
    recomputed: Counter[tuple[str, str]] = field(default_factory=Counter)
    loss_rows: int = 0  # positions whose logits exist at a time; 0: all
    partitioned: bool = False  # inputs of recomputed blocks are cut over the tensor ranks
    blocks_here: int | None = None  # so many keep theirs on the device, the others on the host
    targets: int = 0  # positions that the head works on; 0: on all
    picked: bool = False  # they are picked, and whole on every rank
    seq_len: int = 0  # positions of a sequence, where it has several streams

    @property
    def blocks(self) -> int:
        return sum(self.layers[kind] for kind in BLOCKS)


def sums_of(
    tensor_sums: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    kinds: Mapping[str, int],
    stream: int,
) -> tuple[int, int]:
    """Return how often tensor ranks sum a stream in forward, and in backward, of so many layers."""
    forward, backward = (
        sum(tensor_sums[kind][column].count(stream) * count for kind, count in kinds.items())
        for column in range(2)
    )
    return forward, backward


@dataclass(frozen=True)
class Family:
    """All that hpczero knows of a family of models before it builds one.

    A plan names modules ("*" is any one part of a name) and their role among tensor ranks
    (`parallel.parallelize.ROLES`).
    """

    model: str  # "module:class" of the torch model
    layers: Callable[[Model], list[Layer]]
    # of one sequence of so many tokens in each layer, and its backward
    operations: Callable[[Model, int], list[int]]
    activations: Callable[[Model, int, int, ChunkLayout], Moments]  # tokens, bytes of a number
    work: Callable[[Model, Layer, WorkLayout], LayerWork]  # of a layer for a micro-batch
    # kind of layer -> sums of activations over tensor ranks in forward, and in backward: each by
    # the number of its stream (`Model.streams`)
    tensor_sums: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    tensor_plan: Mapping[str, str]
    sequence_plan: Mapping[str, str]  # with sequence parallelism, too
    # module -> its cheap operation, of which results need not be kept (memory.recompute)
    cheap: Mapping[str, str]
    # positions of a sequence that the head picks, which are whole on every tensor rank
    picked: Callable[[Model, int], int] | None = None
    # modules that work on one of several streams -> its number
    stream_of: Mapping[str, int] = field(default_factory=dict)


# roles of modules whose parameters every rank holds: it has some rows, or some heads, and the
# parameters' gradients are summed over the ranks
NORM_OF_ROWS = "norm of rows"
NORM_OF_HEADS = "norm of heads"
SPLIT_OF_ROWS = "split of rows"  # of several streams a rank has some rows each

SUMS_OF_ONE_STREAM: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "embedding": ((0,), ()),
    "blocks": ((0, 0), (0, 0)),
    "head": ((), (0,)),
}


Role = TypeVar("Role")


def role_of(plan: Mapping[str, Role], name: str) -> Role | None:
    """Return the role that a plan gives the module of this name; None if it has no entry."""
    roles = [role for pattern, role in plan.items() if matches(name, pattern)]
    assert len(roles) <= 1, f"{name} has {len(roles)} entries in the plan"
    return roles[0] if roles else None


def sizes_with_role(layer: Layer, plan: Mapping[str, str], role: str) -> list[int]:
    """Return the elements of each module of a layer that has this role, its parameters together."""
    sizes = Counter[str]()
    for parameter in layer.parameters:
        sizes[parameter.name.rpartition(".")[0]] += parameter.size
    return [size for name, size in sizes.items() if role_of(plan, name) == role]


def sizes_summed(layer: Layer, plan: Mapping[str, str], ranks: int) -> list[int]:
    """Return the elements of gradients that ranks sum together, of parameters that all hold."""
    held_by_all = [
        parameter.size
        for parameter in layer.parameters
        if parameter.split is not None and parameter.cut(ranks)[0] is None
    ]
    summed = sizes_with_role(layer, plan, NORM_OF_HEADS)
    return [*summed, sum(held_by_all)] if held_by_all else summed


def matches(name: str, pattern: str) -> bool:
    words = name.split(".")
    wanted = pattern.split(".")
    return len(words) == len(wanted) and all(map(fnmatchcase, words, wanted))
