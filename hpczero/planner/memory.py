"""What a job needs of memory, before it has any: bytes by kind on each rank and on a node (pure).

The model's states are what the engine allocates (`parallel.states`), to the byte. Per parameter in half precision, with N data ranks and
g = 2 bytes of gradient for one micro-batch, 4 (fp32 accumulators) for several, they come close to (ZeRO, Rajbhandari et al. 2020)

    stage 0: 14 + g      stage 1: 2 + g + 12/N      stage 2: 2 + (g + 12)/N      stage 3: (14 + g)/N

besides the slots for gradients, or weights, in flight. Where the R data ranks of a node keep the weights together, the 2 of the weights
becomes 2/R, at stage 3 too. The other kinds are estimates: communication buffers, activations, the batches read ahead, Python with its
libraries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpczero.data.sampler import micro_batch_sizes
from hpczero.model.shapes import Layer
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.states import Precision, Sharded, shares_nodes, state_bytes
from hpczero.planner.activations import activations
from hpczero.spec.schema import Spec

RUNTIME = 250_000_000  # a rank before it has a model: Python, torch, MPI, numba; measured with MPICH and Open MPI, 1 to 4 ranks on a node
_COMMUNICATION_BUFFERS = 2
_MIB = 1 << 20
_TOKEN = 8


@dataclass(frozen=True)
class Placement:
    """How many data ranks there are, how many of them run on the node in question, and whether a node's ranks keep the weights together."""

    data_ranks: int
    on_node: int
    shared: bool


@dataclass(frozen=True)
class Need:
    """Of one node, in bytes by kind: what each of its `ranks` holds for itself, and what they hold once for all of them.

    `windows` says how much of it lies in shared windows; the part of one rank in what is held together is an equal one, as the owner of a
    shard is the first to touch it.
    """

    ranks: int
    each: dict[str, int]
    together: dict[str, int]
    windows: int

    @property
    def rank(self) -> dict[str, int]:
        return {kind: size + self.together.get(kind, 0) // self.ranks for kind, size in self.each.items()}

    @property
    def node(self) -> dict[str, int]:
        return {kind: size * self.ranks + self.together.get(kind, 0) for kind, size in self.each.items()}

    def part_of_rank(self, counted: Mapping[str, int]) -> dict[str, int]:
        """Of what each rank of the node counts as a whole, its part of what is held together."""
        return {kind: size // self.ranks if kind in self.together else size for kind, size in counted.items()}

    def of(self, ranks: int) -> int:
        """Bytes of so many of the node's ranks."""
        return sum(self.each.values()) * ranks + sum(self.together.values()) * ranks // self.ranks


def needs_of_nodes(spec: Spec, layers: Sequence[Layer], ranks_on_nodes: Mapping[int, int]) -> dict[int, Need]:
    """Of every node, from how many data ranks it has."""
    total, shared = sum(ranks_on_nodes.values()), shares_nodes(spec.zero, ranks_on_nodes.values())
    by_count = {count: need(spec, layers, Placement(total, count, shared)) for count in set(ranks_on_nodes.values())}
    return {node: by_count[count] for node, count in ranks_on_nodes.items()}


def need(spec: Spec, layers: Sequence[Layer], placement: Placement) -> Need:
    """Of a node whose ranks all have the largest of the micro-batches."""
    micro_batches, _, largest = micro_batch_sizes(spec.train.global_batch, spec.train.micro_batch, placement.data_ranks)
    sharded = Sharded.at_stage(spec.zero.stage, placement.shared)
    precision = Precision(4 if spec.train.precision == "fp32" else 2, accumulates=micro_batches > 1)
    separate_master = precision.weight < 4 or (placement.shared and not sharded.optimizer)
    states = state_bytes(_layouts(layers, placement.data_ranks), sharded, precision, separate_master)
    together, windows = {}, 0
    if placement.shared:
        read_by_others = "gradient slots" if sharded.gradients else "gradients"
        together, windows = {"weights": states["weights"]}, states["weights"] + states[read_by_others] * placement.on_node
    estimates = {
        "communication": _COMMUNICATION_BUFFERS * spec.zero.bucket_mb * _MIB if _sends(placement) else 0,
        "activations": activations(spec, largest),
        "data": (spec.data.prefetch + 2) * micro_batches * largest * (spec.model.seq_len + 1) * _TOKEN,
        "runtime": RUNTIME,
    }
    return Need(placement.on_node, states | dict.fromkeys(together, 0) | estimates, together, windows)


def _sends(placement: Placement) -> bool:
    """Whether weights and gradients travel in messages."""
    return placement.on_node < placement.data_ranks if placement.shared else placement.data_ranks > 1


def _layouts(layers: Sequence[Layer], shards: int) -> list[UnitLayout]:
    """The units' layouts, for their sizes only: layers of the same shapes, most of a model, are laid out once."""
    made: dict[tuple[tuple[int, ...], ...], UnitLayout] = {}
    for layer in layers:
        made.setdefault(_shapes(layer), unit_layout(layer, shards))
    return [made[_shapes(layer)] for layer in layers]


def _shapes(layer: Layer) -> tuple[tuple[int, ...], ...]:
    return tuple(parameter.shape for parameter in layer.parameters)
