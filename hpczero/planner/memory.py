"""What a job needs of memory, before it has any: bytes by kind on each rank and on a node (pure).

The model's states are what the engine allocates (`parallel.states`), to the byte. Per parameter in half precision, with N data ranks and
g = 2 bytes of gradient for one micro-batch, 4 (fp32 accumulators) for several, they come close to (ZeRO, Rajbhandari et al. 2020)

    stage 0: 14 + g      stage 1: 2 + g + 12/N      stage 2: 2 + (g + 12)/N      stage 3: (14 + g)/N

besides the slots for gradients, or weights, in flight. Where the R data ranks of a node keep the weights together, the 2 of the weights
becomes 2/R, at stage 3 too. All of it is counted on the layers of the rank's pipeline stage, and of these on the part of its tensor rank.
Communication buffers, and those of activations and gradients from other stages, are what is made at most. The other kinds are estimates:
activations (of hpczero's own models), the batches read ahead, Python with its libraries.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hpczero.comm.grid import Grid
from hpczero.data.sampler import micro_batch_sizes
from hpczero.model.shapes import Layer, known
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.pipeline.partition import Tied, Units, chunks_of_stages, handed_on
from hpczero.parallel.states import Precision, Sharded, shares_nodes, state_bytes
from hpczero.planner.activations import activations, arrived
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Spec, Zero

# The kind of device that a job runs on, and what a spec leaves to it (pure).
BUCKET_MB = {"cpu": 4, "cuda": 256}


@dataclass(frozen=True)
class Hardware:
    """Describe a node as a site's profile does. 0: not known; of `gpus` also: none."""

    memory_gb: float = 0
    gpus: int = 0
    gpu_memory_gb: float = 0

    def ranks_on_gpu(self, ranks: int) -> int:
        """Return how many of a node's ranks share a GPU; of an unknown number each has its own."""
        return -(-ranks // self.gpus) if self.gpus else 1


@dataclass(frozen=True)
class Platform:
    """Say where a job's tensors live: on "cpu", where all memory is the computer's, or on "cuda".

    `kernels`: operations that hpczero's own kernels carry out on GPUs; PyTorch does the others.
    `native`: collectives go by torch.distributed, not by MPI.
    """

    device: str = "cpu"
    kernels: frozenset[str] = frozenset()
    native: bool = False

    @property
    def on_gpus(self) -> bool:
        return self.device == "cuda"


CPUS = Platform()


def device_of(spec: Spec, gpus: int) -> str:
    """Return "cpu" or "cuda": what `train.device` says, else what the nodes' number of GPUs does."""
    if spec.train.device != "auto":
        return spec.train.device
    return "cuda" if spec.batch.gpus_per_node or gpus else "cpu"


def bucket_bytes(zero: Zero, device: str) -> int:
    """Return the size of a communication buffer. A round of a reduction has a start and an end to wait
    for: on GPUs, which are through a small one in microseconds, rounds are few and large.
    """
    return (zero.bucket_mb or BUCKET_MB[device]) << 20


def as_run(spec: Spec, device: str) -> Spec:
    """Return the spec as it is carried out there: on GPUs nothing lies in a node's shared memory."""
    if device == "cpu":
        return spec
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"node_shared": False})})


RUNTIME = 250_000_000  # a rank before it has a model: Python, torch, MPI, numba; measured with MPICH and Open MPI, 1 to 4 ranks on a node
ON_HOST = (
    "checkpoint copy",
    "data",
    "runtime",
)  # kinds that stay in the computer's memory where the rest is on a GPU
BLOCK = 4096  # elements: what is summed at a time is whole blocks
_TOKEN = 8
_STATES = 12  # bytes of a parameter in a checkpoint: master weight and two moments


@dataclass(frozen=True)
class Placement:
    """How many data ranks there are, how many of them run on the node in question, whether a node's ranks keep the weights together; and which
    part of the model they have.
    """

    data_ranks: int
    on_node: int
    shared: bool
    stage: int = 0
    tensor_rank: int = 0

    def part_of_rank(self, counted: Mapping[str, int]) -> dict[str, int]:
        """Of what each rank counts as a whole: of the weights that a node's ranks keep together, an equal part."""
        return {
            kind: size // self.on_node if self.shared and kind == "weights" else size
            for kind, size in counted.items()
        }


