"""The memory, layout and messages of a job before it runs, for people and as data (pure)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from hpczero.comm.grid import Grid
from hpczero.model.shapes import Layer
from hpczero.parallel.layout import rectangles
from hpczero.parallel.pipeline.partition import LayoutCache, chunks_of_stages, layers_that_run
from hpczero.parallel.replicas.exchanged import Exchanged
from hpczero.parallel.states import shares_nodes
from hpczero.parallel.zero.gather_sizes import FORM, gathers_in_8_bits
from hpczero.planner.fit import NodeLimits, as_it_fits, close_calls, kinds_in_words
from hpczero.planner.memory import needs_on_grid
from hpczero.planner.needs import Hardware, NodeNeed, of_account
from hpczero.planner.platform import Platform
from hpczero.planner.volumes import Volumes
from hpczero.spec.rules import AXES
from hpczero.spec.schema import Spec, Zero
from hpczero.text import (
    consecutive_runs,
    format_bytes,
    format_count,
    format_memory,
    format_span,
    shorten,
    toml_repr,
)

_SPEEDS = (0.5, 2, 6)  # GB/s of storage: of a disk, one NVMe drive, several
_OF_BUS = (8, 25, 50)  # GB/s of a GPU's bus: an old or shared one, PCIe 4, PCIe 5
_SHOWN = 8  # lines of a list before it is cut short
_CALLED = {"pipeline": "stage"}  # a coordinate along an axis, if not by the name of the axis


@dataclass(frozen=True)
class Forecast:
    """A job on nodes of which some facts are known, and the memory that it needs there."""

    spec: Spec
    grid: Grid
    node: Hardware
    platform: Platform

    def memory(self, layers: Sequence[Layer]) -> dict[str, Any]:
        """Return bytes by kind on the fullest node: of a rank, of all its ranks, in shared windows.

        On GPUs "device" has the fullest rank of all nodes and "host" the fullest node, and
        `available` is 0 if a size is not known. "close_calls": where it may not fit.
        """
        limits = NodeLimits.planned(Counter(self.grid.node_of_rank), self.node, self.platform)
        needs = needs_on_grid(self.spec, layers, self.grid, self.platform).values()
        fullest = max(needs, key=lambda need: need.of(need.ranks))
        memory: dict[str, Any] = {
            "ranks_on_node": fullest.ranks,
            "rank": fullest.rank,
            "node": fullest.node,
            "windows": fullest.windows,
            "on": self.platform.device,
            "close_calls": close_calls(self.spec, layers, limits),
        }
        if fullest.files:
            most = max(part.files for part in fullest.parts)
            everywhere = sum(need.files for need in needs)
            memory["files"] = {"rank": most, "node": fullest.files, "all": everywhere}
        if self.platform.on_gpus:
            memory |= self._accounts(list(needs), fullest)
            memory["kernels"] = bool(self.platform.kernels)
            most = max(part.over_bus for need in needs for part in need.parts)
            if most:
                of_gpu = most * memory["device"]["ranks_on_gpu"]
                memory["over_bus"] = {"rank": most, "gpu": of_gpu}
        return memory

    def as_it_fits(self, layers: Sequence[Layer]) -> "tuple[Forecast, str]":
        """Return the job with its memory.recompute decided, and why it does not fit.

        The latter is "" if it does, or if the sizes of the nodes are not known.
        """
        limits = NodeLimits.planned(Counter(self.grid.node_of_rank), self.node, self.platform)
        way, problem = as_it_fits(self.spec, layers, limits)
        spec = self.spec.model_copy(update={"memory": way.memory})
        return replace(self, spec=spec), problem or ""

    def _accounts(self, needs: list[NodeNeed], fullest: NodeNeed) -> dict[str, Any]:
        of_devices = [need.fullest("device") for need in needs]
        host = max(needs, key=lambda need: need.of(need.ranks, "host"))
        return {
            "device": {
                "rank": max(of_devices, key=lambda kinds: sum(kinds.values())),
                "ranks_on_gpu": self.node.ranks_on_gpu(fullest.ranks),
                "available": int(self.node.gpu_memory_gb * 1e9),
            },
            "host": {
                "rank": host.fullest("host"),
                "node": of_account(host.node, "host"),
                "available": int(self.node.memory_gb * 1e9),
            },
        }


def in_lines(memory: dict[str, Any]) -> list[str]:
    """Return the lines that tell what `Forecast.memory` returned."""
    return [
        *_memory_in_lines(memory),
        *_files_in_lines(memory.get("files")),
        *_bus_in_lines(memory.get("over_bus")),
        *memory["close_calls"],
    ]


def _files_in_lines(files: dict[str, int] | None) -> list[str]:
    """Return the lines about states in files, and what they cost."""
    if files is None:
        return []
    moved = 2 * files["node"]
    return [
        f"in files of zero.offload {format_memory(files['node'])} on a node,"
        f" {format_memory(files['rank'])} a rank,"
        f" {format_memory(files['all'])} on all nodes;",
        f"a step reads and writes all of them, {format_memory(moved)} on a node:"
        f" {_seconds(moved, _SPEEDS)}",
    ]


def _bus_in_lines(over_bus: dict[str, int] | None) -> list[str]:
    """Return the line about what is elsewhere than on its GPU, and comes and goes."""
    if over_bus is None:
        return []
    moved = over_bus["gpu"]
    return [
        f"a step moves {format_memory(moved)} over the bus of a GPU, there and back:"
        f" {_seconds(moved, _OF_BUS)}"
    ]


def _seconds(size: int, speeds: Sequence[float]) -> str:
    return ", ".join(f"{size / speed / 1e9:.3g} s at {speed:g} GB/s" for speed in speeds)


def _memory_in_lines(memory: dict[str, Any]) -> list[str]:
    ranks = format_count(memory["ranks_on_node"], "rank")
    if memory["on"] == "cpu":
        of_node, of_rank = (format_memory(sum(memory[part].values())) for part in ("node", "rank"))
        windows = (
            f" ({format_memory(memory['windows'])} of it in shared windows)"
            if memory["windows"]
            else ""
        )
        first = f"about {of_node} on a node of {ranks}{windows}, {of_rank} a rank:"
        return [first, kinds_in_words(memory["rank"])]
    device = memory["device"]
    host = memory["host"]
    sharing = device["ranks_on_gpu"]
    shared = f", {sharing} of which share a GPU" if sharing > 1 else ""
    by_whom = "hpczero's kernels" if memory["kernels"] else "PyTorch's operations"
    of_gpu = "; how much a GPU has is not known (batch.site)"
    if device["available"]:
        of_gpu = f" of the {format_memory(device['available'])} of a GPU"
    of_node = f" of {format_memory(host['available'])}" if host["available"] else ""
    on_host = format_memory(sum(host["node"].values()))
    of_rank = format_memory(sum(device["rank"].values()))
    return [
        f"on GPUs about {of_rank} a rank{shared}{of_gpu}:",
        kinds_in_words(device["rank"]),
        f"and about {on_host}{of_node} of the memory of a node of {ranks}; a rank has:",
        kinds_in_words(host["rank"]),
        f"(activations are those of {by_whom}; CUDA's own share of a GPU is not counted)",
    ]


# The layout: who holds what, on which node, and what is sent.


def stages(spec: Spec, layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return each stage's chunks of layers, and the parameters of its tensor rank 0 (the most)."""
    units = LayoutCache(1, spec.parallel.tensor)
    described = []
    for chunks in chunks_of_stages(spec, layers):
        names = [[layer.name for layer in layers_that_run([chunk])] for chunk in chunks]
        of_stage = units.of([layer for chunk in chunks for layer in chunk])
        parameters = sum(slot.stop - slot.offset for unit in of_stage for slot in unit.slots)
        described.append({"chunks": names, "parameters": parameters})
    return described


