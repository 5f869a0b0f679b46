"""Memory that a job will need: bytes by kind on each rank and on a node (pure).

The model's states are what the engine allocates (`parallel.states`), to the byte. Per parameter in
half precision, with N data ranks and g = 2 bytes of gradient for one micro-batch, 4 (fp32
accumulators) for several, they come close to (ZeRO, Rajbhandari et al. 2020)

    stage 0: 14 + g     stage 1: 2 + g + 12/N     stage 2: 2 + (g + 12)/N     stage 3: (14 + g)/N

besides the slots for gradients, or weights, in flight. If the R data ranks of a node share the
weights, their 2 becomes 2/R, at stage 3 too. Counted are the layers of the rank's pipeline stage,
and of these the shard of its tensor rank.

Where zero.offload names a folder, master weights and moments (the 12) are in files there.

Buffers for communication and for messages from other stages are upper bounds. The other kinds are
estimates: of hpczero's own models activations (kept by forward for backward) and workspace (logits
and temporary tensors at the widest moment of a step), batches read ahead, Python with its
libraries.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hpczero.comm.grid import Grid
from hpczero.data.samples import micro_batch_sizes
from hpczero.model.families import known
from hpczero.model.shapes import Layer
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.pipeline.partition import LayoutCache, Tied, chunks_of_stages, handed_on
from hpczero.parallel.states import (
    ADAMW,
    Offload,
    Precision,
    Sharded,
    UpdateMemory,
    bytes_in_places,
    bytes_over_bus,
    shares_nodes,
)
from hpczero.planner.activations import activations, arrived, element_bytes, peak, sent_to_host
from hpczero.planner.needs import Need, NodeNeed
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Spec, Zero

BUCKET_MB = {"cpu": 4, "cuda": 256}
BLOCK = 4096  # elements: sums are made in whole blocks
# Bytes of a rank before it has a model: Python, torch, MPI, numba. Measured with MPICH and
# Open MPI, 1 to 4 ranks on a node.
RUNTIME = 250_000_000
_TOKEN = 8


@dataclass(frozen=True)
class Platform:
    """The `device` of a job's tensors: "cpu", where all memory is the computer's, or "cuda".

    `kernels`: operations that hpczero's own kernels carry out; PyTorch does the others.
    `native`: collectives use torch.distributed in place of MPI. `update`: the optimizer's memory.
    """

    device: str = "cpu"
    kernels: frozenset[str] = frozenset()
    native: bool = False
    update: UpdateMemory = ADAMW

    @property
    def on_gpus(self) -> bool:
        return self.device == "cuda"


CPUS = Platform()


def device_of(spec: Spec, gpus: int) -> str:
    """Return "cpu" or "cuda": `train.device`, or for "auto" "cuda" if the nodes have GPUs."""
    if spec.train.device != "auto":
        return spec.train.device
    return "cuda" if spec.batch.gpus_per_node or gpus else "cpu"


def bucket_bytes(zero: Zero, device: str) -> int:
    """Return the size of a communication buffer.

    Each round of a reduction has a start and an end to wait for. A GPU is done with a small round
    in microseconds, so rounds are few and large there.
    """
    return (zero.bucket_mb or BUCKET_MB[device]) << 20


def as_run(spec: Spec, device: str) -> Spec:
    """Return the spec in effect on this device: on GPUs no states are in shared memory."""
    if device == "cpu":
        return spec
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"node_shared": False})})


@dataclass(frozen=True)
class Placement:
    """The data ranks of one node that have the same part of the model."""

    data_ranks: int  # on all nodes
    on_node: int  # of them, on this node
    shared: bool  # a node's ranks share one copy of the weights
    stage: int = 0
    tensor_rank: int = 0

    def part_of_rank(self, counted: Mapping[str, int]) -> dict[str, int]:
        """Return a rank's bytes by kind, with an equal part of the weights that a node shares."""
        sharers = {"weights": self.on_node} if self.shared else {}
        return {kind: size // sharers.get(kind, 1) for kind, size in counted.items()}


def needs_of_nodes(
    spec: Spec,
    layers: Sequence[Layer],
    ranks_on_nodes: Mapping[int, int],
    platform: Platform = CPUS,
) -> dict[int, NodeNeed]:
    """Return the need of every node, given how many ranks it has."""
    node_of_rank = nodes_of_ranks(ranks_on_nodes)
    spec = as_run(spec, platform.device)
    grid = Grid.build(resolved(spec, node_of_rank), node_of_rank)
    return needs_on_grid(spec, layers, grid, platform)


def nodes_of_ranks(ranks_on_nodes: Mapping[int, int]) -> list[int]:
    """Return the node of each rank, with the nodes in order."""
    return [node for node, count in sorted(ranks_on_nodes.items()) for _ in range(count)]


def needs_on_grid(
    spec: Spec, layers: Sequence[Layer], grid: Grid, platform: Platform = CPUS
) -> dict[int, NodeNeed]:
    spec = as_run(spec, platform.device)
    model = _Parts(spec, layers, grid.size("data"), platform)
    known_needs: dict[object, NodeNeed] = {}
    needs = {}
    for node, places in placements(spec, grid).items():
        key = tuple(places)
        if key not in known_needs:
            known_needs[key] = NodeNeed(tuple(map(model.need, places)))
        needs[node] = known_needs[key]
    return needs


def placements(spec: Spec, grid: Grid) -> dict[int, list[Placement]]:
    """Return node -> one placement for each part of the model that its ranks have."""
    by_node: dict[int, list[Placement]] = {node: [] for node in sorted(set(grid.node_of_rank))}
    for group in grid.groups("data"):
        for node, place in _on_nodes(spec, grid, group).items():
            by_node[node].append(place)
    return by_node


def placement(spec: Spec, grid: Grid, rank: int) -> Placement:
    return _on_nodes(spec, grid, grid.ranks(rank, "data"))[grid.node_of_rank[rank]]


def _on_nodes(spec: Spec, grid: Grid, group: Sequence[int]) -> dict[int, Placement]:
    """Return node -> placement of its ranks in a data group, which has one part of the model."""
    on_nodes = Counter(grid.node_of_rank[rank] for rank in group)
    part_of_model = grid.coordinate(group[0], "pipeline"), grid.coordinate(group[0], "tensor")
    shared = shares_nodes(spec.zero, on_nodes.values(), grid.nodes_cut_data_alike)
    return {
        node: Placement(len(group), count, shared, *part_of_model)
        for node, count in on_nodes.items()
    }


def need(
    spec: Spec, layers: Sequence[Layer], placement: Placement, platform: Platform = CPUS
) -> Need:
    """Return the need of a node whose ranks all have the largest micro-batch.

    `layers` are those of the whole model.
    """
    return _Parts(spec, layers, placement.data_ranks, platform).need(placement)


class _Parts:
    """The parts of a model that ranks have, each counted once."""

    def __init__(
        self, spec: Spec, layers: Sequence[Layer], data_ranks: int, platform: Platform
    ) -> None:
        self.spec = spec
        self.platform = platform
        self.chunks = chunks_of_stages(spec, layers)
        self.units = LayoutCache(data_ranks, spec.parallel.tensor)
        self._known: dict[object, Need] = {}

    def need(self, placement: Placement) -> Need:
        if placement not in self._known:
            self._known[placement] = self._count(placement)
        return self._known[placement]

    def _count(self, placement: Placement) -> Need:
        spec = self.spec
        chunks = self.chunks[placement.stage]
        micro_batches, _, samples = micro_batch_sizes(
            spec.train.global_batch, spec.train.micro_batch, placement.data_ranks
        )
        sharded = Sharded.at_stage(spec.zero.stage, placement.shared)
        precision = Precision(element_bytes(spec), accumulates=micro_batches > 1)
        held = [layer for chunk in chunks for layer in chunk]
        units = self.units.of(held, placement.tensor_rank)
        around = [layer for layer in held if layer.around]
        around_size = sum(unit.size for unit in self.units.of(around, placement.tensor_rank))
        update = self.platform.update
        offload = Offload(
            self.platform.on_gpus and spec.zero.offload != "none", bool(spec.zero.folder)
        )
        kept, files = bytes_in_places(
            units, sharded, precision, placement.shared, around_size, update, offload
        )
        together = {}
        windows = 0
        if placement.shared:
            together = {"weights": kept["weights"]}
            windows = kept["weights"] + kept[sharded.read_by_others] * placement.on_node
        message = (
            samples * prod(handed_on(spec, placement.tensor_rank, spec.seq_len)) * precision.weight
        )
        evaluates = spec.train.eval_batches > 0
        messages = arrived(spec.parallel, placement.stage, micro_batches, evaluates)
        shards = sum(unit.shard_size for unit in units)
        tokens = micro_batches * samples * (spec.seq_len + 1)
        of_blocks, over_bus = self._activations(placement.stage, samples, micro_batches)
        if offload.from_device:
            over_bus += bytes_over_bus(units, sharded, precision)
        estimates = {
            "communication": self._buffers(placement, units, samples),
            **of_blocks,
            "pipeline": messages * message,
            "checkpoint copy": update.of_element * shards if saves_behind(spec) else 0,
            "data": (spec.data.prefetch + 2) * tokens * _TOKEN,
            "runtime": RUNTIME,
        }
        if temporary := update.temporary(units, sharded):
            estimates["update"] = temporary
        private = kept | dict.fromkeys(together, 0) | estimates
        in_files = sum(files.values())
        return Need(placement.on_node, private, together, windows, in_files, over_bus)

    def _buffers(self, placement: Placement, units: Sequence[UnitLayout], samples: int) -> int:
        """Return the most bytes of communication buffers.

        The data ranks have two (with torch.distributed one) if their gradients leave the node or
        are not shared, the tensor ranks one, tied embeddings one. On GPUs none is larger than its
        largest tensor needs.
        """
        spec = self.spec
        platform = self.platform
        ranks = placement.data_ranks
        tensor = spec.parallel.tensor
        bucket = bucket_bytes(spec.zero, platform.device)
        width = element_bytes(spec)
        largest = max(unit.size for unit in units) * width

        def buffer(ranks: int, size: int) -> int:
            if not platform.on_gpus:
                return bucket
            slots = 4 * ranks if platform.native else 2 * (ranks - 1)
            return min(bucket, slots * (-(-size // ranks) + BLOCK * width))

        sends = placement.on_node < ranks if placement.shared else ranks > 1
        of_data = (1 if platform.native else 2) * buffer(ranks, largest) if sends else 0
        activation = samples * spec.seq_len * spec.model.hidden * width
        of_tensor = buffer(tensor, activation) if tensor > 1 else 0
        ties = any(
            isinstance(layer, Tied) for chunk in self.chunks[placement.stage] for layer in chunk
        )
        return of_data + of_tensor + ties * bucket

    def _activations(
        self, stage: int, samples: int, micro_batches: int
    ) -> tuple[dict[str, int], int]:
        """Return the bytes by kind, and those that a step moves over the bus.

        None for a user's own model: its activations are not known.
        """
        spec = self.spec
        if not known(spec.model):
            return {"activations": 0, "workspace": 0}, 0
        offloads = self.platform.on_gpus and spec.memory.offload_activations == "cpu"
        chunks, kernels = self.chunks[stage], self.platform.kernels
        here = activations(spec, samples, chunks, stage, micro_batches, kernels, offloads)
        kinds = {"activations": int(here.kept), "workspace": int(here.widest - here.kept)}
        if not offloads:
            return kinds, 0
        sent = sent_to_host(spec, samples, chunks, kernels)
        kinds["activations on the host"] = int(peak(spec.parallel, sent, stage, micro_batches).kept)
        return kinds, 2 * micro_batches * int(sum(chunk.kept for chunk in sent))


def saves_behind(spec: Spec) -> bool:
    """Return True if some checkpoint is written while training goes on, from a copy of the states.

    The last one is written at the end of the run.
    """
    return spec.checkpoint.asynchronous and 0 < spec.checkpoint.every < spec.train.steps
