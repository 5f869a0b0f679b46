"""Who holds what, on which node, and what is sent: for people, and as data (pure)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from hpczero.comm.grid import Grid
from hpczero.model.shapes import Layer
from hpczero.parallel.held import Units, chunks_of_stages, layers_that_run
from hpczero.parallel.layout import rectangles
from hpczero.parallel.states import shares_nodes
from hpczero.planner.volumes import Volumes
from hpczero.spec.schema import Spec, Zero
from hpczero.text import in_bytes, shown

_SHOWN = 8  # lines of a list before it is cut short
_CALLED = {"pipeline": "stage", "data": "data", "tensor": "tensor"}  # a coordinate along each axis


def stages(spec: Spec, layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Of each pipeline stage the layers of its chunks, and the parameters of its tensor rank 0, which has the most."""
    units = Units(1, spec.parallel.tensor)
    return [
        {
            "chunks": [[layer.name for layer in layers_that_run([chunk])] for chunk in chunks],
            "parameters": sum(
                place.stop - place.offset for unit in units.of([layer for chunk in chunks for layer in chunk]) for place in unit.places
            ),
        }
        for chunks in chunks_of_stages(spec, layers)
    ]


def sharing_left_out(zero: Zero, grid: Grid) -> str:
    """Why the ranks of a node keep no states together where they otherwise would; "" where they do, or have none to keep."""
    per_node = (Counter(grid.node_of_rank[rank] for rank in group).values() for group in grid.groups("data"))
    if grid.nodes_cut_data_alike or not any(shares_nodes(zero, counts) for counts in per_node):
        return ""
    what = f"zero.node_shared = {shown(zero.node_shared)} shares nothing: nodes divide the data ranks of the tensor ranks differently"
    return f"{what}, which would then round differently; a number of ranks per node that parallel.tensor divides makes it possible"


def nodes(grid: Grid) -> list[dict[str, Any]]:
    """Of each node its ranks, and the parts of the grid that they are: axis -> first and last coordinate."""
    shape, axes, found, first = grid.sizes[::-1], grid.axes[::-1], [], 0
    for node, ranks in groupby(grid.rank_at_place, key=grid.node_of_rank.__getitem__):
        on_node = list(ranks)
        parts = rectangles(shape, first, first + len(on_node))
        places = [{axis: [part.start, part.stop - 1] for axis, part in zip(axes, rectangle, strict=True)} for rectangle in parts]
        found.append({"node": node, "ranks": on_node, "places": places})
        first += len(on_node)
    return found


def sent(spec: Spec, layers: Sequence[Layer], grid: Grid) -> dict[str, dict[str, Any]]:
    """axis -> operation -> bytes in a step, inside nodes and between them: by the rank that sends the most, and by all."""
    totals = Volumes(spec, layers, grid.size("data")).totals(grid)
    return {axis: {name: asdict(total) for name, total in operations.items()} for axis, operations in totals.items()}


def stages_in_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    held = ["; ".join(map(_layers, stage["chunks"])) for stage in found]
    lines = [f"{number}: {words} ({stage['parameters']:,} parameters a rank)" for number, (words, stage) in enumerate(zip(held, found, strict=True))]
    return _cut_short(lines, "stages")


def nodes_in_lines(found: Sequence[dict[str, Any]], sizes: dict[str, int]) -> list[str]:
    axes = [axis for axis in _CALLED if sizes[axis] > 1]
    lines = [
        f"node {node['node']}: {_numbers(sorted(node['ranks']), 'rank')}" + "".join(f"  [{_place(place, axes)}]" for place in node["places"] if axes)
        for node in found
    ]
    return _cut_short(lines, "nodes")


def sent_in_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    head = f"{'':<26}{'a rank: inside':>16}{'between':>11}{'all: inside':>16}{'between':>11}"
    rows = [
        f"{axis:<10}{name:<16}"
        + "".join(f"{in_bytes(total[who][where]):>{width}}" for who in ("rank", "all") for where, width in (("inside", 16), ("between", 11)))
        for axis, operations in found.items()
        for name, total in operations.items()
    ]
    return [head, *rows] if rows else []


def _cut_short(lines: list[str], what: str) -> list[str]:
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[: _SHOWN - 2], f"… {len(lines) - _SHOWN + 1:,} more {what}", lines[-1]]


def _place(place: dict[str, list[int]], axes: Sequence[str]) -> str:
    return ", ".join(f"{_CALLED[axis]} {_span(*place[axis])}" for axis in axes)


def _numbers(numbers: Sequence[int], noun: str) -> str:
    """rank 3, ranks 0-7, ranks 0 4 8 12, or of many the first and the last."""
    runs = [_span(run[0], run[-1]) for run in _runs(numbers)]
    if len(runs) > _SHOWN:
        runs = [*runs[: _SHOWN - 2], "…", runs[-1]]
    return f"{noun}{'s' if len(numbers) > 1 else ''} {' '.join(runs)}"


def _layers(names: Sequence[str]) -> str:
    """embedding, blocks 0-5"""
    words = []
    for kind, same in groupby(names, key=lambda name: name.partition(".")[0]):
        indices = [name.partition(".")[2] for name in same]
        words.append(f"{kind} {_span(int(indices[0]), int(indices[-1]))}" if indices[0].isdecimal() else kind)
    return ", ".join(words)


def _runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        yield [number for _, number in run]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
