"""Begin and end of a process: when it was started, and what it still does when it leaves."""

import subprocess
import sys
import time

import pytest

from hpczero import machine

PROGRAM = """
import atexit, os, sys, types
from hpczero import cli

class Late:
    def __del__(self, write=os.write):
        write(1, b"torn down")

sys.late = Late()
if {trained}:
    sys.modules["hpczero.train.run"] = types.ModuleType("run")
cli.main = lambda: {code}
atexit.register(print, "bye", end=" ")
print("words", end=" ")
sys.exit(cli.program())
"""


def ended(code: int, trained: bool, **variables: str) -> tuple[int, str]:
    program = PROGRAM.format(code=code, trained=trained)
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=path | variables,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", [0, 75])
def test_a_training_that_came_to_its_end_leaves_at_once(code: int) -> None:
    """What it has printed, and what was registered for its end, is carried out all the same."""
    assert ended(code, trained=True) == (code, "words bye ")


def test_others_and_beside_tools_the_interpreter_is_torn_down() -> None:
    for code, trained, variables in ((0, False, {}), (1, True, {}), (0, True, {"LD_AUDIT": " "})):
        assert ended(code, trained, **variables) == (code, "words bye torn down")


def test_when_a_process_was_started() -> None:
    before = time.time()
    program = "from hpczero.machine import process_began; print(process_began())"
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=path
    )
    assert before - 0.02 < float(done.stdout) < time.time()  # the kernel counts hundredths
    assert machine.process_began() < before
