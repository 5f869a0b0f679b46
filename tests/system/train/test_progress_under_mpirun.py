"""Who sees the live panel when a launcher stands between the run and the terminal."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.launch import mpirun, on_a_terminal

CODE = """
import sys
from hpczero import env
from hpczero.train import console
if all(rank == 0 for rank, _ in env.launched_tasks().values()):
    out = console.choose_output("auto", 2, 1)
    for step in (1, 2):
        out.step(step, {"loss": 3.25, "tokens": 10, "step_seconds": 0.1})
    out.close()
"""
PROGRAM = shlex.join([sys.executable, "-c", CODE])
LIVE, LINES = "step 2/2", "step=2/2"


def shown_by(command: str) -> str:
    return on_a_terminal(["sh", "-c", command], {"TERM": "xterm", "NO_COLOR": "1"})


def test_the_launchers_terminal_shows_the_panel_in_its_width() -> None:
    said = shown_by(f"{shlex.join(mpirun(2))} {PROGRAM}")
    assert LIVE in said
    assert "─" * 98 in said
    assert "─" * 99 not in said


@pytest.mark.parametrize("into", [">>", "| cat >>"])
@pytest.mark.parametrize("by", ["the shell", "each rank"])
def test_no_control_code_ever_reaches_a_file(tmp_path: Path, by: str, into: str) -> None:
    log = tmp_path / "log"
    redirected, launcher = f"{PROGRAM} {into} {shlex.quote(str(log))}", shlex.join(mpirun(2))
    command = f"{launcher} {redirected}"  # Open MPI gives the rank a terminal all the same
    if by == "each rank":
        command = f"{launcher} sh -c {shlex.quote(redirected)}"
    said = shown_by(command)
    assert LINES in log.read_text()
    assert "\x1b" not in log.read_text() + said
