"""The tables of docs/foresight.md: published, predicted, error."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import mean, median

from tests.support.published_steps import Measured, korthikanti, mosaic, zero


def tables() -> Iterator[str]:
    """Yield the lines of all tables, in the order of the page."""
    yield from _by_row(korthikanti())
    yield ""
    yield from _by_row(zero())
    yield ""
    yield from _by_group(mosaic())


def _by_row(rows: Iterable[Measured]) -> Iterator[str]:
    yield "| step | published s | predicted s | error | largest causes |"
    yield "|---|---|---|---|---|"
    errors = []
    for row in rows:
        step = row.predicted()
        error = step.seconds / row.seconds - 1
        errors.append(abs(error))
        causes = ", ".join(f"{cause} {share:.0%}" for cause, share, _ in step.largest())
        yield (f"| {row.name} | {row.seconds:.2f} | {step.seconds:.2f} | {error:+.1%} | {causes} |")
    yield f"| mean of {len(errors)} | | | {mean(errors):.1%} | |"


def _by_group(rows: Iterable[Measured]) -> Iterator[str]:
    yield "| model | rows | error, mean | of its size, median | worst |"
    yield "|---|---|---|---|---|"
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        error = row.predicted().seconds / row.seconds - 1
        groups[row.group].append(error)
        groups["all"].append(error)
    whole = groups.pop("all")
    for name, errors in [*groups.items(), ("all", whole)]:
        off = [abs(error) for error in errors]
        yield (
            f"| {name} | {len(off)} | {mean(errors):+.1%} | {median(off):.1%} | {max(off):.1%} |"
        )
