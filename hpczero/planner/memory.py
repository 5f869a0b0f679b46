"""Memory that a job will need: bytes by kind on each rank and on a node (pure).

The model's states are what the engine allocates (`parallel.states`), to the byte. Per parameter in
half precision, with N data ranks that have one copy of them (zero.shard_ranks) and g = 2 bytes of
gradient for one micro-batch, 4 (fp32 accumulators) for several, they come close to (ZeRO,
Rajbhandari et al. 2020)

    stage 0: 14 + g     stage 1: 2 + g + 12/N     stage 2: 2 + (g + 12)/N     stage 3: (14 + g)/N

besides the slots for gradients, or weights, in flight. If the R of them on a node share the
weights, their 2 becomes 2/R, at stage 3 too. Counted are the layers of the rank's pipeline stage,
and of these the shard of its tensor rank.

Where zero.offload names a folder, master weights and moments (the 12) are in files there.

Buffers for communication and for messages from other stages are upper bounds. The other kinds are
estimates: of hpczero's own models activations (kept by forward for backward) and workspace (logits
and temporary tensors at the widest moment of a step), batches read ahead, Python with its
libraries.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

from hpczero.comm.grid import Grid
from hpczero.data.samples import micro_batch_sizes
from hpczero.model.families import known
from hpczero.model.shapes import Layer, Moments
from hpczero.parallel.layout import ALIGNMENT, UnitLayout, storing_replicas
from hpczero.parallel.pipeline.partition import (
    Chunks,
    LayoutCache,
    Tied,
    chunks_of_stages,
    handed_on,
)
from hpczero.parallel.replicas.exchanged import Exchanged
from hpczero.parallel.states import (
    Offload,
    Precision,
    Sharded,
    bytes_in_places,
    bytes_over_bus,
    state_bytes,
)
from hpczero.parallel.zero.matrix_places import Ranks, temporary_bytes
from hpczero.planner.activations import (
    activations,
    arrived,
    element_bytes,
    kinds_of,
    moments_of,
    peak,
    sent_to_host,
)
from hpczero.planner.needs import Need, NodeNeed
from hpczero.planner.once import Once
from hpczero.planner.placement import Placement, nodes_of_ranks, placements
from hpczero.planner.platform import CPUS, Platform, as_run, bucket_bytes
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Memory, Spec

BLOCK = 4096  # elements: sums are made in whole blocks
# Bytes of a rank before it has a model: Python, torch, MPI, numba. Measured with MPICH and
# Open MPI, 1 to 4 ranks on a node.
RUNTIME = 250_000_000
_TOKEN = 8
LASTING = ("weights", "master", "moments", "gradients")  # states that are there all the time


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


def needs_on_grid(
    spec: Spec, layers: Sequence[Layer], grid: Grid, platform: Platform = CPUS
) -> dict[int, NodeNeed]:
    spec = as_run(spec, platform.device)
    parts = Parts(layers, platform)
    known_needs: dict[object, NodeNeed] = {}
    needs = {}
    for node, places in placements(spec, grid).items():
        key = tuple(places)
        if key not in known_needs:
            known_needs[key] = NodeNeed(tuple(parts.need(spec, place) for place in places))
        needs[node] = known_needs[key]
    return needs


def need(
    spec: Spec, layers: Sequence[Layer], placement: Placement, platform: Platform = CPUS
) -> Need:
    """Return the need of a node whose ranks all have the largest micro-batch.

    `layers` are those of the whole model.
    """
    return Parts(layers, platform).need(spec, placement)


class _Held(NamedTuple):
    """The units of a rank, and sums of their elements."""

    units: list[UnitLayout]
    around: int  # of those that are in use while others are
    largest: int
    stored: int  # of the shards that it stores, or another replica that stores more
    ties: bool


class _States(NamedTuple):
    """Bytes of a rank's states by kind; those that a node holds once, in windows, in files."""

    private: dict[str, int]
    together: dict[str, int]
    windows: int
    files: int
    over_bus: int
    temporary: int  # in a step


