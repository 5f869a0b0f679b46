"""Programs of the fake PBS (tests/support/fake_pbs.py), in a folder for PATH."""

import sys
from pathlib import Path

from hpczero.batch import submission
from tests.support import fake_pbs
from tests.support.launch import CHECKOUT

_PROGRAM = """#!{python}
import sys
sys.path.insert(0, {checkout!r})
from tests.support.fake_pbs import main
main({queue!r})
"""


def install(folder: Path) -> Path:
    """Make `folder/bin` with the programs; return the queue's folder."""
    queue = folder / "queue"
    programs = folder / "bin"
    queue.mkdir(parents=True)
    programs.mkdir()
    for name in ("qsub", "qstat", "qrls", "qdel"):
        path = programs / name
        names = {"python": sys.executable, "checkout": str(CHECKOUT), "queue": str(queue)}
        path.write_text(_PROGRAM.format(**names))
        path.chmod(0o755)
    return queue


def state(queue: Path, number: str, becomes: str | None = None) -> str:
    """Return the state of a job, changed if a new one is given."""
    path = queue / number / "state"
    if becomes:
        path.write_text(becomes)
        fake_pbs.Server(queue).settle()
    return path.read_text()


def calls(queue: Path, program: str) -> list[str]:
    path = queue / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(program + " ")]


SPEC = """
name = "a-run"
output = "runs"
train.steps = 40
batch = { site = "generic/pbs", nodes = 2, chain = 3, env_pass = ["SECRET_OF_MINE"] }
"""


def record(folder: Path) -> submission.Submission:
    (only,) = submission.of_run(folder / "runs" / "a-run")
    return only
