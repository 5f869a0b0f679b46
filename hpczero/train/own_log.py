"""The lines that the run of a loop of one's own has in its directory, and its warnings."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.checkpoint.save import Saved
from hpczero.errors import HpczeroError
from hpczero.train import setup
from hpczero.train.run_directory import RunDirectory
from hpczero.train.run_report import as_noted
from hpczero.train.summary import Earlier


class OwnLog:
    """On every rank; rank 0 has the directory, from the claim to the end, and speaks."""

    def __init__(self, speaks: bool, goes_on: bool) -> None:
        """`goes_on`: what cannot be written is only said."""
        self.directory: RunDirectory | None = None
        self._speaks = speaks
        self._goes_on = goes_on
        self._has_said = False  # that something cannot be written
        self._trims = True  # the next step's line goes behind those of the steps before it
        self._is_first = True  # the next line
        self._began = time.monotonic()

    @property
    def path(self) -> Path | None:
        return self.directory.path if self.directory else None

    def warn(self, what: str) -> None:
        if self._speaks:
            print(f"hpczero: WARN {what}", file=sys.stderr, flush=True)
        self.event("WARN", what=what)

    def event(self, name: str, **values: Any) -> None:
        self._write(lambda directory: directory.event(name, **values))

    def start(self, ranks: list[Any] | None) -> None:
        """Write the event of a start; `ranks`: where each of them is."""
        if self.directory:
            facts = {"packages": setup.packages(), "git": setup.git_state(), "loop": "own"}
            where = {"ranks": ranks, "job": env.batch_job()}
            self.event("start", began=setup.start_time(), **where, **facts)

    def resumed(self, step: int, path: str, **changed: str) -> None:
        """Say from which step the loop goes on; steps behind it that had been done are lost."""
        kept: list[Earlier] = []
        self._write(lambda directory: kept.append(directory.keep_metrics_before(step + 1)))
        self._trims = False
        lost = kept[0].lost if kept else {}
        if path or lost:
            self.event("resume", step=step, path=path, **changed, **lost)

    def saved(self, saved: Saved, stalled: float) -> None:
        """`stalled`: seconds in which the loop stood still for it."""
        facts = {"bytes": saved.size, "seconds": saved.seconds, "stalled": stalled}
        self.event("save", step=saved.step, path=str(saved.path), **facts)

    def go_on_from_another_step(self) -> None:
        """Let the next step drop the lines of the steps that are computed again."""
        self._trims = True

    def step(
        self,
        step: int,
        values: dict[str, Any],
        memory: dict[str, Any] | None,
        is_claimed: bool,
    ) -> None:
        """Write the line of a step, and that of its memory, if there is a directory by now."""
        if not is_claimed:
            return
        if self._trims:
            self.resumed(step - 1, "")
        self._write(lambda directory: directory.metrics({"step": step, **values}))
        if self._is_first:
            self._is_first = False
            self.event("first", step=step, seconds=values["step_seconds"])
        if memory:
            self._write(lambda directory: directory.memory(memory))

    def sync(self) -> None:
        self._write(lambda directory: directory.sync())

    def end(self, step: int, state: str, reason: str, ranks: int) -> None:
        """Write the last words, and give the directory back."""
        seconds = time.monotonic() - self._began
        summary = {"state": state, "reason": reason, "steps": step, "final_loss": None}
        summary |= {"ranks": ranks, "wall_seconds": seconds}
        if self.directory:
            summary |= as_noted(self.directory)
        try:
            self._write(lambda directory: directory.summary(summary))
            self.event("stop", state=state, step=step, reason=reason)
        finally:
            if self.directory:
                self.directory.close()
            self.directory = None

    def _write(self, action: Callable[[RunDirectory], object]) -> None:
        if self.directory is None:
            return
        try:
            action(self.directory)
        except (HpczeroError, OSError) as error:
            if not self._goes_on:
                raise
            if not self._has_said:
                self._has_said = True
                what = f"{error}: lines of this run are missing from now on"
                print(f"hpczero: WARN {what}", file=sys.stderr, flush=True)
