"""The HDF5 library's view of a checkpoint's files, asked for in a process of its own.

A crafted file can make that library write over its own memory, run for ever or ask for any amount
of memory. So the process that asks has limits of processor time and memory, and may die.

    python -m hpczero.checkpoint.apart FOLDER
        "ready"; then for each line on stdin, the number of a shard file or -1 for the index,
        a line of JSON: what is wrong with it (`view`), [] if nothing
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

from hpczero import env
from hpczero.checkpoint import index, manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import INDEX, Content
from hpczero.checkpoint.shard_file import Unreadable
from hpczero.errors import HpczeroError

_MOST_PROBLEMS = 20  # that are said of a file
_MEMORY = 160 << 20, 16  # bytes beyond what the process has: in all, and for each of the file
_SECONDS = 4.0, 4e-6  # of processor time: in all, and for each byte of the file
_START = 120.0  # seconds: Python's libraries may lie on a slow file system
_SLOWER = 20.0  # times the processor time: then the process is given up
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


class Apart:
    """Asks about one checkpoint. The process begins with the first question, and again after it
    died.
    """

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder, self.content = folder, content
        self._process: subprocess.Popen[bytes] | None = None

    def problems(self, shard: int = -1) -> list[str]:
        """Return what is wrong with a shard file, or with the index; Unreadable: nobody can tell."""
        process = self._running()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it says why below
            process.stdin.write(f"{shard}\n".encode())
            process.stdin.flush()
        answer = self._line(process, _SLOWER * _seconds(structure(self.content, shard)))
        if answer is not None:
            return list(map(str, json.loads(answer)))
        return [self._ended(process, shard)]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            python = env.python_command("hpczero.checkpoint.apart")
            command = [*python, str(self.folder.absolute())]
            pipe = subprocess.PIPE
            try:
                quiet = subprocess.DEVNULL
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet)
            except OSError as error:
                raise Unreadable(
                    f"no process to look at {self.folder}: {error.strerror}"
                ) from error
            if self._line(self._process, _START) != b"ready\n":
                self.close()
                raise Unreadable(f"the process that looks at {self.folder} did not begin")
        return self._process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """The next line that it says, or None: it ended, or has taken too long."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            return None
        line = process.stdout.readline()
        return line if line.endswith(b"\n") else None

    def _ended(self, process: subprocess.Popen[bytes], shard: int) -> str:
        """Return what the end of the process says of the file."""
        name = INDEX if shard < 0 else self.content.shards[shard].file
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU  # it waits for something that a file says
        self.close()
        if -code == signal.SIGXCPU:
            return "the HDF5 library does not come to an end with it"
        if -code in _CRASHES:
            return f"the HDF5 library crashes when it reads it ({signal.Signals(-code).name})"
        raise Unreadable(f"the process that looked at {self.folder / name} ended with code {code}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _seconds(size: int) -> float:
    whole, of_byte = _SECONDS
    return whole + of_byte * size


def limited(size: int) -> None:
    """From now on this process has the time and memory that a file of this size is worth."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + _seconds(size)) + 1
    whole, of_byte = _MEMORY
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    memory = held + whole + of_byte * size
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (soft, hard))


def answer(folder: Path, content: Content, shard: int) -> list[str]:
    """Return what is wrong with a file, with limits on this process."""
    if shard < 0:
        with Checkpoint.open(folder) as checkpoint:
            table = checkpoint.table
        limited(content.index.size)
        found = index.problems(folder / INDEX, table, content.shards)
        return list(islice(found, _MOST_PROBLEMS))
    limited(structure(content, shard))
    problem = index.problem_of_shard(folder / content.shards[shard].file, content.shards[shard])
    return [problem] if problem else []


def structure(content: Content, shard: int) -> int:
    """Bytes of a file that the HDF5 library looks at: all but the data."""
    if shard < 0:
        return content.index.size
    ranges = [one for data in content.shards[shard].ranks for one in data.extent.ranges()]
    return content.shards[shard].size - sum(end - begin for begin, end in ranges)


def main() -> int:
    folder = Path(sys.argv[1])
    content = manifest.read(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(folder, content, int(line))), flush=True)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except HpczeroError:
        code = 1
    sys.stdout.flush()
    os._exit(code)  # what HDF5 has in memory may be no good any more