@dataclass(frozen=True)
class Need:
    """Of the ranks of one node that have the same part of the model, in bytes by kind: what each of these `ranks` holds for itself, and what they
    hold once for all of them.

    `windows` says how much of it lies in shared windows; the part of one rank in what is held together is an equal one, as the owner of a
    shard is the first to touch it.
    """

    ranks: int
    each: dict[str, int]
    together: dict[str, int]
    windows: int

    @property
    def rank(self) -> dict[str, int]:
        return {
            kind: size + self.together.get(kind, 0) // self.ranks
            for kind, size in self.each.items()
        }

    @property
    def node(self) -> dict[str, int]:
        return {
            kind: size * self.ranks + self.together.get(kind, 0) for kind, size in self.each.items()
        }


@dataclass(frozen=True)
class NodeNeed:
    """Of one node: of each part of the model that its ranks have."""

    parts: tuple[Need, ...]

    @property
    def ranks(self) -> int:
        return sum(part.ranks for part in self.parts)

    @property
    def rank(self) -> dict[str, int]:
        """Of a rank that needs the most."""
        return max((part.rank for part in self.parts), key=lambda kinds: sum(kinds.values()))

    @property
    def node(self) -> dict[str, int]:
        return dict(sum((Counter(part.node) for part in self.parts), Counter[str]()))

    @property
    def windows(self) -> int:
        return sum(part.windows for part in self.parts)

    def fullest(self, account: str) -> dict[str, int]:
        """Return what the rank holds that has the most in this account ("all", "host", "device")."""
        counts = [of_account(part.rank, account) for part in self.parts]
        return max(counts, key=lambda kinds: sum(kinds.values()))

    def of(self, ranks: int, account: str = "all") -> int:
        """Bytes of so many of the node's ranks; `account`: of all kinds, or of those on the "host" or
        the "device" where these differ.

        The computer's memory is the ranks' together, so each counts as the mean. A GPU is that of a
        few: these may be the ones that hold the most.
        """
        if account != "device":
            return sum(of_account(self.node, account).values()) * ranks // self.ranks
        found, left = 0, ranks
        sizes = [(sum(of_account(part.rank, account).values()), part.ranks) for part in self.parts]
        for size, having in sorted(sizes, reverse=True):
            found += size * min(having, left)
            left -= min(having, left)
        return found


def of_account(kinds: Mapping[str, int], account: str) -> dict[str, int]:
    """Return the kinds that count in an account: "all", or those on the "host", or the "device"."""
    if account == "all":
        return dict(kinds)
    return {kind: size for kind, size in kinds.items() if (kind in ON_HOST) == (account == "host")}


def needs_of_nodes(
    spec: Spec,
    layers: Sequence[Layer],
    ranks_on_nodes: Mapping[int, int],
    platform: Platform = CPUS,
) -> dict[int, NodeNeed]:
    """Return the need of every node, from how many ranks it has."""
    node_of_rank = [node for node, count in sorted(ranks_on_nodes.items()) for _ in range(count)]
    spec = as_run(spec, platform.device)
    grid = Grid.build(resolved(spec, node_of_rank), node_of_rank)
    return needs_on_grid(spec, layers, grid, platform)


def needs_on_grid(
    spec: Spec, layers: Sequence[Layer], grid: Grid, platform: Platform = CPUS
) -> dict[int, NodeNeed]:
    spec = as_run(spec, platform.device)
    model, made = _Parts(spec, layers, grid.size("data"), platform), dict[object, NodeNeed]()
    found = {}
    for node, places in placements(spec, grid).items():
        key = tuple(places)
        if key not in made:
            made[key] = NodeNeed(tuple(model.need(place) for place in places))
        found[node] = made[key]
    return found


def placements(spec: Spec, grid: Grid) -> dict[int, list[Placement]]:
    """Node -> of each part of the model that its ranks have, how they stand among the data ranks that have it too."""
    found: dict[int, list[Placement]] = {node: [] for node in sorted(set(grid.node_of_rank))}
    for group in grid.groups("data"):
        for node, place in _on_nodes(spec, grid, group).items():
            found[node].append(place)
    return found


def placement(spec: Spec, grid: Grid, rank: int) -> Placement:
    return _on_nodes(spec, grid, grid.ranks(rank, "data"))[grid.node_of_rank[rank]]


def _on_nodes(spec: Spec, grid: Grid, group: Sequence[int]) -> dict[int, Placement]:
    """Node -> how its ranks stand among these data ranks, all of which have the same part of the model."""
    on_nodes = Counter(grid.node_of_rank[rank] for rank in group)
    part = grid.coordinate(group[0], "pipeline"), grid.coordinate(group[0], "tensor")
    shared = shares_nodes(spec.zero, on_nodes.values(), grid.nodes_cut_data_alike)
    return {node: Placement(len(group), count, shared, *part) for node, count in on_nodes.items()}


