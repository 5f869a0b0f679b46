"""The jobs of a chain, one after the other: a script with fake launchers and schedulers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from hpczero.lock import Holder, RunLock
from tests.support.golden import submitted
from tests.support.launch import CHECKOUT

BASH = shutil.which("bash") or "bash"


class Machine:
    """A compute node: a job's script, and the programs that it finds."""

    def __init__(self, folder: Path, batch: dict[str, object]) -> None:
        self.folder = folder
        self.run = folder / "runs" / "a run"
        self.books = self.run / "batch" / "1-ab"
        self.books.mkdir(parents=True)
        (folder / "bin").mkdir()
        text = submitted(
            {"venv": "", "site": "generic/slurm", **batch}, folder, str(self.run), str(self.books)
        )
        (folder / "job.sh").write_text(text.replace("cd /work/jobs ", f"cd {folder} "))
        self.program("squeue", "exit 1")

    def program(self, name: str, code: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!{BASH}\n{code}\n")
        path.chmod(0o755)

    def start(self, number: str, **variables: str) -> subprocess.Popen[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        surroundings = {
            "PATH": path,
            "SLURM_JOB_ID": number,
            "PBS_JOBID": number,
            "RUN": str(self.run),
            **variables,
        }
        command = [BASH, str(self.folder / "job.sh")]
        return subprocess.Popen(
            command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def job(self, number: str, launcher: str, **variables: str) -> tuple[int, str]:
        """Run a job whose srun does this; return its exit code and output."""
        self.program("srun", launcher)
        process = self.start(number, **variables)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def forgets(self) -> None:
        for name in ("over", "links"):
            (self.books / name).unlink(missing_ok=True)

    def links(self) -> list[str]:
        return [line.split(" ", 1)[1] for line in (self.books / "links").read_text().splitlines()]

    def over(self) -> str:
        path = self.books / "over"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, {"max_stalled": 2, "walltime": "30m"})


SAVES = 'one="$RUN/checkpoints/step-0000000{n}"; mkdir -p "$one"; touch "$one/MANIFEST.json"; '


def test_job_after_job_until_the_run_is_finished(machine: Machine) -> None:
    assert machine.job("1", SAVES.format(n=1) + "exit 75")[0] == 0, (
        "for the scheduler that is no failure"
    )
    assert machine.over() == ""
    assert machine.job("2", SAVES.format(n=2) + "exit 0")[0] == 0
    assert machine.over() == "the run is finished"
    code, said = machine.job("3", "echo started; exit 0")
    assert (code, said) == (0, "hpczero job: nothing is left to do: the run is finished\n")
    assert machine.links() == [
        "1 began none",
        "1 ended 75",
        "2 began step-00000001",
        "2 ended 0",
        "3 passed 0",
    ]


def test_a_wrong_input_ends_the_chain_and_is_a_failure(machine: Machine) -> None:
    assert machine.job("1", "exit 2")[0] == 2
    assert machine.over() == "the input is wrong (exit code 2)"
    assert machine.job("2", "echo started")[0] == 0
    assert machine.links()[-1] == "2 passed 0"


def test_a_crash_is_tried_again_as_long_as_there_is_progress(machine: Machine) -> None:
    for number in range(1, 5):
        assert machine.job(str(number), SAVES.format(n=number) + "exit 1")[0] == 1
    assert machine.over() == ""
    assert machine.job("5", "exit 137")[0] == 137
    assert machine.job("6", "echo started; exit 1") == (1, "started\n"), (
        "the second without a new checkpoint"
    )
    code, said = machine.job("7", "echo started")
    assert code == 0
    assert "no progress: 2 jobs in a row ended without a new checkpoint" in said
    assert machine.job("8", "echo started")[1].count("started") == 0


def test_a_job_that_was_killed_outright_counts_too(machine: Machine) -> None:
    """Nothing is written at its end; the next one sees that it began."""
    for number in ("1", "2"):
        machine.program("srun", 'while [ ! -e "$RUN/gone" ]; do sleep 0.05; done')
        process = machine.start(number)
        while (
            not (machine.books / "links").exists() or f"{number} began none" not in machine.links()
        ):
            time.sleep(0.05)
        process.kill()
        (machine.run / "gone").touch()
        process.communicate(timeout=60)
        (machine.run / "gone").unlink()
    assert machine.links() == ["1 began none", "2 began none"]
    assert "no progress" in machine.job("3", "exit 0")[1]


@pytest.mark.parametrize(
    "launchers", [143, 1]
)  # Open MPI's mpirun ends with 1 when it gets a SIGTERM
@pytest.mark.parametrize("state", ["stopped", "finished", "failed"])
def test_the_runs_own_word_counts_more_than_the_launchers(
    machine: Machine, state: str, launchers: int
) -> None:
    machine.run.joinpath("summary.json").write_text('{"state": "stopped"}')  # of an earlier job
    os.utime(machine.run / "summary.json", (1, 1))
    assert machine.job("1", f"exit {launchers}")[0] == launchers
    code = machine.job(
        "2", f'sleep 0.05; echo \'{{"state": "{state}"}}\' >"$RUN/summary.json"; exit {launchers}'
    )[0]
    assert code == (launchers if state == "failed" else 0)
    assert machine.over() == ("the run is finished" if state == "finished" else "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_asked_to_stop_it_asks_the_run_and_waits_for_it(machine: Machine, name: str) -> None:
    machine.program(
        "srun", 'touch "$RUN/up"; while [ ! -e "$RUN/stop" ]; do sleep 0.05; done; exit 75'
    )
    process = machine.start("1")
    while not (machine.run / "up").exists():
        time.sleep(0.05)
    process.send_signal(signal.Signals[name])
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert machine.links() == ["1 began none", "1 ended 75"]


def test_a_module_that_is_not_there_ends_the_chain(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"modules": ["nothing"]})
    machine.program("module", "exit 1")
    code, said = machine.job("1", "exit 0")
    assert (code, said) == (2, "hpczero job: these modules cannot be loaded: nothing\n")
    assert machine.links() == ["1 began none", "1 ended 2"]
    assert machine.over() == "these modules cannot be loaded: nothing"
    assert "nothing is left to do: these modules" in machine.job("2", "echo started")[1]
    assert machine.links()[-1] == "2 passed 0"


def test_when_the_job_ends_as_slurm_says_or_as_it_was_asked_for(machine: Machine) -> None:
    tells = 'echo "$HPCZERO_DEADLINE"'
    assert machine.job("1", tells, SLURM_JOB_END_TIME="1893456000")[1] == "1893456000\n"
    machine.forgets()
    machine.program("squeue", 'echo "2030-01-01T00:00:00"')
    assert machine.job("2", tells, TZ="UTC")[1] == "1893456000\n"
    machine.forgets()
    machine.program("squeue", "echo N/A")
    before = int(time.time())
    assert before + 1800 <= int(machine.job("3", tells)[1]) <= time.time() + 1800


def test_under_pbs_the_job_writes_its_log_itself(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"site": "generic/pbs"})
    machine.program("mpirun", "echo words; echo more >&2; exit 75")
    process = machine.start("17.headnode")
    assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)
    assert (machine.books / "log-17.headnode").read_text() == "words\nmore\n"


