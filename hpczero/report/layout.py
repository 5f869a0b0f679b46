"""Figures of where ranks were, what groups they formed, and what each axis carried (pure)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpczero.comm.grid import Grid
from hpczero.report.bars import WIDE, rows_of_amounts
from hpczero.report.contents import Figure, Section, Table, Text
from hpczero.report.marks import SERIES, Cells, Drawing, Mark, Rectangle, Words, level_of
from hpczero.runs.columns import number
from hpczero.text import format_bytes, format_count, format_number, printable

TITLE = "Where were its ranks, and what did they send?"
_MOST_RANKS = 8192
_GAP = 10.0
_NAMED = 17.0  # pixels of a rank's side that a number fits in


def section(grid: Grid | None, hosts: Sequence[str], summary: Mapping[str, Any]) -> Section:
    """`hosts`: of each rank."""
    found: list[Figure | Table | Text] = []
    if grid and len(grid.node_of_rank) <= _MOST_RANKS:
        found.append(layout_map(grid, hosts))
    elif grid:
        found.append(Text(f"A map of {len(grid.node_of_rank):,} ranks would be too large."))
    else:
        found.append(Text("The layout of the ranks is not known."))
    sent = totals(summary.get("comm"))
    found += [one for one in (_sent(sent), _operations(sent)) if one]
    return Section(TITLE, found)


def layout_map(grid: Grid, hosts: Sequence[str]) -> Figure:
    """Return a map for each axis of several ranks: a box for a node, a cell for a rank."""
    axes = [axis for axis in grid.axes if grid.size(axis) > 1] or [grid.axes[0]]
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(grid.node_of_rank):
        nodes.setdefault(node, []).append(rank)
    marks: list[Mark] = [Words(8, 18, "Ranks on nodes, axes in colour", size=14)]
    y = 44.0
    for axis in axes:
        size = grid.size(axis)
        words = f"{axis}: {size} in a group; a colour is a place along the axis, from 0 on"
        marks.append(Words(8, y, words, size=12))
        more, y = _of_axis(grid, axis, nodes, y + 10)
        marks += more
        y += 24
    count, several = len(grid.node_of_rank), len(nodes)
    sizes = ", ".join(f"{axis} {grid.size(axis)}" for axis in grid.axes)
    words = f"{format_count(count, 'rank')} on {format_count(several, 'node')}: {sizes}"
    drawing = Drawing(
        "Ranks on nodes, axes in colour",
        WIDE,
        y,
        f"A map for each axis: a box is a node, a cell a rank. {words}.",
        marks,
    )
    rows = [
        [
            str(rank),
            printable(hosts[rank], 60) if rank < len(hosts) else "?",
            str(grid.node_of_rank[rank]),
            *(str(grid.coordinate(rank, axis)) for axis in grid.axes),
        ]
        for rank in range(min(count, 256))
    ]
    caption = "Places of ranks" if len(rows) == count else f"Places of the first {len(rows)} ranks"
    table = Table(caption, ["rank", "host", "node", *grid.axes], rows, folded=True)
    return Figure("layout", drawing, f"{words}. Innermost first: {grid.axes[0]}.", table, True)


def _of_axis(
    grid: Grid, axis: str, nodes: Mapping[int, Sequence[int]], y: float
) -> tuple[list[Mark], float]:
    """Return the marks of an axis from y on, and where they end."""
    count = len(grid.node_of_rank)
    side = min(30.0, max(5.0, 1600.0 / count**0.8))
    most = max(len(ranks) for ranks in nodes.values())
    across = min(most, max(1, int((WIDE - 40) / side)), 8 if len(nodes) > 1 else 32)
    marks: list[Mark] = []
    places: dict[str, list[tuple[float, float, float, float]]] = {}
    x, height = 8.0, 0.0
    for node, ranks in nodes.items():
        rows = -(-len(ranks) // across)
        width = min(across, len(ranks)) * side
        if x > 8 and x + width > WIDE - 8:
            x, y = 8.0, y + height + _GAP
        height = rows * side + 4 + (14 if side >= _NAMED else 0)
        marks.append(Rectangle(x, y, width + 4, height, "pale", f"node {node}"))
        for at, rank in enumerate(ranks):
            left, top = x + 2 + at % across * side, y + 2 + at // across * side
            colour = _colour(grid.coordinate(rank, axis), grid.size(axis))
            places.setdefault(colour, []).append((left + 0.5, top + 0.5, side - 1, side - 1))
        if side >= _NAMED:
            marks.append(Words(x + 3, y + height - 4, f"node {node}", size=10, fill="ink"))
        x += width + 4 + _GAP
    marks += [Cells(cells, colour) for colour, cells in places.items()]
    if side >= _NAMED:
        marks += _numbers(grid, axis, nodes, marks)
    return marks, y + height


def _numbers(
    grid: Grid, axis: str, nodes: Mapping[int, Sequence[int]], marks: Sequence[Mark]
) -> Iterator[Words]:
    """Yield each rank's number in its cell, in the order in which the cells were made."""
    colours: dict[str, Iterator[tuple[float, float, float, float]]] = {
        mark.fill: iter(mark.places) for mark in marks if isinstance(mark, Cells)
    }
    for ranks in nodes.values():
        for rank in ranks:
            colour = _colour(grid.coordinate(rank, axis), grid.size(axis))
            x, y, width, height = next(colours[colour])
            ink = "page" if colour in SERIES or colour < "level5" else "level0"
            yield Words(x + width / 2, y + height / 2 + 4, str(rank), "middle", 11, ink)