def need(
    spec: Spec, layers: Sequence[Layer], placement: Placement, platform: Platform = CPUS
) -> Need:
    """Of a node whose ranks all have the largest of the micro-batches; `layers` are those of the whole model."""
    return _Parts(spec, layers, placement.data_ranks, platform).need(placement)


class _Parts:
    """The parts of a model that ranks have, each counted once."""

    def __init__(
        self, spec: Spec, layers: Sequence[Layer], data_ranks: int, platform: Platform
    ) -> None:
        self.spec = spec
        self.platform = platform
        self.chunks = chunks_of_stages(spec, layers)
        self.units = Units(data_ranks, spec.parallel.tensor)
        self._known: dict[object, Need] = {}

    def need(self, placement: Placement) -> Need:
        if placement not in self._known:
            self._known[placement] = self._count(placement)
        return self._known[placement]

    def _count(self, placement: Placement) -> Need:
        spec, chunks = self.spec, self.chunks[placement.stage]
        micro_batches, _, largest = micro_batch_sizes(
            spec.train.global_batch, spec.train.micro_batch, placement.data_ranks
        )
        sharded = Sharded.at_stage(spec.zero.stage, placement.shared)
        precision = Precision(
            4 if spec.train.precision == "fp32" else 2, accumulates=micro_batches > 1
        )
        held = [layer for chunk in chunks for layer in chunk]
        units = self.units.of(held, placement.tensor_rank)
        around = sum(
            unit.size
            for unit in self.units.of(
                [layer for layer in held if layer.around], placement.tensor_rank
            )
        )
        states = state_bytes(units, sharded, precision, placement.shared, around)
        handed_on_bytes = prod(handed_on(spec, placement.tensor_rank)) * precision.weight
        together, windows = {}, 0
        if placement.shared:
            together, windows = (
                {"weights": states["weights"]},
                states["weights"] + states[sharded.read_by_others] * placement.on_node,
            )
        estimates = {
            "communication": self._buffers(placement, units, largest),
            "activations": self._activations(placement.stage, largest, micro_batches),
            "pipeline": arrived(
                spec.parallel, placement.stage, micro_batches, spec.train.eval_batches > 0
            )
            * largest
            * handed_on_bytes,
            "checkpoint copy": _STATES * sum(unit.shard_size for unit in units)
            if saves_behind(spec)
            else 0,
            "data": (spec.data.prefetch + 2)
            * micro_batches
            * largest
            * (spec.model.seq_len + 1)
            * _TOKEN,
            "runtime": RUNTIME,
        }
        return Need(
            placement.on_node, states | dict.fromkeys(together, 0) | estimates, together, windows
        )

    def _buffers(self, placement: Placement, units: Sequence[UnitLayout], samples: int) -> int:
        """Return what is made at most for pieces that are to be summed: of the data ranks where their
        gradients travel so, two buffers (of torch.distributed one); of the tensor ranks one, and one of
        what is tied. On GPUs none is larger than its largest tensor needs.
        """
        spec, platform = self.spec, self.platform
        ranks, tensor = placement.data_ranks, spec.parallel.tensor
        bucket = bucket_bytes(spec.zero, platform.device)
        width = 4 if spec.train.precision == "fp32" else 2
        largest = max(unit.size for unit in units) * width

        def buffer(ranks: int, size: int) -> int:
            if not platform.on_gpus:
                return bucket
            slots = 4 * ranks if platform.native else 2 * (ranks - 1)
            return min(bucket, slots * (-(-size // ranks) + BLOCK * width))

        travels = placement.on_node < ranks if placement.shared else ranks > 1
        of_data = (1 if platform.native else 2) * buffer(ranks, largest) if travels else 0
        activation = samples * spec.model.seq_len * spec.model.hidden * width
        of_tensor = buffer(tensor, activation) if tensor > 1 else 0
        ties = any(
            isinstance(layer, Tied) for chunk in self.chunks[placement.stage] for layer in chunk
        )
        return of_data + of_tensor + ties * bucket

    def _activations(self, stage: int, samples: int, micro_batches: int) -> int:
        """Return 0 for a model of one's own: what it keeps is not known."""
        if not known(self.spec.model):
            return 0
        chunks, kernels = self.chunks[stage], self.platform.kernels
        return activations(self.spec, samples, chunks, stage, micro_batches, kernels)


def saves_behind(spec: Spec) -> bool:
    """Whether a checkpoint is written while training goes on, from a copy of the states; the last one is written at the end."""
    return spec.checkpoint.asynchronous and 0 < spec.checkpoint.every < spec.train.steps
