"""The loss curve of a run as letters: dots of Braille, or stars where there are none (pure)."""

from collections.abc import Iterator, Sequence

import numpy as np

from hpczero.report.charts import series
from hpczero.runs.curves import Curve
from hpczero.runs.record import Run
from hpczero.text import format_loss

COLUMNS, ROWS = 72, 16
_BRAILLE = 0x2800
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a letter
_MARGIN = 10  # letters of the axis


def loss(run: Run, encoding: str) -> Iterator[str]:
    """Yield the lines of the training loss, and a line of what it ends at."""
    fine = has_braille(encoding)
    across = 2 * COLUMNS if fine else COLUMNS
    whole = series("training", run.metrics["step"], run.metrics["loss"], across, "blue")
    shown = whole.curve
    if not whole.ends:
        return
    low, high = float(shown.low.min()), float(shown.high.max())
    yield f"{run.name}: loss (nats per token) over steps"
    rows = drawn(shown, COLUMNS, ROWS, fine)
    for number, row in enumerate(rows):
        value = {0: high, len(rows) - 1: low}.get(number)
        name = format_loss(value) if value is not None else ""
        yield f"{name:>{_MARGIN}} {'│' if fine else '|'}{row}".rstrip()
    (begin, at_first), (end, at_last) = whole.ends
    first, last = f"{begin:,.0f}", f"{end:,.0f}"
    yield " " * (_MARGIN + 2) + first + last.rjust(COLUMNS - len(first))
    words = f"{format_loss(at_first)} at first, {format_loss(at_last)} at the end, "
    words += f"lowest {format_loss(low)}"
    validation = series("", run.metrics["step"], run.metrics["validation_loss"], across, "blue")
    if validation.ends:
        words += f"; validation {format_loss(validation.last)}"
    yield words


def drawn(shown: Curve, columns: int, rows: int, fine: bool) -> list[str]:
    """Return lines of letters, each of 2 x 4 dots if it is `fine`."""
    if fine:
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
