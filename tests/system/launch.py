"""The commands as a user starts them: alone or under mpirun, each with a hard time limit, none leaving a process behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 120
MPIRUN = Path(sys.executable).parent / "mpirun"
# Open MPI refuses to be root and to start more ranks than cores unless told otherwise; others ignore this.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}

needs_mpirun = pytest.mark.skipif(not MPIRUN.is_file(), reason="this Python environment has no MPI of its own")

Process = subprocess.Popen[str]


def command(ranks: int, *arguments: str, program: tuple[str, ...] = ("-m", "hpczero")) -> list[str]:
    """`ranks` = 0: without mpirun."""
    launcher = [str(MPIRUN), "-n", str(ranks)] if ranks else []
    return [*launcher, sys.executable, *program, *arguments]


@contextlib.contextmanager
def started(folder: Path, words: list[str], **variables: str) -> Iterator[Process]:
    """A process and all its children, in a session of their own that is ended with the block."""
    environment = {**os.environ, **OPEN_MPI, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=folder, env=environment, text=True, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def run(folder: Path, words: list[str], limit: float = LIMIT, **variables: str) -> subprocess.CompletedProcess[str]:
    with started(folder, words, **variables) as process:
        output, errors = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)