def sharing_left_out(zero: Zero, grid: Grid) -> str:
    """Return why nodes that would share states do not; "" if they do, or would not."""
    grid = grid.shards_and_replicas(zero.shard_ranks)
    groups = grid.groups("shard")
    per_node = (Counter(grid.node_of_rank[rank] for rank in group).values() for group in groups)
    if grid.nodes_cut_data_alike or not any(shares_nodes(zero, counts) for counts in per_node):
        return ""
    return (
        f"zero.node_shared = {toml_repr(zero.node_shared)} shares nothing: "
        "nodes divide the data ranks "
        "of the tensor ranks differently, or of replicas, which would then round differently; "
        "ranks per node that parallel.tensor divides make it possible"
    )


def left_out(spec: Spec, grid: Grid) -> list[str]:
    """Return what the spec asks for and these ranks do not do."""
    left_out = (sharing_left_out(spec.zero, grid), replicas_left_out(spec, grid))
    return [what for what in (*left_out, compression_left_out(spec, grid)) if what]


def replicas_left_out(spec: Spec, grid: Grid) -> str:
    """Return which settings of replicas change nothing, as there is one; "" if there are several.

    Those that need several without any doubt are refused by the rules of a spec.
    """
    optimizer = spec.optimizer
    ways = {
        'optimizer.name = "one_bit_adam"': optimizer.name == "one_bit_adam",
        f"optimizer.outer.every = {optimizer.outer.every}": optimizer.outer.every > 0,
    }
    wanted = [way for way, is_wanted in ways.items() if is_wanted]
    if not wanted or grid.shards_and_replicas(spec.zero.shard_ranks).size("replica") > 1:
        return ""
    return (
        f"{wanted[0]} has no effect: zero.shard_ranks = {toml_repr(spec.zero.shard_ranks)} makes "
        f"the {format_count(grid.size('data'), 'data rank')} one worker, which has nobody to "
        "exchange with; a number that is smaller makes several"
    )


