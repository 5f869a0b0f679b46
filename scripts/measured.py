"""Run a command and write the processor time that it and everything it started took.

    python scripts/measured.py FILE SHARE COMMAND...

SHARE, such as 0/2 and 1/2, says which of so many equal shares of the cores they keep to. Commands
that run beside each other on the same cores take more processor time: ranks that wait look again.
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


def keep_to(share: str) -> None:
    """Keep this process, and what it starts, to a share of the cores that it may use, where there
    are enough for all shares.
    """
    number, shares = map(int, share.split("/"))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= shares:
        first, last = (len(cores) * edge // shares for edge in (number, number + 1))
        os.sched_setaffinity(0, cores[first:last])


def main(file: str, share: str, command: list[str]) -> int:
    if sys.platform == "linux":
        keep_to(share)
    code = run(command)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(file, "w") as out:
        out.write(f"{used.ru_utime + used.ru_stime:.1f}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
