"""The report of bench_step.py: a table for docs/benchmarks.md and bars as SVG (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median, quantiles
from typing import Any

HEADINGS = (
    "contender",
    "ms a step (quartiles)",
    "/ floor (range)",
    "FSDP2 / it",
    "CPU ms a rank",
    "states GB",
    "peak GB",
    "loss",
)
TOLERANCE = 0.02  # of the loss: what roundings to bf16 at different places may do in a few steps


@dataclass(frozen=True)
class Row:
    """A contender over all rounds: seconds of all steps, and ratios of the rounds' medians."""

    name: str
    seconds: list[float]
    to_floor: list[float]
    fsdp_to_it: list[float]
    cpu_seconds: float
    states_bytes: int
    peak_bytes: int
    losses: list[float]


def rows(figures: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """`figures`: contender -> figures of each round."""
    medians = {name: [median(one["seconds"]) for one in rounds] for name, rounds in figures.items()}
    fsdp = medians.get("fsdp2", [])
    return [
        Row(
            name,
            seconds=[second for one in rounds for second in one["seconds"]],
            to_floor=_ratios(medians[name], medians["floor"]),
            fsdp_to_it=_ratios(fsdp, medians[name]) if fsdp else [],
            cpu_seconds=median(second for one in rounds for second in one["cpu_seconds"]),
            states_bytes=min(one["states_bytes"] for one in rounds),
            peak_bytes=min(one["peak_bytes"] for one in rounds),
            losses=rounds[0]["losses"],
        )
        for name, rounds in figures.items()
    ]


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def table(found: Sequence[Row]) -> str:
    lines = [HEADINGS, ("---", *["---:"] * (len(HEADINGS) - 1))]
    for row in found:
        lower, _, upper = quantiles(row.seconds, n=4) if len(row.seconds) > 1 else row.seconds * 3
        cells = (
            row.name,
            f"{1e3 * median(row.seconds):.0f} ({1e3 * lower:.0f}–{1e3 * upper:.0f})",
            f"{median(row.to_floor):.2f} ({min(row.to_floor):.2f}–{max(row.to_floor):.2f})",
            f"{median(row.fsdp_to_it):.2f}" if row.fsdp_to_it else "",
            f"{1e3 * row.cpu_seconds:.0f}",
            f"{row.states_bytes / 1e9:.2f}",
            f"{row.peak_bytes / 1e9:.2f}",
            f"{row.losses[0]:.3f} → {row.losses[-1]:.3f}" if row.losses else "",
        )
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def differing(found: Sequence[Row]) -> list[str]:
    """Who has not trained like the first contender that trains, in words."""
    trained = [row for row in found if not row.name.startswith("floor") and row.losses]
    wrong = []
    for row in trained[1:]:
        reference = trained[0]
        pairs = zip(row.losses, reference.losses, strict=True)
        if not all(
            abs(mine - theirs) <= TOLERANCE * abs(theirs) for mine, theirs in pairs
        ):  # so a NaN is found too
            wrong.append(
                f"{row.name} does not train like {reference.name}: losses "
                f"{_list(row.losses)} against {_list(reference.losses)}"
            )
    return wrong


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars, one for each name, as SVG."""
    label, longest, step, top = 150, 560, 26, 44
    scale = longest / max(value for _, value in values)
    height = top + step * len(values) + 12
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{label + longest + 70}" '
            f'height="{height}" font-family="sans-serif" font-size="13">'
        ),
        (
            f'<rect width="100%" height="100%" fill="white"/><text x="12" y="24" '
            f'font-size="15">{escape(title)}</text>'
        ),
    ]
    for place, (name, value) in enumerate(values):
        y = top + step * place
        colour = (
            "#888888"
            if name.startswith("floor")
            else "#1f6fb4"
            if name.startswith("ours")
            else "#d9822b"
        )
        parts.append(f'<text x="{label - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{label}" y="{y}" width="{value * scale:.1f}" height="{step - 8}" '
            f'fill="{colour}"/>'
        )
        parts.append(f'<text x="{label + value * scale + 6:.1f}" y="{y + 14}">{value:.2f}</text>')
    return "\n".join([*parts, "</svg>", ""])
