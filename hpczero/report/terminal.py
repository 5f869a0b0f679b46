"""A curve over steps as letters: dots of Braille, or stars where there are none (pure)."""

from collections.abc import Iterator, Sequence

import numpy as np

from hpczero.report.charts import series
from hpczero.runs.curves import Curve
from hpczero.runs.record import Run
from hpczero.text import format_loss

WIDTH, ROWS = 84, 16
_MARGIN = 12  # letters of the axis
_BRAILLE = 0x2800
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a letter


def loss(run: Run, encoding: str) -> Iterator[str]:
    """Yield the lines of the training loss, and a line of what it ends at."""
    across = points(WIDTH, encoding)
    whole = series("training", run.metrics["step"], run.metrics["loss"], across, "blue")
    shown = whole.curve
    if not whole.ends:
        return
    low = float(shown.low.min())
    yield f"{run.name}: loss (nats per token) over steps"
    (begin, at_first), (end, at_last) = whole.ends
    yield from chart(shown, (begin, end), WIDTH, ROWS, encoding)
    words = f"{format_loss(at_first)} at first, {format_loss(at_last)} at the end, "
    words += f"lowest {format_loss(low)}"
    validation = series("", run.metrics["step"], run.metrics["validation_loss"], across, "blue")
    if validation.ends:
        words += f"; validation {format_loss(validation.last)}"
    yield words


def points(width: int, encoding: str) -> int:
    """Return the points of a curve that `chart` can tell apart in so many letters."""
    return (width - _MARGIN) * (2 if has_braille(encoding) else 1)


def chart(
    shown: Curve, ends: tuple[float, float], width: int, rows: int, encoding: str
) -> Iterator[str]:
    """Yield a curve of losses with its axes; `ends`: the first and the last step."""
    braille = has_braille(encoding)
    across = points(width, encoding)
    low, high = float(shown.low.min()), float(shown.high.max())
    names = {0: format_loss(high), rows - 1: format_loss(low)}
    height = (high / 2 - low / 2) or 1.0  # halves: a difference may be too large a number
    levels = [(of / 2 - low / 2) / height for of in (shown.low, shown.mean, shown.high)]
    x = shown.x
    if len(x) < across:  # so that points that lie apart are joined
        x = np.union1d(np.linspace(x[0], x[-1], across), x)
        levels = [np.interp(x, shown.x, of) for of in levels]
    shown = Curve(x, *levels)
    for number, row in enumerate(rows_of(shown, width - _MARGIN, rows, braille)):
        yield f"{names.get(number, ''):>{_MARGIN - 2}} {'│' if braille else '|'}{row}".rstrip()
    first, last = (f"{step:,.0f}" for step in ends)
    yield f"{'step':>{_MARGIN - 2}}  {first}{last.rjust(width - _MARGIN - len(first))}"


def rows_of(shown: Curve, columns: int, rows: int, braille: bool) -> list[str]:
    """Return lines of letters, each of 2 x 4 dots if they are Braille."""
    if braille:
        return _in_braille(canvas(shown, 2 * columns, 4 * rows))
    return ["".join(" *"[dot] for dot in row) for row in canvas(shown, columns, rows)]


def canvas(shown: Curve, across: int, down: int) -> list[list[bool]]:
    """Return dots [row][column], from above: each point from its lowest to its highest value."""
    low, high = float(shown.low.min()), float(shown.high.max())
    begin, end = float(shown.x[0]), float(shown.x[-1])
    dots = [[False] * across for _ in range(down)]

    def row(value: float) -> int:
        return round((high - value) / ((high - low) or 1.0) * (down - 1))

    columns = np.round((shown.x - begin) / ((end - begin) or 1.0) * (across - 1)).astype(int)
    before: int | None = None
    for column, lowest, mean, highest in zip(
        columns.tolist(), shown.low, shown.mean, shown.high, strict=True
    ):
        middle = row(float(mean))
        reached = [row(float(highest)), row(float(lowest)), middle]
        if before is not None:  # joined with the point before
            reached.append(before + (middle > before) - (middle < before))
        for one in range(min(reached), max(reached) + 1):
            dots[one][column] = True
        before = middle
    return dots


def _in_braille(dots: Sequence[Sequence[bool]]) -> list[str]:
    rows = []
    for top in range(0, len(dots), 4):
        letters = []
        for left in range(0, len(dots[0]), 2):
            bits = sum(
                bit
                for down, pair in enumerate(_BITS)
                for across, bit in enumerate(pair)
                if dots[top + down][left + across]
            )
            letters.append(chr(_BRAILLE + bits) if bits else " ")
        rows.append("".join(letters))
    return rows


def has_braille(encoding: str) -> bool:
    try:
        chr(_BRAILLE).encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True
