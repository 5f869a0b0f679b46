"""Figures of what ranks held: by kind over the steps, predicted beside measured, by rank (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from hpczero.report.bars import rows_of_amounts
from hpczero.report.charts import Axes, Layer, Series, stacked
from hpczero.report.contents import Figure, Section, Table, Text
from hpczero.report.marks import SERIES
from hpczero.runs.columns import Numbers, number
from hpczero.runs.curves import Curve
from hpczero.runs.record import Run
from hpczero.text import format_bytes, format_count, printable

_RUNTIME = "runtime"  # Python and its libraries
_KINDS = 6  # that have colours of their own; the others are added up
_LINES = 300  # of memory.jsonl that are drawn: the fullest of as many equal parts
_RANKS = 64


@dataclass(frozen=True)
class Account:
    """A measured step of the rank that was fullest then: bytes by kind."""

    step: float
    rank: int
    held: float
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


def section(run: Run) -> Section:
    accounts = list(accounts_of(run))
    figures = [one for one in _figures(run, accounts) if one]
    if figures:
        return Section("What did it hold in memory?", figures)
    return Section("What did it hold in memory?", [Text("No step's memory was measured.")])


def accounts_of(run: Run) -> Iterator[Account]:
    for line in run.memory:
        step, held = number(line.get("step")), number(line.get("held"))
        if not isfinite(step) or not held >= 0:
            continue
        rank = number(line.get("rank"))
        yield Account(
            step,
            int(rank) if isfinite(rank) else -1,
            held,
            _amounts(line.get("predicted")),
            _amounts(line.get("measured")),
        )


def over_steps(
    accounts: Sequence[Account], last: float
) -> tuple[Numbers, dict[str, Numbers], Numbers]:
    """Return steps, bytes by kind, and those predicted in all; an account holds until the next."""
    found = _in_order(accounts)
    kinds = _largest_first([one.measured for one in found])
    steps = np.repeat([one.step for one in found], 2)[1:]
    steps = np.append(steps, max(last, found[-1].step))
    columns = {kind: np.repeat([one.measured.get(kind, 0.0) for one in found], 2) for kind in kinds}
    predicted = np.repeat([sum(one.predicted.values()) for one in found], 2)
    return steps, columns, predicted


def few_kinds(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first kinds, the sum of the others, and what is not the model's."""
    kinds = [kind for kind in columns if kind != _RUNTIME]
    few = {kind: columns[kind] for kind in kinds[:_KINDS]}
    if rest := kinds[_KINDS:]:
        few["other kinds"] = sum(columns[kind] for kind in rest)
    return few | {kind: columns[kind] for kind in columns if kind == _RUNTIME}


def colours_of(kinds: Iterable[str]) -> dict[str, str]:
    colours = {kind: SERIES[at] for at, kind in enumerate(kinds) if kind != _RUNTIME}
    return colours | {_RUNTIME: "grey", "other kinds": "pale"}


def _figures(run: Run, accounts: Sequence[Account]) -> Iterator[Figure | None]:
    if accounts:
        yield _over_time(run, accounts)
        yield _over_time(run, accounts, _RUNTIME)
        yield _by_kind(max(accounts, key=lambda one: one.held))
    yield _by_rank(run)


def _over_time(run: Run, accounts: Sequence[Account], without: str = "") -> Figure | None:
    """Return what the fullest rank held over the steps; `without` a kind."""
    left = [
        replace(
            one,
            measured={kind: size for kind, size in one.measured.items() if kind != without},
            predicted={kind: size for kind, size in one.predicted.items() if kind != without},
        )
        for one in accounts
    ]
    steps, columns, predicted = over_steps(left, float(run.steps))
    few = few_kinds(columns)
    colours = colours_of(few)
    layers = [Layer(kind, values, colours[kind]) for kind, values in few.items()]
    over = []
    if predicted.any():
        line = Curve(steps, predicted, predicted, predicted)
        over = [Series("predicted in all", line, "ink")]
    axes = Axes(
        f"The same without {without}" if without else "Memory of the fullest rank",
        "step",
        "bytes by kind, measured",
        lambda value: format_bytes(int(value)),
        marked=[(float(job.first), f"job {job.number}") for job in run.jobs[1:]],
    )
    drawing = stacked(axes, steps, layers, over) if layers else None
    if drawing is None:
        return None
    if without:
        caption = f"Without {without}: Python and its libraries."
        return Figure(f"memory-without-{without}", drawing, caption)
    fullest = max(accounts, key=lambda one: one.held)
    caption = f"{format_count(len(accounts), 'step')} measured. The most that a rank held: "
    caption += f"{format_bytes(int(fullest.held))}, rank {fullest.rank} at step {fullest.step:,.0f}"
    return Figure("memory", drawing, f"{caption}; predicted: {_in_all(fullest.predicted)}.")