def compression_left_out(spec: Spec, grid: Grid) -> str:
    """Return why nothing is compressed though it is asked for; "" if something is.

    Where no number of ranks would change that, the rules of a spec say so.
    """
    may_be = spec.zero.shard_ranks != "all" or spec.compresses_gathers
    divided = grid.shards_and_replicas(spec.zero.shard_ranks)
    if spec.comm.compress == "none" or not may_be or divided.size("replica") > 1:
        return ""
    if gathers_in_8_bits(spec, grid):
        return ""
    ranks = format_count(grid.size("data"), "data rank")
    return (
        f'comm.compress = "int8" has no effect: {ranks} with one copy of the states, and no '
        "weights are gathered between nodes in half precision"
    )


def nodes(grid: Grid) -> list[dict[str, Any]]:
    """Return each node's ranks, and their boxes in the grid: axis -> first and last coordinate."""
    shape, axes = grid.sizes[::-1], grid.axes[::-1]
    described = []
    first = 0
    for node, ranks in groupby(grid.rank_at_place, key=grid.node_of_rank.__getitem__):
        on_node = list(ranks)
        places = [
            {axis: [span.start, span.stop - 1] for axis, span in zip(axes, box, strict=True)}
            for box in rectangles(shape, first, first + len(on_node))
        ]
        described.append({"node": node, "ranks": on_node, "places": places})
        first += len(on_node)
    return described


def sent(spec: Spec, layers: Sequence[Layer], grid: Grid) -> dict[str, dict[str, Any]]:
    """Return axis -> operation -> bytes in a step, of the busiest rank and of all ranks."""
    totals = Volumes(spec, layers, grid.size("data")).totals(grid)
    return {
        axis: {name: asdict(total) for name, total in operations.items()}
        for axis, operations in totals.items()
    }


def stages_in_lines(stages: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"{number}: {'; '.join(map(_layers, stage['chunks']))} "
        f"({stage['parameters']:,} parameters a rank)"
        for number, stage in enumerate(stages)
    ]
    return _cut_short(lines, "stages")


def nodes_in_lines(nodes: Sequence[dict[str, Any]], sizes: dict[str, int]) -> list[str]:
    axes = [axis for axis in reversed(AXES) if sizes[axis] > 1]
    lines = [
        f"node {node['node']}: {_numbers(sorted(node['ranks']), 'rank')}"
        + "".join(f"  [{_box(box, axes)}]" for box in node["places"] if axes)
        for node in nodes
    ]
    return _cut_short(lines, "nodes")


def exchanged(spec: Spec, grid: Grid) -> dict[str, Any] | None:
    """Return what replicas send in place of gradients' plain sums; None if there is no such."""
    exchange = Exchanged.by(spec)
    divided = grid.shards_and_replicas(spec.zero.shard_ranks)
    if exchange.form is None or divided.size("replica") == 1:
        return None
    return {
        "form": exchange.form.name,
        "every": exchange.every,
        "warm_up": exchange.warm_up,
        "words": exchange.in_words(),
    }


def form_of_gathers(spec: Spec, grid: Grid) -> str:
    """Return the form of weights that are gathered; "" if that is the model's precision."""
    return FORM.name if gathers_in_8_bits(spec, grid) else ""


def exchanged_in_lines(exchanged: dict[str, Any] | None) -> list[str]:
    if exchanged is None:
        return []
    average = ": bytes are those of a step on average" if exchanged["every"] > 1 else ""
    return [f"replicas send each other {exchanged['words']}{average}"]


def sent_in_lines(sent: dict[str, dict[str, Any]]) -> list[str]:
    head = f"{'':<26}{'a rank: inside':>16}{'between':>11}{'all: inside':>16}{'between':>11}"
    rows = [
        f"{axis:<10}{name:<16}"
        + "".join(
            f"{format_bytes(total[who][where]):>{width}}"
            for who in ("rank", "all")
            for where, width in (("inside", 16), ("between", 11))
        )
        for axis, operations in sent.items()
        for name, total in operations.items()
    ]
    return [head, *rows] if rows else []


def _cut_short(lines: list[str], what: str) -> list[str]:
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[: _SHOWN - 2], f"… {len(lines) - _SHOWN + 1:,} more {what}", lines[-1]]


def _box(box: dict[str, list[int]], axes: Sequence[str]) -> str:
    return ", ".join(f"{_CALLED.get(axis, axis)} {format_span(*box[axis])}" for axis in axes)


def _numbers(numbers: Sequence[int], noun: str) -> str:
    """rank 3, ranks 0-7, ranks 0 4 8 12; of many, the first ones and the last."""
    runs = [format_span(run[0], run[-1]) for run in consecutive_runs(numbers)]
    return f"{noun}{'s' if len(numbers) > 1 else ''} {' '.join(shorten(runs, _SHOWN))}"


def _layers(names: Sequence[str]) -> str:
    """embedding, blocks 0-5"""
    words = []
    for kind, same in groupby(names, key=lambda name: name.partition(".")[0]):
        indices = [name.partition(".")[2] for name in same]
        words.append(
            f"{kind} {format_span(int(indices[0]), int(indices[-1]))}"
            if indices[0].isdecimal()
            else kind
        )
    return ", ".join(words)
