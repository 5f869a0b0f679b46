"""The fake PBS of these tests agrees with what a real one printed (tests/unit/batch/pbs)."""

import re
import subprocess
from pathlib import Path

import pytest

from hpczero.batch import pbs
from tests.support import fakes
from tests.support.fake_pbs import handed_over, wrapped

CAPTURED = Path(__file__).parent / "pbs"


class Shell:
    """Calls of the fake's programs, by hand."""

    def __init__(self, queue: Path) -> None:
        self.queue = queue
        self.script = queue.parent / "job.sh"
        self.script.write_text("#!/bin/bash\n#PBS -v HPCZERO_TAG=hpczero:ab:0,SECRET\nsleep 1\n")

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.queue.parent / "bin" / words[0]), *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def chain(self, links: int) -> list[str]:
        numbers: list[str] = []
        for _ in range(links):
            after = ["-W", f"depend=afterany:{numbers[-1]}"] if numbers else ["-h"]
            numbers.append(self("qsub", *after, str(self.script)).stdout.strip())
        self("qrls", numbers[0])
        return numbers

    def states(self, numbers: list[str]) -> str:
        return "".join(fakes.state(self.queue, number) for number in numbers)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(fakes.install(tmp_path / "pbs"))


def keys(text: str) -> set[str]:
    return set(re.findall(r"^    (\S+) = ", text, re.MULTILINE))


def test_a_job_is_described_as_by_the_real_one(shell: Shell) -> None:
    first, second = shell.chain(2)
    captured = "".join(path.read_text() for path in CAPTURED.glob("qstat-x*f-*.txt"))
    captured += (CAPTURED / "qstat-f-suspended.txt").read_text()
    for state in "WRSF":
        fakes.state(shell.queue, first, state)
        said = shell("qstat", "-x", "-f", first, second).stdout
        unknown = keys(said) - keys(captured) - {"Exit_status"}
        assert not unknown
        assert [job.number for job in pbs.parse(said)] == [first, second]
        assert said.endswith("\n\n"), "an empty line ends each job"


def test_lines_are_broken_where_the_real_one_breaks_them() -> None:
    for name in ("qstat-xf-walltime-exceeded.txt", "qstat-xf-qdel-running.txt"):
        (broken,) = re.findall(r"^    comment = .*(?:\n\t.*)*", (CAPTURED / name).read_text(), re.M)
        first, *more = broken.split("\n\t")
        assert wrapped(first + "".join(more)) == [first, *more]


def test_the_users_jobs_are_listed_as_by_the_real_one(shell: Shell) -> None:
    shell.chain(1)
    fake, real = shell("qstat", "-u", "user").stdout, (CAPTURED / "qstat-u.txt").read_text()
    assert fake.splitlines()[:5] == real.splitlines()[:5]
    row = r"(\d+\.\S+) +user +\S+ +\S+ +\S+ +\d+ +\d+ +\S+ +\d\d:\d\d ([A-Z]) +\S+ *"
    assert [re.fullmatch(row, line) for line in fake.splitlines()[5:]]
    assert re.fullmatch(row, real.splitlines()[5])


@pytest.mark.parametrize(
    ("deleted", "states", "complaint"),
    [
        ([0], "FHHH", ""),  # those behind a job that never ran stay held
        ([2], "QHFF", ""),  # with one that is held for another, those behind it go
        (
            [0, 1, 2, 3],
            "FFFF",
            "qdel: Job has finished 19.headnode\nqdel: Job has finished 20.headnode\n",
        ),
        ([3, 2, 1, 0], "FFFF", ""),
    ],
)
def test_what_goes_with_a_deleted_job(
    shell: Shell, deleted: list[int], states: str, complaint: str
) -> None:
    numbers = shell.chain(4)
    done = shell("qdel", *(numbers[index] for index in deleted))
    assert (shell.states(numbers), done.stderr) == (states, complaint)
    assert bool(done.returncode) == bool(complaint)


def test_a_deleted_job_that_ran_lets_the_next_one_go(shell: Shell) -> None:
    numbers = shell.chain(3)
    fakes.state(shell.queue, numbers[0], "R")
    assert shell("qdel", numbers[0]).returncode == 0
    assert shell.states(numbers) == "FQH"


def test_history_and_a_server_that_is_down(shell: Shell) -> None:
    (number,) = shell.chain(1)
    fakes.state(shell.queue, number, "F")
    assert shell("qstat", "-f", number).returncode != 0
    assert shell("qstat", "-x", "-f", number).returncode == 0
    (shell.queue / "forgetful").touch()
    done = shell("qstat", "-x", "-f", number)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith(f"job history {number}\n")
    aborted = shell("qsub", "-W", f"depend=afterany:{number}", str(shell.script)).stdout.strip()
    assert fakes.state(shell.queue, aborted) == "F", "the job that it waits for is not known"
    (shell.queue / "deaf").touch()
    codes = [shell(program, number).returncode for program in ("qsub", "qdel", "qstat")]
    assert codes == [162, 162, 255]


def test_values_change_on_their_way() -> None:
    assert handed_over("A", "a\"b\"c'd'e\\f  ") == "A=a\\b\\c\\d\\e\\\\f"
    with pytest.raises(SystemExit):
        handed_over("A", "it's")
