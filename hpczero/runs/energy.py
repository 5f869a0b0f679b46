"""The energy of a run, from `<run>/energy.jsonl`: joules of its computers and GPUs.

A line has the sums since its job's start: the last one of each job counts, of lost steps too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpczero.runs import columns
from hpczero.runs.columns import number
from hpczero.text import printable

FILE = "energy.jsonl"
_MOST = 10_000  # jobs
_LARGEST = 1e18
_NOT_THERE = "the run has left no line of it"


@dataclass(frozen=True)
class Energy:
    """Joules while it was measured; None: of no job.

    `missing`: what lacks, and why; "" if nothing does.
    """

    joules: float | None
    processors: float = 0.0
    gpus: float = 0.0
    seconds: float = 0.0
    missing: str = _NOT_THERE

    def a_thousand_tokens(self, tokens: float) -> float | None:
        """Return the joules for a thousand tokens of these that the run was trained on."""
        return 1e3 * self.joules / tokens if self.joules is not None and tokens > 0 else None

    def words(self, tokens: float) -> str:
        if self.joules is None:
            return f"not measured: {self.missing}"
        words = f"{self.joules:,.4g} J ({self.joules / 3.6e6:.3g} kWh)"
        if each := self.a_thousand_tokens(tokens):
            words += f", {each:.3g} J per 1,000 tokens"
        return words + (f"; not measured: {self.missing}" if self.missing else "")

    def as_data(self, tokens: float) -> dict[str, Any]:
        return asdict(self) | {"joules_per_1000_tokens": self.a_thousand_tokens(tokens)}


def read(run: Path) -> Energy:
    """Add up the jobs of a run's directory."""
    last: dict[str, Mapping[str, Any]] = {}
    for line in columns.lines(run / FILE):
        if line is not None and (len(last) < _MOST or str(line.get("began")) in last):
            last[str(line.get("began"))] = line
    jobs = list(last.values())
    read = [job for job in jobs if _figure(job, "counters") > 0]
    missing = "; ".join(dict.fromkeys(filter(None, map(_missing, jobs)))) if jobs else _NOT_THERE
    if not read:
        return Energy(None, missing=missing)
    processors, gpus, seconds = (
        sum(_figure(job, name) for job in read) for name in ("processors", "gpus", "seconds")
    )
    return Energy(processors + gpus, processors, gpus, seconds, missing)


def _missing(job: Mapping[str, Any]) -> str:
    """Return what was not read in a job, and why; "" if all was."""
    words = []
    for name, read, of in (
        ("processors of nodes", "nodes_read", "nodes"),
        ("GPUs", "gpus_read", "gpus_used"),
    ):
        if _figure(job, read) < _figure(job, of):
            words.append(f"{_figure(job, of) - _figure(job, read):,.0f} {name}")
    if not words:
        return ""
    return f"{' and '.join(words)} ({printable(str(job.get('why') or 'unknown'), 300)})"


def _figure(job: Mapping[str, Any], name: str) -> float:
    value = number(job.get(name))
    return value if 0 <= value < _LARGEST else 0.0
