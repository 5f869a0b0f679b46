"""Bars whose parts add up, rows of spans in time, and maps of heat (pure)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hpczero.report.charts import scale_between, tick_words
from hpczero.report.contents import Figure, Table
from hpczero.report.marks import (
    LEVELS,
    LINE,
    Cells,
    Drawing,
    Line,
    Mark,
    Rectangle,
    Words,
    colour_of,
    legend,
    level_of,
    lines_of_legend,
)
from hpczero.runs.columns import Numbers
from hpczero.svg import Scale, Span
from hpczero.text import format_number

WIDE = 980
_LEFT, _RIGHT, _TOP, _BELOW = 92, 16, 34, 40
_BAR = 44


def stacked_bar(
    name: str, title: str, parts: Mapping[str, tuple[float, str]], caption: str, unit: str = "s"
) -> Figure | None:
    """Return one bar of `parts` (amount, colour), as booked seconds; None if all are nothing."""
    whole = sum(amount for amount, _ in parts.values())
    if not whole > 0:
        return None
    shown = {part: one for part, one in parts.items() if one[0] > 0}
    room = WIDE - 2 * _RIGHT
    rows = lines_of_legend([_named(part, one[0], whole) for part, one in shown.items()], room)
    marks: list[Mark] = [Words(_RIGHT, 18, title, size=14)]
    x = float(_RIGHT)
    for part, (amount, colour) in shown.items():
        width = room * amount / whole
        tip = f"{part}: {format_number(amount)} {unit}"
        marks.append(Rectangle(x, _TOP, max(0.5, width - 1), _BAR, colour, tip))
        x += width
    names = [(_named(part, amount, whole), colour, "") for part, (amount, colour) in shown.items()]
    marks += legend(names, _RIGHT, _TOP + _BAR + 20, room)
    table = Table(
        "Amounts",
        ["part", unit, "share"],
        [
            [part, f"{amount:.6g}", f"{100 * amount / whole:.1f} %"]
            for part, (amount, _) in parts.items()
        ],
        folded=True,
    )
    listed = ", ".join(f"{part} {100 * one[0] / whole:.1f} %" for part, one in shown.items())
    description = f"One bar of {format_number(whole)} {unit} in parts: {listed}."
    drawing = Drawing(title, WIDE, _TOP + _BAR + 14 + rows * LINE, description, marks)
    return Figure(name, drawing, f"{format_number(whole)} {unit} in all. {caption}", table, True)


def _named(part: str, amount: float, whole: float) -> str:
    return f"{part} {100 * amount / whole:.1f} %"


def rows_of_spans(
    title: str,
    rows: Mapping[str, Sequence[Span]],
    colours: Mapping[str, str],
    axis: str,
    until: float,
) -> Drawing:
    """Return rows of what happened when, from 0 `until` a time; `colours` are of each kind."""
    height = min(26.0, max(6.0, 420 / max(1, len(rows))))
    used = {span.kind for spans in rows.values() for span in spans}
    names = [(kind, colour, "") for kind, colour in colours.items() if kind in used]
    room = WIDE - _LEFT - _RIGHT
    top = _TOP + 4 + lines_of_legend([name for name, *_ in names], room) * LINE
    bottom = top + height * len(rows)
    time = scale_between(0.0, until, _LEFT, WIDE - _RIGHT)
    marks: list[Mark] = [Words(8, 18, title, size=14), *legend(names, _LEFT, _TOP + 6, room)]
    marks.append(Rectangle(_LEFT, top, room, bottom - top, "pale"))
    each = max(1, round(11 / height))
    for number, (name, spans) in enumerate(rows.items()):
        y = top + number * height
        marks += _spans(spans, time, y, height * 0.9, colours)
        if number % each == 0:
            marks.append(Words(_LEFT - 6, y + height / 2 + 4, name, "end", 11, "quiet"))
    for tick in time.ticks(8):
        at = time.place(tick)
        marks.append(Line([(at, bottom), (at, bottom + 4)], "quiet", 1))
        marks.append(Words(at, bottom + 16, tick_words(tick), "middle", 11, "quiet"))
    marks.append(Words(WIDE - _RIGHT, bottom + 32, axis, "end", 11, "quiet"))
    listed = "; ".join(_busy(name, spans, until) for name, spans in list(rows.items())[:16])
    description = f"Rows of spans over {tick_words(until)} ({axis}). {listed}."
    return Drawing(title, WIDE, bottom + _BELOW, description, marks)


def _spans(
    spans: Sequence[Span], time: Scale, y: float, height: float, colours: Mapping[str, str]
) -> list[Mark]:
    """Return a mark for each span; those too narrow to see are cells of one mark by kind."""
    marks: list[Mark] = []
    narrow: dict[str, list[tuple[float, float, float, float]]] = {}
    for span in spans:
        x = time.place(span.begin)
        width = time.place(span.end) - x
        if width < 2 or not span.tip:
            narrow.setdefault(span.kind, []).append((x, y, max(0.15, width), height))
        else:
            marks.append(
                Rectangle(x, y, max(0.5, width - 0.4), height, colours[span.kind], span.tip)
            )
    marks += [Cells(places, colours[kind]) for kind, places in narrow.items()]
    return marks


def _busy(name: str, spans: Sequence[Span], until: float) -> str:
    kinds: dict[str, float] = {}
    for span in spans:
        kinds[span.kind] = kinds.get(span.kind, 0.0) + span.end - span.begin
    said = ", ".join(f"{kind} {100 * one / (until or 1):.0f} %" for kind, one in kinds.items())
    return f"{name}: {said or 'nothing'}"


def heat(
    title: str, rows: Sequence[str], x_values: Numbers, values: Numbers, unit: str, x_name: str
) -> Drawing:
    """Return the map of `values` [rows, columns]; a column reaches halfway to its neighbours."""
    height = min(20.0, max(4.0, 400 / len(rows)))
    known = values[np.isfinite(values)]
    least, most = _ends_of_heat(known)
    room = WIDE - _LEFT - _RIGHT
    top, bottom = _TOP + 22, _TOP + 22 + height * len(rows)
    edges = edges_of(x_values)
    x = scale_between(float(edges[0]), float(edges[-1]), _LEFT, WIDE - _RIGHT)
    marks: list[Mark] = [Words(8, 18, title, size=14), *_scale_of_heat(least, most, unit)]
    marks.append(Rectangle(_LEFT, top, room, bottom - top, "pale"))
    places: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in range(len(rows)):
        for begin, end, level in runs_of(levels_of(values[row], least, most)):
            left, right = x.place(float(edges[begin])), x.place(float(edges[end]))
            y = top + row * height
            places.setdefault(level, []).append((left, y, right - left, height))
    marks += [Cells(cells, level) for level, cells in sorted(places.items())]
    each = max(1, round(12 / height))
    for number, name in enumerate(rows):
        if number % each == 0:
            y = top + (number + 0.5) * height + 4
            marks.append(Words(_LEFT - 6, y, name, "end", 11, "quiet"))
    for tick in x.ticks(8):
        at = x.place(tick)
        marks.append(Line([(at, bottom), (at, bottom + 4)], "quiet", 1))
        marks.append(Words(at, bottom + 16, tick_words(tick), "middle", 11, "quiet"))
    marks.append(Words(WIDE - _RIGHT, bottom + 32, x_name, "end", 11, "quiet"))
    description = f"Heat map: {len(rows)} rows over {len(x_values)} columns ({x_name}), from "
    description += f"{format_number(least)} to {format_number(most)} {unit}. "
    return Drawing(title, WIDE, bottom + _BELOW, description + _extreme(rows, values, unit), marks)


def _ends_of_heat(known: Numbers) -> tuple[float, float]:
    """Return what the darkest and the lightest colour mean: at least a twentieth apart."""
    if not known.size:
        return 0.0, 1.0
    least, most = float(known.min()), float(known.max())
    margin = max(0.0, 0.025 * abs(most) - (most - least) / 2)
    return least - 0.9 * margin, most + 1.1 * margin  # equal ones lie amid a colour, not at its end


def _scale_of_heat(least: float, most: float, unit: str) -> list[Mark]:
    left = WIDE - _RIGHT - 300.0
    marks: list[Mark] = [
        Words(left - 6, _TOP + 10, f"{format_number(least)} {unit}", "end", 11, "quiet")
    ]
    for number in range(len(LEVELS)):
        marks.append(Rectangle(left + number * 20, _TOP, 20, 12, f"level{number}"))
    at = left + len(LEVELS) * 20 + 6
    marks.append(Words(at, _TOP + 10, f"{format_number(most)} {unit}", "start", 11, "quiet"))
    return marks


def edges_of(x_values: Numbers) -> Numbers:
    """Return where columns begin, and where the last one ends."""
    if len(x_values) == 1:
        return np.array([x_values[0] - 0.5, x_values[0] + 0.5])
    middles = (x_values[1:] + x_values[:-1]) / 2
    first = x_values[0] - (middles[0] - x_values[0])
    last = x_values[-1] + (x_values[-1] - middles[-1])
    return np.concatenate([[first], middles, [last]])


def levels_of(values: Numbers, least: float, most: float) -> list[str]:
    """Return the colour of each value; "" where it is not known."""
    width = (most - least) or 1.0
    return [level_of((one - least) / width) if np.isfinite(one) else "" for one in values.tolist()]


def runs_of(levels: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return (begin, end, colour) of neighbours that are alike, without unknown ones."""
    runs: list[tuple[int, int, str]] = []
    for at, level in enumerate(levels):
        if not level:
            continue
        if runs and runs[-1][1] == at and runs[-1][2] == level:
            runs[-1] = runs[-1][0], at + 1, level
        else:
            runs.append((at, at + 1, level))
    return runs


