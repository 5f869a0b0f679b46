"""A tracker in a process of its own: libraries with threads, exit handlers and processes.

They cannot hold up the end of a rank there, change its signals or take its lock on Python. The
process goes on for a while when the rank dies, and ends what it writes.

    python -m hpczero.track.process wandb
        reads the facts of the run as a line of JSON, then batches of items, a line each; after each
        batch it prints a line: null, or what is wrong
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from hpczero import env
from hpczero.errors import HpczeroError
from hpczero.track.item import Item, RunFacts
from hpczero.track.lane import Tracker

# name in the spec -> the class
_CLASSES = {
    "wandb": "hpczero.track.wandb_run:WandbRun",
    "mlflow": "hpczero.track.mlflow_run:MlflowRun",
}
_SECONDS_TO_END = 60  # after the rank's last word
_LONGEST = 1000  # letters of what is wrong
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class InProcess:
    """Stands for a tracker that is in another process."""

    def __init__(self, name: str, facts: RunFacts) -> None:
        self._process = subprocess.Popen(
            [*env.python_command("hpczero.track.process"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # so that it can be ended with its own processes
        )
        self._tell(vars(facts))  # and do not wait: the process begins meanwhile

    def _tell(self, content: Any) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # its answer, or the lack of one, says why
            self._process.stdin.write(json.dumps(content, default=str) + "\n")
            self._process.stdin.flush()

    def write(self, items: Sequence[Item]) -> None:
        assert self._process.stdout
        self._tell([vars(item) for item in items])
        answer = self._process.stdout.readline()
        if not answer:
            raise HpczeroError(f"its process has ended ({self._process.wait()})")
        if problem := json.loads(answer):
            raise HpczeroError(str(problem))

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        answer = self._process.stdout.readline()
        if code := self._process.wait():
            problem = json.loads(answer) if answer else ""
            raise HpczeroError(problem or f"its process has ended ({code})")

    def give_up(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


# -- in the process --------------------------------------------------------------------------------


def main() -> int:
    for number in _IGNORED:  # it ends when the rank does
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes elsewhere
    os.dup2(2, 1)
    env.for_trackers()
    try:
        _serve(sys.argv[1], answers)
    except BaseException as error:
        _answer(answers, f"{type(error).__name__}: {error}"[:_LONGEST])
        os._exit(1)  # without the exit handlers of a library that has failed
    return 0


def _serve(name: str, answers: TextIO) -> None:
    module, _, leaf = _CLASSES[name].partition(":")
    facts = RunFacts(**json.loads(sys.stdin.readline()))
    tracker: Tracker = getattr(importlib.import_module(module), leaf)(facts)
    for line in sys.stdin:
        tracker.write([Item(**item) for item in json.loads(line)])
        _answer(answers, None)
    signal.alarm(_SECONDS_TO_END)
    tracker.close()


def _answer(answers: TextIO, problem: str | None) -> None:
    with contextlib.suppress(BrokenPipeError):  # the rank is gone
        answers.write(json.dumps(problem) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
