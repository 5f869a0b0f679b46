"""Jobs of the batch system that a run had, as their scripts noted them: `<run>/batch/*/links`.

The scripts' clock has whole seconds. A job that was killed has no end there.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from pathlib import Path

from hpczero import safe_files
from hpczero.errors import InputError
from hpczero.runs.columns import seconds_of
from hpczero.runs.record import Run

_LONGEST = 16 << 20  # bytes of a file that are read
_MOST = 10_000  # submissions, and jobs of one
_RECORD = "submission.json"


@dataclass(frozen=True)
class JobScript:
    """One start of a job's script; a job that was requeued has several."""

    job: str  # its number
    submitted: float  # seconds since 1970, as all here; NaN: unknown
    began: float
    ended: float = inf  # inf: that is unknown


def job_scripts(run: Path) -> list[JobScript]:
    """Return those of a run's directory, in the order of their begins."""
    try:
        records = sorted((run / "batch").glob(f"*/{_RECORD}"))[-_MOST:]
    except OSError:
        return []
    found = [one for record in records for one in _of_submission(record)]
    return sorted(found, key=lambda one: one.began)


def _of_submission(record: Path) -> Iterator[JobScript]:
    try:
        values = json.loads(safe_files.read_small(record, _LONGEST))
        links = safe_files.read_small(record.with_name("links"), _LONGEST)
    except (OSError, InputError, ValueError, RecursionError):
        return
    submitted = seconds_of(values.get("submitted")) if isinstance(values, dict) else nan
    open_ones: dict[str, JobScript] = {}
    for line in links.decode("utf-8", "replace").splitlines()[:_MOST]:
        moment, job, event, _ = [*line.split(" ", 3), "", "", ""][:4]
        seconds = seconds_of(moment)
        if isnan(seconds) or event not in ("began", "ended"):
            continue
        before = open_ones.pop(job, None)
        if event == "began":
            if before:
                yield before
            open_ones[job] = JobScript(job, submitted, seconds)
        elif before:
            yield JobScript(job, submitted, before.began, max(before.began, seconds))
    yield from open_ones.values()


def seconds_in_queue(run: Run, scripts: Sequence[JobScript]) -> float | None:
    """Return how long the run waited for its jobs to begin; None if nobody submitted it.

    A job waits from its submission, or from the end of what the run did before it: so neither a
    chain's wait for its own jobs counts, nor any second twice.
    """
    ends = [(job.began, job.ended) for job in run.jobs]
    ends += [(one.began, one.ended) for one in scripts if isfinite(one.ended)]
    known = [one for one in scripts if isfinite(one.submitted)]
    if not known:
        return None
    total = 0.0
    for at, one in enumerate(scripts):
        if isfinite(one.submitted):
            before = [end for began, end in ends if began < one.began]
            before += [other.began for other in scripts[:at]]
            ready = max([one.submitted, *(min(end, one.began) for end in before)])
            total += max(0.0, one.began - ready)
    return total
