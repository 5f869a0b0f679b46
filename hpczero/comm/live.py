"""The ranks' doings, for somebody who looks at a job from outside: on demand, through files.

The onlooker writes something new into `<run>/watch/asked` every few seconds. On each node
one rank reads that file now and then. As long as its content changes, it writes what the ranks of
its node do into `live-<node>.json` (`node_file`). So nobody loads the file server unasked, and no
two computers' clocks are compared: either side sees what changes, and takes the time itself.

The rank on duty is the lowest one of its node that has looked lately, as the slots say that the
ranks of a node share. One that is stopped, or whose file server does not answer, looks no more, and
another takes its place. All this happens in the watchdog's thread for files.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hpczero import safe_files
from hpczero.comm import node_file, rank_process
from hpczero.comm.node_file import NOTHING, NodeFile
from hpczero.comm.status import Status, last_look, read
from hpczero.errors import InputError

# in seconds
_LOOK_EVERY = 5.0
WRITE_EVERY = 2.0
_ASKED_FOR = 15.0  # a change counts
_PATIENCE = 5.0  # without a look, after which another rank takes the duty
_STAGGER = 2.0  # that each further rank waits longer, so that one of them takes it
ASK_EVERY = 3.0  # by the onlooker
_SHARE = 0.01  # of a processor that writing takes at most
_MOST = 1000  # bytes of a question
_OPERATIONS = 4  # of each group in a file


def path_of(folder: Path, node: int) -> Path:
    return folder / f"live-{node:04}.json"


def asked_in(folder: Path) -> Path:
    return folder / "asked"


class Live:
    """A rank's part: `look` is called about once a second, in a thread of its own."""

    def __init__(
        self,
        status: Status,
        rank: int,
        node: int,
        slots: Mapping[int, memoryview],
        is_first: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots`: of the ranks of this node; `is_first`: they make the file `asked`."""
        self._status = status
        self._rank = rank
        self._node = node
        self._slots = slots
        self._is_first = is_first
        self._clock = clock
        self._folder: Path | None = None
        self._vacant: float | None = None  # since when no rank of this node has the duty
        self._content: bytes | None = None  # of `asked`, at the last look
        self._next_look = 0.0
        self._next_write = 0.0

    def look(self, folder: Path) -> None:
        """Do what there is to do, if it is this rank's turn."""
        now = self._clock()
        asked = self._duty(now)
        if asked is None:
            return
        if folder != self._folder:
            self._folder, self._content, self._next_look = folder, None, 0.0
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            if self._is_asked(folder):
                asked = now
        self._status.looked(self._clock(), asked)  # now the file server has answered
        if asked and now - asked < _ASKED_FOR and now >= self._next_write:
            began = time.thread_time()
            self._write(folder)
            took = time.thread_time() - began
            self._next_write = now + max(WRITE_EVERY, took / _SHARE)

    def _duty(self, now: float) -> float | None:
        """Return when a rank of this node last saw a question; None: another rank has the duty."""
        looks = {rank: last_look(slot) for rank, slot in self._slots.items()}
        on_duty = [rank for rank, (looked, _) in looks.items() if looked > now - _PATIENCE]
        if on_duty:
            self._vacant = None
            is_mine = min(on_duty) == self._rank
        else:
            self._vacant = now if self._vacant is None else self._vacant
            turn = sorted(self._slots).index(self._rank)
            is_mine = now - self._vacant >= turn * _STAGGER
        return max(asked for _, asked in looks.values()) if is_mine else None

    def _is_asked(self, folder: Path) -> bool:
        """Return True if the question has changed since the last look; the first one is none."""
        path = asked_in(folder)
        try:
            content = safe_files.read_small(path, _MOST)
        except InputError:
            content = b""
            if (
                self._is_first
                and not safe_files.is_seen(path)
                and safe_files.is_seen(folder.parent)
            ):
                with contextlib.suppress(OSError, InputError):
                    safe_files.make_own_folder(folder)
                    safe_files.touch(path)
        before, self._content = self._content, content
        return before is not None and content not in (before, b"")

    def _write(self, folder: Path) -> None:
        if not safe_files.is_seen(folder):  # removed meanwhile, with all that it held
            return
        now = self._clock()
        states = {
            rank: read(slot, now, operations=_OPERATIONS) for rank, slot in self._slots.items()
        }
        notes = rank_process.notes(states)
        sizes = {rank: rank_process.resident(state) for rank, state in states.items()}
        known = {rank: size for rank, size in sizes.items() if size}
        file = NodeFile(time.time(), "", states, {}, notes, known)
        node_file.write(path_of(folder, self._node), file, self._rank)


class Onlooker:
    """A look at a job, through the folder that its ranks write in; only `ask` writes anything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._read()  # perhaps an earlier job's
        self._news: dict[Path, NodeFile] = {}
        self._could_ask = True

    def ask(self) -> str:
        """Ask for the ranks' states; return why that cannot be done, "" if it was."""
        path = asked_in(self._folder)
        self._could_ask = False
        try:
            # in place and always as long: whoever reads it meanwhile sees a change, too
            with os.fdopen(safe_files.open_for_writing(path), "wb", buffering=0) as file:
                file.write(secrets.token_hex(16).encode() + b"\n")
                file.truncate()  # what somebody else has added would make it too long to be read
        except FileNotFoundError:
            return f"{path} is not there: the job is starting, or has no watchdog"
        except OSError as error:
            return f"{path}: {error.strerror}"
        self._could_ask = True
        return ""

    @property
    def may_be_answered(self) -> bool:
        """Return True if the ranks may come to listen, or to answer, yet."""
        return self._could_ask or not safe_files.is_seen(asked_in(self._folder))

    def files(self) -> list[NodeFile]:
        """Return the newest file of each node that has written one since this began to look.

        Their time is that of this computer's clock, at which they were first seen.
        """
        for path, file in self._read().items():
            before = self._seen.get(path)
            if before is None or before.at != file.at:
                self._seen[path] = file
                self._news[path] = replace(file, at=time.time())
        return list(self._news.values())

    def _read(self) -> dict[Path, NodeFile]:
        try:
            paths = sorted(self._folder.glob("live-*.json"))
        except OSError:
            return {}
        files = {path: node_file.read(path) for path in paths}
        return {path: file for path, file in files.items() if file is not NOTHING}
