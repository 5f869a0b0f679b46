"""The tracker "tensorboard": event files in <run>/tensorboard, one of each job of the run.

A job begins its file with `session_start` of its first step: TensorBoard then drops what older
files have of this step and later ones, which are computed again.
"""

import os
import socket
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hpczero import safe_files
from hpczero.track import event_file
from hpczero.track.item import Item, RunFacts, figures, plain_name, text

_NUMBERS = count()  # of the files of this process


class TensorBoard:
    def __init__(self, facts: RunFacts) -> None:
        self._toml = facts.toml
        self._folder = Path(facts.folder) / "tensorboard"
        self._told: dict[str, tuple[int, str]] = {}  # tag -> the last step that had it, its text
        self._open()

    def _open(self) -> None:
        safe_files.make_own_folder(self._folder)
        now = time.time()
        place = f"{plain_name(socket.gethostname())}.{os.getpid()}.{next(_NUMBERS)}"
        self._path = self._folder / f"events.out.tfevents.{int(now):010d}.{place}"
        self._file = os.fdopen(safe_files.create(self._path), "wb")
        self._put(event_file.first_event(now))

    def write(self, items: Sequence[Item]) -> None:
        """Write a batch; if the file was removed under the run, begin another one."""
        if not self._path.exists():
            self._file.close()
            self._open()
        for item in items:
            self._write(item)
        self._file.flush()

    def _write(self, item: Item) -> None:
        if item.kind == "from":
            self._put(event_file.session_start(item.time, item.step))
            self._say(item, "spec", "".join(f"    {line}\n" for line in self._toml.splitlines()))
        elif item.kind == "event":
            self._say(item, f"events/{plain_name(item.event)}", text(item))
        elif values := figures(item):
            self._put(event_file.scalars(item.time, item.step, values))

    def _say(self, item: Item, tag: str, words: str) -> None:
        """Write a text: with those of the step before it, as some readers keep one a step."""
        before, said = self._told.get(tag, (-1, ""))
        words = f"{said}\n\n{words}" if before == item.step else words
        self._told[tag] = item.step, words
        self._put(event_file.text(item.time, max(0, item.step), tag, words))

    def _put(self, message: bytes) -> None:
        self._file.write(event_file.record(message))

    def close(self) -> None:
        self._file.close()

    def give_up(self) -> None:
        """Do nothing: the thread ends with the rank."""