def _by_kind(fullest: Account) -> Figure | None:
    kinds = _largest_first([fullest.measured, fullest.predicted])
    rows = {
        name: {kind: amounts.get(kind, 0.0) for kind in kinds}
        for name, amounts in (("predicted", fullest.predicted), ("measured", fullest.measured))
    }
    title = f"Memory of rank {fullest.rank} at step {fullest.step:,.0f}, by kind"
    few = {name: few_kinds(amounts) for name, amounts in rows.items()}
    colours = colours_of(few["measured"])
    drawing = rows_of_amounts(title, few, lambda value: format_bytes(int(value)), colours)
    if drawing is None:
        return None
    table = Table(
        "Bytes by kind",
        ["kind", "predicted", "measured"],
        [
            [printable(kind, 40), *(f"{amounts[kind]:,.0f}" for amounts in rows.values())]
            for kind in kinds
        ],
        folded=True,
    )
    caption = f"The fullest moment: {_in_all(fullest.measured)} measured, "
    return Figure(
        "memory-kinds",
        drawing,
        f"{caption}{_in_all(fullest.predicted)} predicted.",
        table,
        wide=True,
    )


def _by_rank(run: Run) -> Figure | None:
    """Return what each rank held at most, beside what was predicted, from the summary."""
    memory = run.summary.get("memory")
    ranks = memory.get("ranks") if isinstance(memory, dict) else None
    if not isinstance(ranks, list) or len(ranks) < 2:
        return None
    found = [
        (number(one.get("held")), sum(_amounts(one.get("predicted")).values()))
        for one in ranks
        if isinstance(one, dict)
    ]
    known = [(rank, held, said) for rank, (held, said) in enumerate(found) if held > 0]
    if not known:
        return None
    shown = sorted(sorted(known, key=lambda one: -one[1])[:_RANKS])
    rows = {f"rank {rank}": {"held": held} for rank, held, _ in shown}
    drawing = rows_of_amounts(
        "The most that each rank held", rows, lambda value: format_bytes(int(value))
    )
    if drawing is None:
        return None
    few = f"The fullest {len(shown)} of {len(known)} ranks. " if len(shown) < len(known) else ""
    table = Table(
        "Bytes of each rank",
        ["rank", "predicted", "held at most"],
        [[str(rank), f"{said:,.0f}", f"{held:,.0f}"] for rank, held, said in shown],
        folded=True,
    )
    most = max(known, key=lambda one: one[1])
    caption = f"{few}Rank {most[0]} held the most: {format_bytes(int(most[1]))}."
    return Figure("memory-ranks", drawing, caption, table, wide=True)


def _in_order(accounts: Sequence[Account]) -> list[Account]:
    """Return accounts by step, of a step the last one; of many the fullest of each part."""
    found = list({one.step: one for one in sorted(accounts, key=lambda one: one.step)}.values())
    if len(found) <= _LINES:
        return found
    parts: dict[int, Account] = {}
    for at, one in enumerate(found):
        part = at * _LINES // len(found)
        if part not in parts or one.held > parts[part].held:
            parts[part] = one
    return list(parts.values())


def _largest_first(every: Sequence[Mapping[str, float]]) -> list[str]:
    sums: dict[str, float] = {}
    for amounts in every:
        for kind, amount in amounts.items():
            sums[kind] = sums.get(kind, 0.0) + amount
    return sorted((kind for kind in sums if sums[kind]), key=lambda kind: -sums[kind])


def _amounts(table: object) -> dict[str, float]:
    if not isinstance(table, dict):
        return {}
    numbers = {str(kind): number(amount) for kind, amount in table.items()}
    return {kind: one for kind, one in numbers.items() if 0 <= one < 1e18}


def _in_all(amounts: Mapping[str, float]) -> str:
    return format_bytes(int(sum(amounts.values())))
