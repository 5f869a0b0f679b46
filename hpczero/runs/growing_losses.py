"""The losses of a run that goes on, read as they are written."""

import json
import os
from array import array
from math import isfinite
from pathlib import Path

import numpy as np

from hpczero import safe_files
from hpczero.runs.columns import TIME, Numbers, number, seconds_of

_MOST = 16 << 20  # bytes that are read at first, the newest ones


class GrowingLosses:
    """The losses of a file of metrics that grows; at first only of its newest part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._inode = -1
        self._offset = 0
        self._steps, self._losses = array("d"), array("d")
        self.written = 0.0  # time of the last line

    @property
    def steps(self) -> Numbers:
        return np.array(self._steps)

    @property
    def losses(self) -> Numbers:
        return np.array(self._losses)

    def read(self) -> None:
        """Read what has been written since the last time."""
        try:
            with os.fdopen(safe_files.open_to_read(self._path), "rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._begin_anew()  # a run that went on from an earlier step wrote it anew
                    self._inode = facts.st_ino
                    self._offset = max(0, facts.st_size - _MOST)
                file.seek(self._offset)
                content = file.read(facts.st_size - self._offset)
        except OSError:
            return
        whole, _, _ = content.rpartition(b"\n")
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(facts, dict):
            return
        step, loss = number(facts.get("step")), number(facts.get("loss"))
        when = seconds_of(facts.get(TIME))
        self.written = when if isfinite(when) else self.written
        if isfinite(step) and isfinite(loss):
            while self._steps and self._steps[-1] >= step:
                self._steps.pop()
                self._losses.pop()
            self._steps.append(step)
            self._losses.append(loss)
