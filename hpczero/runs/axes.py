"""The losses of a run over steps, tokens and time, the axes on which runs are compared (pure).

Steps that a restart computed again count once, with their last line. A step whose line is missing
counts with the tokens and seconds of the next line that is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

from hpczero.runs.columns import TIME, Columns, Numbers
from hpczero.runs.record import Run

# seconds: those of the steps alone; clock: of the jobs from their starts on, so with evaluations,
# saves, and steps that were lost
AXES = ("steps", "tokens", "seconds", "clock")
_EXACT = 1e-9  # sums of the same numbers in another order differ less


@dataclass(frozen=True)
class Course:
    """A run's lines of metrics. `of_axis`: where on each axis; NaN throughout if not known."""

    of_axis: Mapping[str, Numbers]
    loss: Numbers
    tokens: Numbers  # of each line's step
    validation: Numbers  # loss; NaN where there was no evaluation
    standard_error: Numbers

    def end(self, axis: str) -> float:
        """Return where the last line lies; NaN if not known."""
        x = self.of_axis[axis]
        return float(x[-1]) if len(x) else nan

    def reaches(self, axis: str, x: float) -> bool:
        return self.end(axis) >= x * (1 - _EXACT)

    def training_loss(self, axis: str, x: float, span: float) -> float:
        """Return the mean loss of the tokens in the last `span` before x, of one step at least.

        NaN if the run does not reach x, or a loss among them is not finite.
        """
        lines = self._before(axis, x, span)
        return mean_loss(self.loss[lines], self.tokens[lines]) if lines else nan

    def _before(self, axis: str, x: float, span: float) -> slice | None:
        if not self.reaches(axis, x):
            return None
        where = self.of_axis[axis]
        end = int(np.searchsorted(where, x * (1 + _EXACT), "right"))
        begin = int(np.searchsorted(where, x - span + x * _EXACT, "right"))
        return slice(min(begin, end - 1), end) if end else None

    def validation_loss(self, axis: str, x: float) -> float:
        """Return the loss between the evaluations before and after x, on the line between them."""
        at = self.evaluated
        where, losses = self.of_axis[axis][at], self.validation[at]
        if not len(at) or not where[0] * (1 - _EXACT) <= x <= where[-1] * (1 + _EXACT):
            return nan
        return float(np.interp(x, where, losses))

    @property
    def evaluated(self) -> list[int]:
        """Return the numbers of the lines with a finite validation loss."""
        return [int(line) for line in np.flatnonzero(np.isfinite(self.validation))]


def course_of(run: Run) -> Course:
    metrics = run.metrics
    steps = metrics["step"]
    done = np.diff(steps, prepend=0.0)  # more than one where lines are missing
    return Course(
        {
            "steps": steps,
            "tokens": _sums(metrics["tokens"] * done),
            "seconds": _sums(metrics["step_seconds"] * done),
            "clock": _clock(run, metrics),
        },
        metrics["loss"],
        metrics["tokens"],
        metrics["validation_loss"],
        metrics["validation_standard_error"],
    )


def mean_loss(losses: Numbers, tokens: Numbers) -> float:
    """Return the mean over all tokens; over steps if their tokens are not known."""
    if not len(losses) or not np.isfinite(losses).all():
        return nan
    known = np.isfinite(tokens).all() and (tokens >= 0).all() and 0 < tokens.sum() < np.inf
    return float(np.average(losses, weights=tokens if known else None))


def _sums(parts: Numbers) -> Numbers:
    """Return the sums up to each line; NaN throughout if one of the parts is not known."""
    sums = np.cumsum(parts)
    known = bool((parts >= 0).all()) and (not len(sums) or isfinite(sums[-1]))
    return sums if known else np.full(len(parts), nan)


def _clock(run: Run, metrics: Columns) -> Numbers:
    """Return the seconds of the jobs up to each line, without those between two jobs.

    A job that was killed counts up to its last line or event that is left.
    """
    times = metrics[TIME]
    clock = np.full(len(metrics), nan)
    before = 0.0
    for job in run.jobs:
        if not isfinite(job.began):
            return clock
        of_job = (times >= job.began) & (times <= job.ended)
        clock[of_job] = before + times[of_job] - job.began
        before += max(0.0, job.ended - job.began)
    if np.isnan(clock).any():
        return np.full(len(metrics), nan)
    return np.maximum.accumulate(clock) if len(clock) else clock
