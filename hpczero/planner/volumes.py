"""Bytes that ranks send in a step, by axis, inside nodes and between them (pure).

The ledger of a run counts the same. Legend: N ranks along the axis; A micro-batches of a data rank;
w bytes of a number in the model's precision; S = samples x sequence x hidden x w bytes of a
micro-batch's activations. An all_reduce of B bytes counts 2(N-1)/N B, a reduce_scatter or an
all_gather (N-1)/N B.

data      for every unit of U bytes (a layer of the stage, its tensor shard, padded):
              stage 0   reduce_scatter U, all_gather U (the sum)
              stage 1   reduce_scatter U, all_gather U (the weights)
              stage 2   A reduce_scatter U, all_gather U
              stage 3   A reduce_scatter U; all_gather U for each use that finds it released
                        (at most twice a micro-batch)
          node_shared: nothing inside the node. Between M nodes, with R ranks on this one: one slice
          of R of every shard of another node (reduce_scatter), and M - 1 times the rank's own
          shard (all_gather); stage 3 as stage 2.
shard     if the data ranks are S shards x R replicas: what data had, among the S ranks that have
          one copy of the states; data has the norm alone.
replica   for every unit an all_reduce of U/S: the sums of the shards, once. Or an exchange of E
          elements, the shard's or all that a rank owns, in messages of B(E) bytes
          (`parallel.replicas.sizes`), once in `exchanged.every` steps: an all_to_all to each
          replica, of its part of E / N; an all_gather of N parts. What all tensor ranks hold is
          exchanged a second time, in fp32. Bytes are those of a step on average.
tensor    for every micro-batch: a block has two pairs of a column- and a row-parallel layer, each
          with an all_reduce S in forward (twice if it is recomputed) and one in backward; the
          embedding has one in forward, the head one in backward; the loss an all_reduce of 4 and
          one of 8 bytes a token. sequence_parallel: each all_reduce S becomes a reduce_scatter and
          an all_gather (the sequence padded to a multiple of N). Backward gathers once more for
          each column-parallel layer (not for a head by pieces), and sums norms' gradients. An
          all_gather S for each recomputed block whose input is cut (partition_activations).
pipeline  for every micro-batch: S at each boundary of chunks forward, and backward (with
          sequence_parallel the rank's part of it). A tied parameter: the stages that hold it have
          an all_reduce of the gradient's shard, once, in fp32 if it is accumulated so.
world     an all_reduce of 56 bytes: the loss, an unfinished save, requests to stop. On data, tensor
          and pipeline an all_gather of 8 N: the norm. Where gradients of replicas differ, tensor's
          and pipeline's has as many numbers as there are replicas.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, permutations
from math import prod
from typing import Any, NamedTuple

from hpczero.comm.grid import Grid, impossible, order_is_free
from hpczero.comm.trace import evenly
from hpczero.data.samples import micro_batch_counts
from hpczero.errors import InputError
from hpczero.model.families import family, known, layer_count, layers
from hpczero.model.shapes import (
    NORM_OF_ROWS,
    Layer,
    sizes_summed,
    sizes_with_role,
    sums_of,
)
from hpczero.parallel.activations.choice import loss_rows, recomputed
from hpczero.parallel.pipeline import partition
from hpczero.parallel.states import Sharded
from hpczero.parallel.zero.gather_sizes import gathers_in_8_bits
from hpczero.planner import update_volumes
from hpczero.planner.activations import element_bytes
from hpczero.planner.data_volumes import DataVolumes, norm, summed
from hpczero.planner.once import Once
from hpczero.planner.sent import GroupVolumes, RepeatedRanks, Sent, Total, merged, runs, together
from hpczero.spec.rules import AXES
from hpczero.spec.schema import Parallel, Spec

_AGREEMENT = 56
_WEIGHT = 8  # of a step's targets, where some positions have none
_LOSS = (1, 2)  # fp32 numbers of each token: the largest logit; two sums

Batches = tuple[tuple[int, int], ...]  # (samples, number of micro-batches with so many)


class _At(NamedTuple):
    """A grid, what `Grid.by_axis` says of it, and the data ranks that have one copy of states."""

    grid: Grid
    grids: dict[str, Grid]
    shards: int
    in_8_bits: bool  # weights are gathered so


def resolved(spec: Spec, node_of_rank: Sequence[int]) -> Parallel:
    """Return `spec.parallel` with a definite order of the axes.

    For "auto" it is the one that sends the fewest bytes between nodes. Among equal ones, and for a
    user's own model, it is tensor innermost, then data.
    """
    parallel = spec.parallel
    ranks = len(node_of_rank)
    if ranks % (parallel.tensor * parallel.pipeline):
        raise InputError(impossible(parallel, ranks, _most(spec)))
    if parallel.order != "auto":
        return parallel
    sizes = {
        "tensor": parallel.tensor,
        "data": ranks // (parallel.tensor * parallel.pipeline),
        "pipeline": parallel.pipeline,
    }
    candidates = [
        parallel.model_copy(update={"order": ",".join(order)}) for order in permutations(AXES)
    ]
    if order_is_free(sizes, node_of_rank) or not known(spec.model):
        return candidates[0]
    volumes = Volumes(spec, layers(spec.model), sizes["data"])
    return min(candidates, key=lambda each: volumes.between_nodes(Grid.build(each, node_of_rank)))


def _most(spec: Spec) -> dict[str, int]:
    """Return the largest sizes of the axes that the model allows."""
    if not known(spec.model):
        return {}
    stages = max(1, layer_count(spec.model) // spec.parallel.chunks)
    return {"tensor": spec.model.heads, "pipeline": stages}


class Volumes:
    """Volumes of one spec, for any order of the grid's axes.

    `once`: what layouts of one job share, if there are several. Gathers of stage 3 are then nearly
    right.
    """

    def __init__(
        self, spec: Spec, layers: Sequence[Layer], data_ranks: int, once: Once | None = None
    ) -> None:
        self.spec = spec
        self.data_ranks = data_ranks
        nearly = once is not None
        self._once = once = once or Once()
        cut = spec.parallel.pipeline, spec.parallel.chunks
        self.chunks = once(partition.chunks_of_stages, cut, spec, layers)
        self._stages_of_ties = once(partition.stages_of_ties, cut, self.chunks)
        self.among_data = DataVolumes(spec, self.chunks, data_ranks, once, nearly)
        self._width = element_bytes(spec)
        self._batch = spec.train.global_batch, spec.train.micro_batch
        self._known: dict[object, GroupVolumes] = {}
        self._batches_of: dict[int, Batches] = {}

    def of_rank(self, grid: Grid, rank: int) -> dict[str, dict[str, Sent]]:
        """Return axis -> operation -> bytes that this rank sends."""
        at = self._at(grid)
        groups = {axis: of.ranks(rank, axis) for axis, of in at.grids.items()}
        volumes = {}
        for axis, group in (groups | {"world": grid.rank_at_place}).items():
            operations = self._of_group(at, axis, group).of(group.index(rank))
            volumes[axis] = {name: sent for name, sent in operations.items() if sent != Sent()}
        return {axis: operations for axis, operations in volumes.items() if operations}

    def totals(self, grid: Grid) -> dict[str, dict[str, Total]]:
        """Return axis -> operation -> bytes sent, at most by a rank and by all."""
        at = self._at(grid)
        groups = {axis: of.groups(axis) for axis, of in at.grids.items()}
        volumes = {
            axis: _of_groups(Counter(self._of_group(at, axis, group) for group in of_axis))
            for axis, of_axis in (groups | {"world": iter([grid.rank_at_place])}).items()
        }
        return {axis: totals for axis, totals in volumes.items() if totals}

    def between_nodes(self, grid: Grid) -> int:
        """Return the bytes that all ranks send to other nodes."""
        operations = self.totals(grid).values()
        return sum(total.all.between for totals in operations for total in totals.values())

    def _at(self, grid: Grid) -> _At:
        shard_ranks = self.spec.zero.shard_ranks
        shards = grid.shards_and_replicas(shard_ranks).size("shard")
        in_8_bits = gathers_in_8_bits(self.spec, grid)
        return _At(grid, grid.by_axis(shard_ranks), shards, in_8_bits)

    def _of_group(self, at: _At, axis: str, group: Sequence[int]) -> GroupVolumes:
        """Return the volumes of a group, computed once for all groups that are alike."""
        grid = at.grid
        nodes = list(map(grid.node_of_rank.__getitem__, group))  # in order
        on_nodes: tuple[int, ...] = (len(nodes),)
        if nodes[0] != nodes[-1]:
            on_nodes = tuple(len(list(same)) for _, same in groupby(nodes))
        coordinate = partial(grid.coordinate, group[0])
        place = coordinate("pipeline"), coordinate("tensor")
        among_data = self.among_data
        if axis == "data" and "replica" in at.grids:
            key: tuple[Any, ...] = among_data.of_all, *place, at.shards, on_nodes
        elif axis in ("data", "shard"):
            of = among_data.of_data if axis == "data" else among_data.of_shards
            divided = at.grids.get("shard", grid)
            key = of, *place, on_nodes, divided.nodes_cut_data_alike, at.in_8_bits
        elif axis == "replica":
            shard = 0  # only shares of what tensor ranks hold in common differ
            if grid.size("tensor") > 1:
                shard = at.grids["shard"].coordinate(group[0], "shard")
            key = among_data.of_replicas, *place, at.shards, shard, on_nodes
        elif axis == "tensor":
            batches = self.batches(coordinate("data"))
            owner = coordinate("data") if self.spec.optimizer.name == "muon" else 0
            key = self.of_tensor, place[0], batches, on_nodes, at.shards, owner
        elif axis == "pipeline":
            batches = self.batches(coordinate("data"))
            key = self.of_pipeline, place[1], batches, on_nodes, at.shards
        else:
            assert axis == "world", f"nothing says what is sent along the axis {axis}"
            key = self._world, on_nodes
        if key not in self._known:
            compute, *arguments = key
            self._known[key] = GroupVolumes(compute(*arguments) if len(group) > 1 else [([{}], 1)])
        return self._known[key]

    def batches(self, data_rank: int) -> Batches:
        if data_rank not in self._batches_of:
            counts = micro_batch_counts(data_rank, *self._batch, self.data_ranks)
            self._batches_of[data_rank] = tuple(sorted(counts.items()))
        return self._batches_of[data_rank]

    def _layers(self, stage: int) -> list[Layer]:
        return [layer for chunk in self.chunks[stage] for layer in chunk]

    def _world(self, on_nodes: Sequence[int]) -> Iterator[RepeatedRanks]:
        ranks = sum(on_nodes)
        for count, nodes in runs(on_nodes):
            agreed = [_AGREEMENT, *[_WEIGHT] * self.spec.counts_targets]
            messages = [Sent(*evenly(2 * size, ranks, ranks - count)) for size in agreed]
            yield [{"all_reduce": sum(messages, Sent())}], count * nodes

    def of_tensor(
        self, stage: int, batches: Batches, on_nodes: Sequence[int], shards: int, data_rank: int
    ) -> Iterator[RepeatedRanks]:
        """Yield the volumes of the tensor ranks of a data rank, which the update alone asks for."""
        among_data = self.among_data
        of_update = update_volumes.of_tensor(
            self.spec.optimizer,
            among_data.units(shards).of(self._layers(stage), 0),
            among_data.update_ranks(shards),
            self._width,
            on_nodes,
            data_rank,
        )
        of_layers = self._of_layers(stage, batches, on_nodes, among_data.workers(shards))
        yield from together(of_layers, of_update)

    def _of_layers(
        self, stage: int, batches: Batches, on_nodes: Sequence[int], workers: int
    ) -> Iterator[RepeatedRanks]:
        ranks = self.spec.parallel.tensor
        messages = [
            message
            for samples, times in batches
            for message in self.tensor_messages(stage, samples, times)
        ]
        for count, nodes in runs(on_nodes):
            elsewhere = ranks - count
            operations = {"all_gather": norm(ranks, elsewhere, workers)}
            for operation, size, times in messages:
                sent = Sent(*evenly(size, ranks, elsewhere)) * times
                operations[operation] = operations.get(operation, Sent()) + sent
            yield [operations], count * nodes

    def tensor_messages(
        self, stage: int, samples: int, times: int
    ) -> Iterator[tuple[str, int, int]]:
        """Yield operation, bytes (of an all_reduce twice: there and back), number in a step."""
        model = self.spec.model
        ranks = self.spec.parallel.tensor
        tokens = samples * self.spec.seq_len
        chunk = loss_rows(self.spec.memory, tokens)
        running = partition.layers_that_run(self.chunks[stage])
        # the last block of a kind may have a norm more than the others
        alike = Counter((layer.kind, len(layer.parameters)) for layer in running)
        examples = {(layer.kind, len(layer.parameters)): layer for layer in running}
        plans, has_head = family(model), any(layer.kind == "head" for layer in running)
        for key, count in alike.items():
            by = *key, ranks
            for size in self._once(sizes_summed, by, examples[key], plans.tensor_plan, ranks):
                yield "all_reduce", 2 * size * self._width, count * times
        yield from self._sums(running, samples, times)
        if self.spec.parallel.sequence_parallel:
            for key, count in alike.items():
                by, of = (*key, ranks), (examples[key], plans.sequence_plan, NORM_OF_ROWS)
                for size in self._once(sizes_with_role, by, *of):
                    yield "all_reduce", 2 * size * self._width, count * times
            if has_head and plans.picked:
                picked = samples * plans.picked(model, self.spec.seq_len)
                yield "all_reduce", 2 * picked * model.hidden * self._width, times
        else:
            cut = len(self._again(running)) * times * self.spec.memory.partition_activations
            yield "all_gather", tokens * model.hidden * self._width, cut
        if has_head:
            targets = samples * model.target_count(self.spec.seq_len)
            if plans.picked:  # the gradient of what the logits are made from
                yield "all_reduce", 2 * targets * model.hidden * self._width, times
            piece = chunk or max(targets, 1)
            for rows, count in ((piece, targets // piece), (targets % piece, 1)):
                for numbers in _LOSS:
                    yield "all_reduce", 2 * numbers * 4 * rows, times * count

    def _sums(
        self, running: Sequence[Layer], samples: int, times: int
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the messages of activations that tensor ranks sum, and gather, in these layers."""
        model, ranks = self.spec.model, self.spec.parallel.tensor
        kinds = Counter(layer.kind for layer in running)
        again = Counter(layer.kind for layer in self._again(running))
        sums, of_position = family(model).tensor_sums, samples * model.hidden * self._width
        chunk = loss_rows(self.spec.memory, samples * self.spec.seq_len)
        for stream, length in enumerate(model.streams(self.spec.seq_len)):
            forward, backward = sums_of(sums, kinds, stream)
            forward_again, columns_again = sums_of(sums, again, stream)
            if not self.spec.parallel.sequence_parallel:
                count = forward + backward + forward_again
                yield "all_reduce", 2 * length * of_position, count * times
                continue
            padded = -(-length // ranks) * ranks * of_position
            yield "reduce_scatter", padded, (forward + backward + forward_again) * times
            ahead = kinds["head"] if chunk else 0  # its forward's
            # what is summed in one direction is gathered in the other, for weights once more
            yield "all_gather", padded, (forward + 2 * backward + columns_again - ahead) * times

    def _again(self, running: Sequence[Layer]) -> list[Layer]:
        """Return the layers whose forward backward repeats."""
        return [layer for layer in running if recomputed(self.spec.memory, layer) == "block"]

    def of_pipeline(
        self, tensor_rank: int, batches: Batches, on_nodes: Sequence[int], shards: int
    ) -> Iterator[RepeatedRanks]:
        stages = self.spec.parallel.pipeline
        workers = self.among_data.workers(shards)
        last = stages - 1
        nodes = [node for node, count in enumerate(on_nodes) for _ in range(count)]
        samples = sum(size * times for size, times in batches)
        shape = partition.handed_on(self.spec, tensor_rank, self.spec.seq_len)
        activation = samples * prod(shape) * self._width
        for stage, chunks in enumerate(self.chunks):
            node = nodes[stage]
            onward = activation * (len(chunks) - (stage == last))
            back = activation * (len(chunks) - (stage == 0))
            sent = _directly(onward, node != nodes[(stage + 1) % stages])
            operations = {
                "send": sent + _directly(back, node != nodes[stage - 1]),
                "all_reduce": summed(self._tied(stage, tensor_rank, nodes, shards)),
                "all_gather": norm(stages, stages - on_nodes[node], workers),
            }
            yield [operations], 1

    def _tied(
        self, stage: int, tensor_rank: int, nodes: Sequence[int], shards: int
    ) -> Iterator[Sent]:
        """Yield the bytes of each tied parameter's all_reduce over the stages that hold it."""
        sharded = Sharded.at_stage(self.spec.zero.stage, node_shared=False)
        width = 4 if sharded.gradients and self.among_data.micro_batches > 1 else self._width
        tied = [layer for layer in self._layers(stage) if isinstance(layer, partition.Tied)]
        layouts = self.among_data.units(shards).of(tied, tensor_rank)
        for layer, layout in zip(tied, layouts, strict=True):
            holders = [nodes[holder] for holder in self._stages_of_ties[layer.name]]
            elsewhere = sum(node != nodes[stage] for node in holders)
            yield Sent(*evenly(2 * layout.shard_size * width, len(holders), elsewhere))


def _of_groups(groups: Mapping[GroupVolumes, int]) -> dict[str, Total]:
    counted = (
        (name, Total(total.rank, total.all * count))
        for members, count in groups.items()
        for name, total in members.totals.items()
    )
    return {name: total for name, total in merged(counted).items() if total.all != Sent()}


def _directly(size: int, elsewhere: bool) -> Sent:
    return Sent(0, size) if elsewhere else Sent(size, 0)