def test_a_lock_in_the_name_of_a_job_that_was_killed_is_nobodys(machine: Machine) -> None:
    """On a cluster it would count for ten minutes.

    The next job is on another computer, which cannot see that the process is gone.
    """

    def lock(job: str | None) -> str:
        return json.dumps(asdict(Holder("n7", "another kernel", 1, 0.0, "ada", "today", job)))

    asks = 'test -e "$RUN/lock" && echo locked; exit 1'
    assert machine.job("1", f"echo '{lock('1')}' >\"$RUN/lock\"; kill -9 $$")[0] == 137
    assert machine.job("2", asks)[1] == ""
    for job, said in (
        ("17", "locked\n"),
        (None, "locked\n"),
        ("4", ""),
    ):  # somebody else's, nobody's, this one's before it was requeued
        machine.forgets()
        (machine.books / "links").write_text("2026-01-05T10:00:00Z 4 began none\n")
        (machine.run / "lock").write_text(lock(job))
        assert machine.job("4", asks)[1] == said


def test_a_spec_may_set_any_variable(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    machine = Machine(
        tmp_path,
        {
            "env": dict.fromkeys(("run", "books", "me", "code", "ranks", "end"), str(elsewhere)),
            "setup": ["books=/nowhere"],
        },
    )
    assert machine.job("1", "exit 2")[0] == 2
    assert machine.links() == ["1 began none", "1 ended 2"]
    assert machine.over() == "the input is wrong (exit code 2)"
    assert not elsewhere.exists()


def test_the_time_that_the_setup_takes_counts(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path, {"site": "generic/pbs", "walltime": "30m", "setup": ["date +%s", "sleep 3"]}
    )
    machine.program("mpirun", 'echo "$HPCZERO_DEADLINE"')
    machine.start("17.headnode").communicate(timeout=60)
    begin, deadline = map(int, (machine.books / "log-17.headnode").read_text().split())
    assert deadline <= begin + 1800 + 1


def test_how_the_ranks_ended_is_known_though_a_signal_came_at_that_moment(machine: Machine) -> None:
    """A signal gives bash's wait another code.

    Asked again, bash may have forgotten the right one.
    """
    codes = []
    for number in range(8):
        codes.append(
            machine.job(
                str(number), 'read -r _ _ _ job _ <"/proc/$PPID/stat"; kill -USR2 "$job"; exit 3'
            )[0]
        )
        machine.forgets()
    assert codes == [3] * 8


def test_books_that_cannot_be_written_are_said(machine: Machine) -> None:
    (machine.books / "links").mkdir()
    code, said = machine.job("1", "echo started")
    assert code == 2
    assert f"hpczero job: {machine.books}/links cannot be written" in said
    assert "started" not in said


def test_the_setup_runs_where_the_job_was_rendered(tmp_path: Path) -> None:
    """Under PBS a job begins in the user's home; the run works there, wherever setup goes."""
    machine = Machine(tmp_path, {"setup": [". ./mine.sh", "cd /"]})
    (tmp_path / "mine.sh").write_text("export OF_MINE=here\n")
    code, said = machine.job("1", 'echo "$OF_MINE in $PWD"')
    assert (code, said) == (0, f"here in {tmp_path}\n")


@pytest.mark.parametrize("launchers", [143, 137, 1, 2])
def test_a_rank_that_found_the_input_wrong_ends_the_chain(machine: Machine, launchers: int) -> None:
    """srun kills the other ranks then, and ends with the code of one of those."""
    note = 'python3 -c "from hpczero import env; env.note_wrong_input()"; exit '
    here = str(CHECKOUT)
    assert machine.job("1", note + str(launchers), PYTHONPATH=here)[0] == 2
    assert machine.over() == "the input is wrong (exit code 2)"
    machine.forgets()
    assert machine.job("2", f"exit {launchers}")[0] == launchers, "the note is of one job"


def test_a_run_whose_folder_is_held_is_no_wrong_input(machine: Machine) -> None:
    held = "from hpczero.lock import RunLock; RunLock(sys.argv[1]).take_in_job()"
    here = "import hpczero.lock; hpczero.lock.PATIENCE = 0.5"
    with RunLock(machine.run):
        program = (
            f"import sys; {here}\ntry: {held}\nexcept Exception as error: sys.exit(error.exit_code)"
        )
        (machine.folder / "take.py").write_text(program)
        take = f'{sys.executable} {machine.folder / "take.py"} "$RUN"'
        code, said = machine.job("1", take, PYTHONPATH=str(CHECKOUT))
    assert code == 1
    assert "waiting: the run directory" in said
    assert machine.over() == "", "the next job may have it"
