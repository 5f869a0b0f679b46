"""Published figures beside their predictions, and the tables of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A published number and the predicted one, in the same unit.

    `published` is None where nothing is; `most`: the other end, where a range is. The error is that
    against the nearer end. `notes`: what further columns say.
    """

    name: str
    published: float | None
    predicted: float
    notes: tuple[str, ...] = ()
    digits: int = 2
    most: float | None = None

    @property
    def error(self) -> float | None:
        if self.published is None:
            return None
        nearest = self.published
        if self.most is not None:
            nearest = min(max(self.predicted, self.published), self.most)
        return self.predicted / nearest - 1

    @property
    def line(self) -> str:
        ends = [end for end in (self.published, self.most) if end is not None]
        published = " to ".join(map(self._number, ends))
        error = "" if self.error is None else f"{self.error:+.1%}"
        return row(self.name, published, self._number(self.predicted), error, *self.notes)

    def _number(self, value: float) -> str:
        return f"{value:,.{self.digits}f}"


def table(name: str, unit: str, figures: Iterable[Figure], *notes: str) -> Iterator[str]:
    """Yield the lines of a table, of figures in one unit; `notes` are heads of further columns."""
    between = f" {unit}" if unit else ""
    yield from head(name, f"published{between}", "predicted", "error", *notes)
    for figure in figures:
        yield figure.line


def head(*cells: str) -> Iterator[str]:
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def row(*cells: str) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