def _extreme(rows: Sequence[str], values: Numbers, unit: str) -> str:
    with np.errstate(invalid="ignore"):
        known = [float(np.nanmean(row)) if np.isfinite(row).any() else -1.0 for row in values]
    most, least = int(np.argmax(known)), int(np.argmin(known))
    return (
        f"The largest mean is that of {rows[most]}, {format_number(known[most])} {unit}; "
        f"the smallest that of {rows[least]}, {format_number(known[least])} {unit}."
    )


def rows_of_amounts(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    words: Callable[[float], str],
    colours: Mapping[str, str] | None = None,
) -> Drawing | None:
    """Return a bar of parts for each row, all to one scale from 0; None if all are nothing."""
    most = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    if not most > 0:
        return None
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind in parts))
    colour_of_kind = colours or {kind: colour_of(at) for at, kind in enumerate(kinds)}
    height = min(26.0, max(8.0, 420 / len(rows)))
    room = WIDE - _LEFT - _RIGHT - 80
    names = [(kind, colour_of_kind[kind], "") for kind in kinds] if len(kinds) > 1 else []
    top = _TOP + (lines_of_legend(kinds, room) * LINE + 4 if names else 0)
    marks: list[Mark] = [Words(8, 18, title, size=14), *legend(names, _LEFT, _TOP + 6, room)]
    each = max(1, round(11 / height))
    for number, (name, parts) in enumerate(rows.items()):
        y = top + number * height
        x = float(_LEFT)
        for kind, amount in parts.items():
            width = room * amount / most
            if width > 0:
                tip = f"{name}, {kind}: {words(amount)}"
                seam = 0.6 if len(kinds) > 1 and width > 2 else 0.0
                marks.append(
                    Rectangle(x, y, width - seam, height * 0.85, colour_of_kind[kind], tip)
                )
            x += width
        if number % each == 0:
            marks.append(Words(_LEFT - 6, y + height / 2 + 3, name, "end", 11, "quiet"))
            whole = words(sum(parts.values()))
            marks.append(Words(x + 6, y + height / 2 + 3, whole, "start", 11, "quiet"))
    listed = "; ".join(
        f"{name}: {words(sum(parts.values()))}" for name, parts in list(rows.items())[:16]
    )
    description = f"Bars of {len(rows)} rows in parts. {listed}."
    return Drawing(title, WIDE, top + height * len(rows) + 14, description, marks)
