"""Who sees the live panel when a launcher stands between the run and the terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

MPIRUN = Path(sys.executable).parent / "mpirun"
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
PROGRAM = """
import sys
from hpczero import env
from hpczero.train import output
if all(rank == 0 for rank, _ in env.launched_tasks().values()):
    out = output.choose("auto", 2, 1)
    for step in (1, 2):
        out.step(step, {"loss": 3.25, "tokens": 10, "step_seconds": 0.1})
    out.close()
"""
LIVE, LINES = "step 2/2", "step=2/2"

pytestmark = pytest.mark.skipif(not MPIRUN.is_file(), reason="this Python environment has no MPI of its own")


def on_a_terminal(command: str, *arguments: str) -> str:
    """What a shell's command writes on a terminal of 90 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 90, 0, 0))
    text: list[bytes] = []

    def read() -> None:
        while True:
            try:
                text.append(os.read(ours, 65536))
            except OSError:  # the other side is closed
                return

    environment = {**os.environ, **OPEN_MPI, "TERM": "xterm", "NO_COLOR": "1"}
    shell = ["sh", "-c", command, str(MPIRUN), sys.executable, PROGRAM, *arguments]
    process = subprocess.Popen(shell, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(60) == 0
    reader.join()
    os.close(ours)
    return b"".join(text).decode()


def test_the_launchers_terminal_shows_the_panel_in_its_width() -> None:
    said = on_a_terminal('"$0" -n 2 "$1" -c "$2"')
    assert LIVE in said
    assert "─" * 88 in said
    assert "─" * 89 not in said


@pytest.mark.parametrize(
    "command",
    [
        '"$0" -n 2 "$1" -c "$2" > "$3"',  # Open MPI gives the rank a terminal all the same
        '"$0" -n 2 "$1" -c "$2" | cat > "$3"',
        '"$0" -n 2 sh -c \'"$0" -c "$1" > "$2"\' "$1" "$2" "$3"',
        '"$0" -n 2 sh -c \'"$0" -c "$1" | cat >> "$2"\' "$1" "$2" "$3"',
    ],
)
def test_no_control_code_ever_reaches_a_file(tmp_path: Path, command: str) -> None:
    log = tmp_path / "log"
    said = on_a_terminal(command, str(log))
    assert LINES in log.read_text()
    assert "\x1b" not in log.read_text() + said
