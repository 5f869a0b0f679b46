"""The energy of a run, from `<run>/energy.jsonl`: joules of its computers and GPUs.

A line has the sums since its job's start: the last one of each job counts, of lost steps too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpczero.runs import columns
from hpczero.runs.columns import number
from hpczero.text import format_count, format_energy, printable

FILE = "energy.jsonl"
KINDS = "processors", "gpus"
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
    tokens: float = 0.0  # that the run was trained on

    @property
    def a_thousand_tokens(self) -> float | None:
        """Return the joules of a thousand tokens."""
        return 1e3 * self.joules / self.tokens if self.joules is not None and self.tokens else None

    @property
    def words(self) -> str:
        if self.joules is None:
            return f"not measured: {self.missing}"
        words = format_energy(self.joules)
        if each := self.a_thousand_tokens:
            words += f", {each:.3g} J per 1,000 tokens"
        return words + (f"; not measured: {self.missing}" if self.missing else "")

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"joules_per_1000_tokens": self.a_thousand_tokens}


def read(run: Path, tokens: float = 0.0) -> Energy:
    """Add up the jobs of a run's directory, which was trained on so many tokens."""
    last: dict[str, Mapping[str, Any]] = {}
    for line in columns.lines(run / FILE):
        if line is not None and (len(last) < _MOST or str(line.get("began")) in last):
            last[str(line.get("began"))] = line
    jobs = list(last.values())
    read = [job for job in jobs if _figure(job, "nodes_read") + _figure(job, "gpus_read") > 0]
    missing = "; ".join(dict.fromkeys(filter(None, map(_missing, jobs)))) if jobs else _NOT_THERE
    if not read:
        return Energy(None, missing=missing, tokens=tokens)
    processors, gpus, seconds = (
        sum(_figure(job, name) for job in read) for name in (*KINDS, "seconds")
    )
    return Energy(processors + gpus, processors, gpus, seconds, missing, tokens)


def _missing(job: Mapping[str, Any]) -> str:
    """Return what was not read in a job, and why; "" if all was."""
    nodes, gpus = (
        round(_figure(job, of) - _figure(job, read))
        for read, of in (("nodes_read", "nodes"), ("gpus_read", "gpus_used"))
    )
    words = [f"the processors of {format_count(nodes, 'node')}"] if nodes > 0 else []
    words += [format_count(gpus, "GPU")] if gpus > 0 else []
    if not words:
        return ""
    return f"{' and '.join(words)} ({printable(str(job.get('why') or 'unknown'), 300)})"


def _figure(job: Mapping[str, Any], name: str) -> float:
    value = number(job.get(name))
    return value if 0 <= value < _LARGEST else 0.0
