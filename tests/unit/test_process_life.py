"""The begin of a process, long before it has loaded its libraries."""

import subprocess
import sys
import time

from hpczero import machine


def test_when_a_process_was_started() -> None:
    before = time.time()
    program = "from hpczero.machine import process_began; print(process_began())"
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=path
    )
    assert before - 0.02 < float(done.stdout) < time.time()  # the kernel counts hundredths
    assert machine.process_began() < before
