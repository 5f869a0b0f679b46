"""Run a command and write the processor time that it and everything it started took.

    python scripts/measured.py FILE COMMAND...

Processes that leave their parent (daemons, ranks of a killed launcher) become children of this one
and are counted when they end, too. What still runs when the command has ended is not waited for.
"""

import ctypes
import os
import resource
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


def run(command: list[str]) -> int:
    """Return the exit code of the command, as a shell would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main(file: str, command: list[str]) -> int:
    code = run(command)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(file, "w") as out:
        out.write(f"{used.ru_utime + used.ru_stime:.1f}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
