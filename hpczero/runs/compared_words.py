"""A comparison in words and in the cells of tables (pure)."""

from collections.abc import Iterator
from math import isfinite

from hpczero.runs.compared import VALIDATION, Compared
from hpczero.runs.groups import Group, in_words
from hpczero.text import format_bytes, format_duration, format_loss, format_number, printable

_NAME = 32  # characters of a name in a table
_VALUE = 24
# Where the interval of a margin comes from (hpczero/runs/margins.py).
_NOISE = {
    "paired seeds": "from the differences seed by seed",
    "seeds": "from the spread of the seeds (Welch)",
    "seeds of one": "if the seeds of both are spread as those of the one that has several",
    "evaluations": "from the standard errors of the two evaluations",
}


Rows = list[list[str]]


def differing(compared: Compared) -> tuple[list[str], Rows]:
    """Return the head and a row for each group: its seeds and settings, as far as they differ."""
    head = ["run", *(["seed"] if _shows_seeds(compared) else [])]
    rows = [[name_of(group), group.seeds_in_words or "?"][: len(head)] for group in compared.groups]
    for difference in compared.differences:
        head.append(difference.key)
        for row, values in zip(rows, difference.values, strict=True):
            row.append(printable(in_words(values), _VALUE))
    return head, rows


def _shows_seeds(compared: Compared) -> bool:
    return len({group.seeds for group in compared.groups}) > 1 or any(
        group.spread for group in compared.groups
    )


def last_figures(compared: Compared) -> tuple[list[str], Rows]:
    """Return the head and a row for each group."""
    head = ["run", "state", "validation", "range", "best", "training", "step", "tokens"]
    head += ["tokens/s", "time", "ranks", "memory"]
    return head, [_figures_of(compared, group) for group in compared.groups]


def _figures_of(compared: Compared, group: Group) -> list[str]:
    """Return the cells of a group's last figures; of sizes the largest."""
    of_runs = [compared.figures[at] for at in group.members]
    validation = compared.spread(group, "validation_loss")
    error = validation.deviation if group.spread else of_runs[0].standard_error
    best = compared.spread(group, "best_validation_loss")
    at = {one.best_validation_step for one in of_runs}
    where = f" @{at.pop():,.0f}" if len(at) == 1 and isfinite(best.mean) else ""
    most = {
        name: max((value for one in of_runs if isfinite(value := getattr(one, name))), default=None)
        for name in ("step", "tokens", "seconds", "ranks", "held")
    }
    held, seconds = most["held"], most["seconds"]
    step = most["step"]
    return [
        name_of(group),
        ", ".join(dict.fromkeys(compared.states[at] for at in group.members)),
        _loss(validation.mean) + (f" ± {error:.4f}" if isfinite(error) else ""),
        f"{_loss(validation.low)}–{_loss(validation.high)}" if group.spread else "",
        _loss(best.mean) + where,
        _loss(compared.spread(group, "training_loss").mean),
        "?" if step is None else f"{step:,.0f}",
        format_number(most["tokens"]),
        format_number(_or_none(compared.spread(group, "tokens_per_second").mean)),
        "?" if seconds is None else format_duration(seconds),
        "?" if most["ranks"] is None else f"{most['ranks']:,.0f}",
        "?" if held is None or not 0 <= held < 1e18 else format_bytes(int(held)),
    ]


def best_in_words(compared: Compared) -> Iterator[str]:
    """Yield sentences: the best group, its margin over the next, and whether that is noise."""
    best = compared.best
    if best is None:
        yield "best: cannot be told; at least two must have comparable losses"
        return
    group, other = compared.groups[best.group], compared.groups[best.next]
    margin = best.margin
    yield f"best: {name_of(group)}, by {_loss(margin.margin)} of {best.by} over {name_of(other)}:"
    verdict = {
        True: "more than the noise",
        False: "not shown to be more than the noise",
        None: "whether that is more than the noise cannot be told",
    }[margin.is_more_than_noise]
    if margin.is_more_than_noise is None:
        lacking = (
            "the evaluations have no standard errors"
            if best.by == VALIDATION
            else "they are of one step"
        )
        yield f"{verdict}: {lacking}."
    else:
        low, high = margin.margin - margin.half, margin.margin + margin.half
        interval = f"its 95 % interval is {low:.4f} to {high:.4f}"
        yield f"{verdict}: {interval}, {_NOISE[margin.source]}."
    if margin.source == "evaluations":
        yield from _of_one_seed(best.same_windows)


def _of_one_seed(same_windows: bool) -> Iterator[str]:
    if same_windows:
        yield "Both read the same windows of the text: the interval is too wide."
    yield "What other seeds would change cannot be told: run both with the same two or more."


def name_of(group: Group) -> str:
    return printable(group.name, _NAME)


def _or_none(figure: float) -> float | None:
    return figure if isfinite(figure) else None


def _loss(loss: float) -> str:
    return format_loss(_or_none(loss))