class Parts:
    """The parts of a model that ranks have, in any layouts of one job.

    Each figure is counted once for all layouts that agree in what it depends on. The specs have the
    same [model], `data.seq_len` and `train.precision`.
    """

    def __init__(self, layers: Sequence[Layer], platform: Platform) -> None:
        self.platform = platform
        self._layers = layers
        self._once = Once()

    def chunks(self, spec: Spec) -> list[Chunks]:
        """Return the layers of each stage's chunks."""
        cut = spec.parallel.pipeline, spec.parallel.chunks
        return self._once(chunks_of_stages, cut, spec, self._layers)

    def alike_ranks(self, spec: Spec) -> list[int]:
        """Return for each tensor rank the first one whose parts are as large as its own."""
        parallel = spec.parallel
        key = parallel.pipeline, parallel.chunks, parallel.tensor, parallel.sequence_parallel
        return self._once(self._alike_ranks, key, spec)

    def _alike_ranks(self, spec: Spec) -> list[int]:
        ranks = spec.parallel.tensor
        layers = chain.from_iterable(chain.from_iterable(self.chunks(spec)))
        of_shapes = {
            tuple((one.divided, one.cut(ranks)) for one in layer.parameters): layer
            for layer in layers
        }
        units = LayoutCache(1, ranks)
        first: dict[object, int] = {}
        return [
            first.setdefault(
                (
                    handed_on(spec, rank, spec.seq_len),
                    *(unit.size for unit in units.of(list(of_shapes.values()), rank)),
                ),
                rank,
            )
            for rank in range(ranks)
        ]

    def alike_stages(self, spec: Spec) -> list[int]:
        """Return for each stage the first one whose need is as large as its own, or larger.

        Of inner stages with equally many layers of each kind the first one has the most
        micro-batches in flight, and the most messages.
        """
        memory = spec.memory.model_copy(update={"recompute": "block"})
        key = spec.parallel.pipeline, spec.parallel.chunks, memory.recompute_every
        return self._once(self._alike_stages, key, spec, memory)

    def _alike_stages(self, spec: Spec, memory: Memory) -> list[int]:
        first: dict[object, int] = {}
        last = spec.parallel.pipeline - 1
        stages = []
        for stage, chunks in enumerate(self.chunks(spec)):
            layers = chain.from_iterable(chunks)
            ties = tuple(layer.name for layer in layers if isinstance(layer, Tied))
            kinds = tuple(kinds_of(chunk, memory) for chunk in chunks)
            key = (kinds, ties) if 0 < stage < last else stage
            stages.append(first.setdefault(key, stage))
        return stages

    def need(self, spec: Spec, place: Placement) -> Need:
        """Return the need of ranks with this placement."""
        parallel, zero = spec.parallel, spec.zero
        micro_batches, _, samples = micro_batch_sizes(
            spec.train.global_batch, spec.train.micro_batch, place.data_ranks
        )
        cut = parallel.pipeline, parallel.chunks, parallel.tensor
        part = cut, place.shards, place.replicas, place.stage, place.tensor_rank
        held = self._once(self._held, part, spec, place)
        sharing = place.on_node if place.shared else 0
        by = part, sharing, zero.stage, zero.offload, micro_batches > 1
        states = self._once(self._states, by, spec, place, held)
        of_blocks, moved = self._activations(spec, place.stage, samples, micro_batches)
        message = samples * prod(handed_on(spec, place.tensor_rank, spec.seq_len))
        evaluates = spec.train.eval_batches > 0
        messages = arrived(parallel, place.stage, micro_batches, evaluates)
        tokens = micro_batches * samples * (spec.seq_len + 1)
        private = {
            **states.private,
            "communication": self._buffers(spec, place, held, samples),
            **of_blocks,
            "pipeline": messages * message * element_bytes(spec),
            "checkpoint copy": self._copied(spec, place) * held.stored,
            "data": (spec.data.prefetch + 2) * tokens * _TOKEN,
            "runtime": RUNTIME,
        }
        if states.temporary:
            private["update"] = states.temporary
        over_bus = states.over_bus + moved
        return Need(place.on_node, private, states.together, states.windows, states.files, over_bus)

    def _held(self, spec: Spec, place: Placement) -> _Held:
        layers = list(chain.from_iterable(self.chunks(spec)[place.stage]))
        ranks = place.shards, spec.parallel.tensor
        layouts = self._once(LayoutCache, ranks, *ranks)
        units = layouts.of(layers, place.tensor_rank)
        around = layouts.of([layer for layer in layers if layer.around], place.tensor_rank)
        return _Held(
            units,
            sum(unit.size for unit in around),
            max(unit.size for unit in units),
            _most_stored([unit.shard_size for unit in units], place.replicas),
            any(isinstance(layer, Tied) for layer in layers),
        )

    def _states(self, spec: Spec, place: Placement, held: _Held) -> _States:
        micro_batches, _, _ = micro_batch_sizes(
            spec.train.global_batch, spec.train.micro_batch, place.data_ranks
        )
        sharded = Sharded.at_stage(spec.zero.stage, place.shared)
        precision = Precision(element_bytes(spec), accumulates=micro_batches > 1)
        offload = Offload(
            self.platform.on_gpus and spec.zero.offload != "none", bool(spec.zero.folder)
        )
        update = self.platform.update_of(spec)
        kept, files = bytes_in_places(
            held.units, sharded, precision, place.shared, held.around, update, offload
        )
        owned = [unit.shard_size if sharded.optimizer else unit.size for unit in held.units]
        if exchange := Exchanged.by(spec).kept(owned, place.replicas):
            kept["exchange"] = exchange
        together = {}
        windows = 0
        if place.shared:
            together = {"weights": kept["weights"]}
            windows = kept["weights"] + kept[sharded.read_by_others] * place.on_node
        return _States(
            kept | dict.fromkeys(together, 0),
            together,
            windows,
            sum(files.values()),
            bytes_over_bus(held.units, sharded, precision) if offload.from_device else 0,
            update.temporary(held.units, sharded) + self._of_matrices(spec, place, held, sharded),
        )

    def _of_matrices(self, spec: Spec, place: Placement, held: _Held, sharded: Sharded) -> int:
        """Return what Muon needs beside the states in a step."""
        if spec.optimizer.name != "muon" or self.platform.update:
            return 0
        ranks = Ranks(place.data_ranks, place.shards, spec.parallel.tensor, sharded.optimizer)
        return temporary_bytes(held.units, spec.optimizer, ranks, element_bytes(spec))

    def _copied(self, spec: Spec, place: Placement) -> int:
        """Return the bytes of each stored element: of a copy, and of what comes from replicas."""
        of_update = self.platform.update_of(spec).of_element
        saved, collected = Exchanged.by(spec).saved(of_update, place.replicas)
        return collected + saved * saves_behind(spec)

    def _buffers(self, spec: Spec, place: Placement, held: _Held, samples: int) -> int:
        """Return the most bytes of communication buffers.

        The data ranks that have one copy of the states have two (with torch.distributed one) if
        their gradients leave the node or are not shared, replicas as many, besides messages of
        other forms; the tensor ranks one, tied embeddings one. On GPUs none is larger than its
        largest tensor needs.
        """
        platform = self.platform
        ranks = place.shards
        exchanged = Exchanged.by(spec)
        tensor = spec.parallel.tensor
        bucket = bucket_bytes(spec.zero, platform.device)
        width = element_bytes(spec)

        def buffer(ranks: int, size: int) -> int:
            if not platform.on_gpus or ranks == 1:
                return bucket * (ranks > 1)
            slots = 4 * ranks if platform.native else 2 * (ranks - 1)
            return min(bucket, slots * (-(-size // ranks) + BLOCK * width))

        sends = place.on_node < ranks if place.shared else ranks > 1
        largest = held.largest * width
        of_data = buffer(ranks, largest) * sends
        if exchanged.sums_at_first:
            of_data += buffer(place.replicas, largest // ranks)
        activation = samples * spec.seq_len * spec.model.hidden * width
        of_tensor = buffer(tensor, activation)
        messages = exchanged.messages([unit.shard_size for unit in held.units], place.replicas)
        of_data *= 1 if platform.native else 2
        return of_data + messages + of_tensor + held.ties * bucket

    def _activations(
        self, spec: Spec, stage: int, samples: int, micro_batches: int
    ) -> tuple[dict[str, int], int]:
        """Return the bytes by kind, and those that a step moves over the bus.

        None for a user's own model: its activations are not known.
        """
        if not known(spec.model):
            return {"activations": 0, "workspace": 0}, 0
        parallel, memory = spec.parallel, spec.memory
        layout = (
            parallel.tensor,
            parallel.pipeline,
            parallel.sequence_parallel,
            parallel.schedule,
            parallel.chunks,
            *memory.__dict__.values(),
        )
        key = layout, stage, samples, micro_batches
        return self._once(self._of_blocks, key, spec, stage, samples, micro_batches)

    def _of_blocks(
        self, spec: Spec, stage: int, samples: int, micro_batches: int
    ) -> tuple[dict[str, int], int]:
        offloads = self.platform.on_gpus and spec.memory.offload_activations == "cpu"
        chunks, kernels = self.chunks(spec)[stage], self.platform.kernels
        count = self._moments
        here = activations(spec, samples, chunks, stage, micro_batches, kernels, offloads, count)
        kinds = {"activations": int(here.kept), "workspace": int(here.widest - here.kept)}
        if not offloads:
            return kinds, 0
        sent = sent_to_host(spec, samples, chunks, kernels, count)
        kinds["activations on the host"] = int(peak(spec.parallel, sent, stage, micro_batches).kept)
        return kinds, 2 * micro_batches * int(sum(chunk.kept for chunk in sent))

    def _moments(
        self,
        spec: Spec,
        samples: int,
        chunk: Sequence[Layer],
        kernels: frozenset[str],
        blocks_here: int | None,
    ) -> Moments:
        """Return `moments_of` the chunk, which depends on the kinds of its layers."""
        parallel, memory = spec.parallel, spec.memory
        blocks = id(chunk), memory.recompute, memory.recompute_every
        kinds = self._once(kinds_of, blocks, chunk, memory)
        key = (
            kinds,
            samples,
            blocks_here,
            parallel.tensor,
            parallel.sequence_parallel,
            parallel.pipeline > 1,
            memory.partition_activations,
            memory.loss_chunk,
        )
        return self._once(moments_of, key, spec, samples, chunk, kernels, blocks_here)


def _most_stored(sizes: Sequence[int], replicas: int) -> int:
    stored = [0] * replicas
    for size, replica in zip(sizes, storing_replicas(sizes, replicas), strict=True):
        stored[replica] += size
    return max(stored)


def states_of_a_parameter(spec: Spec, stage: int, data_ranks: int) -> float:
    """Return the bytes of states for each parameter of a large model, whatever its layers are."""
    train = spec.train
    micro_batches, _, _ = micro_batch_sizes(train.global_batch, train.micro_batch, data_ranks)
    precision = Precision(element_bytes(spec), accumulates=micro_batches > 1)
    unit = UnitLayout("", (), data_ranks, ALIGNMENT)
    sharded = Sharded.at_stage(stage, node_shared=False)
    states = state_bytes([unit], sharded, precision, shared=False)
    return sum(states[kind] for kind in LASTING) / unit.size


def saves_behind(spec: Spec) -> bool:
    """Return True if some checkpoint is written while training goes on, from a copy of the states.

    The last one is written at the end of the run.
    """
    return spec.checkpoint.asynchronous and 0 < spec.checkpoint.every < spec.train.steps