def _colour(at: int, of: int) -> str:
    return SERIES[at] if of <= len(SERIES) else level_of(at / (of - 1))


def totals(comm: object) -> dict[str, dict[str, dict[str, float]]]:
    """Return axis -> operation -> sums over ranks, of the summary's list of them."""
    sums: dict[str, dict[str, dict[str, float]]] = {}
    for rank in comm if isinstance(comm, list) else []:
        for axis, operations in rank.items() if isinstance(rank, dict) else ():
            for name, entry in operations.items() if isinstance(operations, dict) else ():
                if not isinstance(entry, dict):
                    continue
                of_name = sums.setdefault(str(axis), {}).setdefault(str(name), {})
                for key in ("count", "bytes", "inside", "between", "shared", "seconds"):
                    amount = number(entry.get(key))
                    of_name[key] = of_name.get(key, 0.0) + (amount if 0 <= amount < 1e18 else 0.0)
    return sums


def _sent(sums: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure | None:
    rows = {
        printable(axis, 14): {
            "to ranks of the same node": sum(one["inside"] for one in of_axis.values()),
            "to other nodes": sum(one["between"] for one in of_axis.values()),
            "read in shared memory": sum(one["shared"] for one in of_axis.values()),
        }
        for axis, of_axis in sums.items()
    }
    drawing = rows_of_amounts(
        "Bytes by axis, of all ranks", rows, lambda value: format_bytes(int(value))
    )
    if drawing is None:
        return None
    whole = sum(sum(parts.values()) for parts in rows.values())
    caption = f"{format_bytes(int(whole))} in the last job."
    return Figure("bytes-by-axis", drawing, caption, wide=True)


def _operations(sums: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table | None:
    rows = [
        [
            axis,
            name,
            f"{entry['count']:,.0f}",
            format_bytes(int(entry["inside"])),
            format_bytes(int(entry["between"])),
            format_bytes(int(entry["shared"])),
            format_number(entry["seconds"]),
        ]
        for axis, of_axis in sums.items()
        for name, entry in of_axis.items()
    ]
    if not rows:
        return None
    head = ["axis", "operation", "times", "inside nodes", "between nodes", "shared", "waited (s)"]
    return Table("Operations, summed over ranks", head, rows, folded=True)
