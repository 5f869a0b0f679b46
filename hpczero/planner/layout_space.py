"""All layouts that a job can have on equal nodes (pure).

What cannot exist, and what changes nothing next to the other keys, is left out by the rules of the
spec (`spec.rules`): nothing here says again what these say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, permutations, product, starmap
from typing import Any, NamedTuple

from hpczero.data.samples import micro_batch_sizes
from hpczero.model.families import known, layer_count
from hpczero.parallel.activations.choice import loss_rows
from hpczero.parallel.replicas.exchanged import Exchanged
from hpczero.planner.allocation import Allocation
from hpczero.planner.layouts import SECTIONS, Layout
from hpczero.planner.spread import spreads
from hpczero.spec.rules import AXES, contradictions, unavailable, without_effect
from hpczero.spec.schema import Parallel, Spec

# What is computed again, the cheapest first.
RECOMPUTED = (("none", 1), ("selective", 1), ("block", 2), ("block", 1))
_LOSS = (0, "auto")
_AWAY = ("none", "cpu")
_MOST_CHUNKS = 8
_FOLDER = "nvme:$TMPDIR"  # of states in files, where the spec names none


class Saving(NamedTuple):
    """What a layout gives up for memory; one that gives up more is never faster."""

    recomputed: int  # of `Space.recomputed`
    by_pieces: int  # the loss
    partitioned: int
    activations_away: int

    def gives_up(self, other: "Saving") -> bool:
        """Return True if it gives up all that the other one does."""
        return all(map(int.__ge__, self, other))


class States(NamedTuple):
    """The ZeRO stage, who has one copy, whether ranks of a node share it, and where it lies."""

    stage: int
    shard_ranks: str | int
    node_shared: str | bool
    offload: str


@dataclass(frozen=True)
class Space:
    """All layouts of a job on some nodes; keys that are `pinned` keep the spec's value.

    `has_files`: nodes have storage for states.
    """

    spec: Spec
    nodes: Allocation
    pinned: frozenset[str] = frozenset()
    has_files: bool = False
    _tables: dict[object, Any] = field(default_factory=dict)

    @property
    def on_gpus(self) -> bool:
        return self.spec.train.device == "cuda"

    def _free(self, key: str) -> bool:
        return key not in self.pinned

    def _values(self, key: str, choices: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try."""
        return choices if self._free(key) else (getattr(Layout.of(self.spec), key),)

    @cached_property
    def parallels(self) -> list[Parallel]:
        """The tables [parallel] that can exist on these ranks, the order of the axes apart."""
        tables = []
        for tensor, pipeline in self._grids():
            for sequence in self._values("sequence_parallel", (False, True)):
                for schedule, chunks in self._schedules(pipeline):
                    changes = {
                        "tensor": tensor,
                        "pipeline": pipeline,
                        "sequence_parallel": sequence,
                        "schedule": schedule,
                        "chunks": chunks,
                    }
                    table = self.spec.parallel.model_copy(update=changes)
                    if self._exists(self.spec.model_copy(update={"parallel": table})):
                        tables.append(table)
        return tables

    def _exists(self, spec: Spec) -> bool:
        if contradictions(spec) or unavailable(spec):
            return False
        return not set(without_effect(spec)) - set(self._notes)

    @cached_property
    def _notes(self) -> list[str]:
        """Notes on the spec as it is, which its user has accepted."""
        pinned = [self.spec] if self.pinned else []
        plain = self.spec.model_copy(update={"parallel": Parallel()})
        return [note for spec in (plain, *pinned) for note in without_effect(spec)]

    @property
    def _is_divided(self) -> bool:
        """True if the spec says how many replicas there are."""
        return Exchanged.by(self.spec).gradients_differ or not self._free("shard_ranks")

    def _divisions(self, parallel: Parallel, order: str) -> Sequence[str | int]:
        """Return who may have one copy of the states: all data ranks, or also those of a node."""
        if self._is_divided:
            return (self.spec.zero.shard_ranks,)
        sizes = self._sizes(parallel)
        in_order = tuple((axis, sizes[axis]) for axis in order.split(","))
        shards = spreads(in_order, self.nodes, "node")["shard"].ranks
        return ("all", "node") if 1 < shards < sizes["data"] else ("all",)

    def _grids(self) -> Iterator[tuple[int, int]]:
        ranks, given = self.nodes.ranks, self.spec.zero.shard_ranks
        shards = given if self._is_divided and isinstance(given, int) else 1
        for tensor in self._values("tensor", _divisors(ranks)):
            for pipeline in self._values("pipeline", _divisors(ranks // tensor)):
                data, left = divmod(ranks, tensor * pipeline)
                if left == 0 and data % shards == 0:
                    yield tensor, pipeline

    def _schedules(self, pipeline: int) -> Iterator[tuple[str, int]]:
        if pipeline == 1 or not known(self.spec.model):
            kind = "1f1b" if self._free("schedule") else self.spec.parallel.schedule
            for chunks in self._values("chunks", (1,)):
                yield kind, chunks
            return
        most = min(_MOST_CHUNKS, layer_count(self.spec.model) // pipeline)
        # gpipe idles as long as 1f1b and keeps more, so only a spec that asks for it has it
        for kind in self._values("schedule", ("1f1b", "interleaved")):
            choices = [size for size in round_numbers(most) if size > 1]
            for chunks in self._values("chunks", choices if kind == "interleaved" else (1,)):
                yield kind, chunks

    def orders(self, parallel: Parallel) -> list[str]:
        """Return the orders of the axes that lie on the nodes in different ways.

        The tensor axis comes innermost in the first ones.
        """
        if not self._free("order") and self.spec.parallel.order != "auto":
            return [self.spec.parallel.order]
        sizes = self._sizes(parallel)
        ways: dict[object, str] = {}
        for order in sorted(permutations(AXES), key=lambda order: order[0] != "tensor"):
            ways.setdefault(self._on_nodes(order, sizes), ",".join(order))
        return list(ways.values())

    def _on_nodes(self, order: Sequence[str], sizes: Mapping[str, int]) -> object:
        """Return how each axis lies on the nodes: ranks on one, and the distance of two."""
        stride = 1
        lies: dict[str, tuple[int, int]] = {}
        for axis in order:
            span = min(stride * sizes[axis], self.nodes.ranks_per_node)
            regular = self.nodes.ranks_per_node % span == 0
            lies[axis] = max(1, span // stride), 0 if regular else stride
            stride *= sizes[axis]
        return tuple(sorted(lies.items()))

    def states(self, parallel: Parallel, order: str) -> Iterator[States]:
        """Yield the ZeRO stages, with who has one copy of the states, and where it is.

        States elsewhere are no saving that costs time: the host's update may be hidden.
        """
        zero = self.spec.zero
        several = self._data_ranks(parallel) > 1
        can_share = several and not self.on_gpus and self.nodes.ranks_per_node > 1
        shared = (True, False) if can_share else (zero.node_shared,)
        yield from starmap(
            States,
            product(
                self._values("stage", self._stages if several else (zero.stage,)),
                self._divisions(parallel, order),
                self._values("node_shared", shared),
                self.offloads,
            ),
        )

    def _sizes(self, parallel: Parallel) -> dict[str, int]:
        data = self._data_ranks(parallel)
        return {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "data": data}

    def _data_ranks(self, parallel: Parallel) -> int:
        return self.nodes.ranks // (parallel.tensor * parallel.pipeline)

    def micro_batches(self, parallel: Parallel) -> list[int]:
        """Return the sizes that make different micro-batches of the global batch."""
        batch = self.spec.train.global_batch
        data = self._data_ranks(parallel)
        choices = self._values("micro_batch", round_numbers(-(-batch // data)))
        ways = {micro_batch_sizes(batch, size, data): size for size in choices}
        return sorted(ways.values())

    @cached_property
    def offloads(self) -> Sequence[str]:
        """The places of the states."""
        folder = self.spec.zero.offload if self.spec.zero.offload.startswith("nvme") else _FOLDER
        files = (folder,) if self.has_files else ()
        places = ("none", *(("cpu",) if self.on_gpus else ()), *files)
        return self._values("offload", self._possible("zero", "offload", places))

    @cached_property
    def _stages(self) -> Sequence[int]:
        return self._possible("zero", "stage", range(4))

    def _possible(self, table: str, key: str, choices: Sequence[Any]) -> list[Any]:
        """Return the values of a key that the spec's rules do not refuse."""
        values = getattr(self.spec, table)
        specs = [
            self.spec.model_copy(update={table: values.model_copy(update={key: one})})
            for one in choices
        ]
        refused = [{key for one in contradictions(spec) for key in one.keys} for spec in specs]
        return [
            one for one, keys in zip(choices, refused, strict=True) if f"{table}.{key}" not in keys
        ]

    @cached_property
    def recomputed(self) -> Sequence[tuple[str, int]]:
        """Ways to compute activations again, the cheapest first: a kind, of every so many blocks.

        A pinned "auto" leaves it to the plan, as it leaves it to the run.
        """
        memory = self.spec.memory
        ways: Sequence[tuple[str, int]] = RECOMPUTED
        if not self._free("recompute_every"):
            ways = list(dict.fromkeys((kind, memory.recompute_every) for kind, _ in ways))
        if not self._free("recompute") and memory.recompute != "auto":
            ways = [way for way in ways if way[0] == memory.recompute]
        return ways

    def savings(self, parallel: Parallel, micro_batch: int) -> list[Saving]:
        """Return the ways to need less memory, from none to all; each after those it contains.

        Ways that differ only in what is computed again stand together.
        """
        blocks = known(self.spec.model)
        tokens = micro_batch * self.spec.seq_len
        memory = self.spec.memory.model_copy(update={"loss_chunk": "auto"})
        pieces = 2 if self._may_split_loss and loss_rows(memory, tokens) else 1
        replicated = parallel.tensor > 1 and not parallel.sequence_parallel
        found = [
            Saving(recomputed, piece, partitioned, activations)
            for recomputed in range(len(self.recomputed) if blocks else 1)
            for piece in self._levels("loss_chunk", pieces)
            for partitioned in self._levels(
                "partition_activations",
                2 if replicated and self.recomputed[recomputed][0] == "block" else 1,
            )
            for activations in self._levels(
                "offload_activations", 2 if self.on_gpus and blocks else 1
            )
        ]
        return sorted(found, key=lambda saving: (sum(saving[1:]), saving[:0:-1], saving[0]))

    @cached_property
    def _may_split_loss(self) -> bool:
        return bool(self._possible("memory", "loss_chunk", ["auto"]))

    def _levels(self, key: str, count: int) -> range:
        return range(count) if self._free(key) else range(1)

    def layout(self, parallel: Parallel, order: str, states: States, micro_batch: int) -> Layout:
        """Return a layout that gives nothing up."""
        nothing = self.saving(Layout.of(self.spec), Saving(0, 0, 0, 0))
        return nothing._replace(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            sequence_parallel=parallel.sequence_parallel,
            schedule=parallel.schedule,
            chunks=parallel.chunks,
            order=order,
            stage=states.stage,
            shard_ranks=states.shard_ranks,
            node_shared=states.node_shared,
            offload=states.offload,
            micro_batch=micro_batch,
        )

    def spec_with(self, layout: Layout) -> Spec:
        """Return the job's spec with this layout, from tables that are made once."""
        tables = {}
        for table, first, last in SECTIONS:
            values = layout[first:last]
            if (table, values) not in self._tables:
                changes = dict(zip(Layout._fields[first:last], values, strict=True))
                self._tables[table, values] = getattr(self.spec, table).model_copy(update=changes)
            tables[table] = self._tables[table, values]
        return self.spec.model_copy(update=tables)

    def saving(self, layout: Layout, saving: Saving) -> Layout:
        """Return the layout that gives so much up."""
        again, every = self.recomputed[saving.recomputed]
        changes: dict[str, Any] = {"recompute": again, "recompute_every": every}
        if self._free("loss_chunk"):
            changes["loss_chunk"] = _LOSS[saving.by_pieces]
        if self._free("partition_activations"):
            changes["partition_activations"] = bool(saving.partitioned)
        if self._free("offload_activations"):
            changes["offload_activations"] = _AWAY[saving.activations_away]
        return layout._replace(**changes)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def round_numbers(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12 and so on up to `most`, and that itself."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    numbers = chain.from_iterable((power, power + power // 2) for power in powers)
    return sorted({number for number in (*numbers, most) if 0 < number <= most})
