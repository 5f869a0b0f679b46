"""The record of a submission: the folder `<run>/batch/<time>-<id>/`.

    submission.json   this record; written before the first job is submitted, and again after each
    spec.toml         the resolved spec
    job.sh            the script
    log-<job>         the job's output
    <job>.OU          PBS: its own message, as for a job that it killed; for tasks of an array it
                      lies in <sweep>/batch/<time>-<id>, under Slurm too
    links             a line for each event of a job: time, job, event, detail:
                      `began` and the newest checkpoint, `ended` and the exit code, or `passed`
    code              the exit code of the newest job's launcher
    wrong             a rank of the newest job found the input wrong, whatever its launcher said
    over              why nothing is left to do (the jobs that follow then end at once)

Beside these folders lies `lock`, while somebody submits the run. The environment is never kept, nor
any value of batch.env_pass.
"""

import contextlib
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from hpczero import env, safe_files
from hpczero.batch.command import QueuedJob
from hpczero.batch.scheduler import SCHEDULERS
from hpczero.errors import HpczeroError

_LONGEST = 16 << 20  # bytes of a file that are read
_NUMBER = re.compile(r"\d{1,20}(_\d{1,10}|\[\d*\])?(\.[\w.-]{1,255})?")
_FOLDER = re.compile(r"^\d{8}T\d{6}(\d{6})?-[0-9a-f]{12}$")  # older ones lack microseconds


@dataclass(frozen=True)
class Submission:
    path: Path  # the folder
    id: str  # unique: part of each job's tag
    scheduler: str
    site: str
    nodes: int
    ranks: int
    walltime: int  # seconds
    chain: int
    submitted: str  # UTC
    task: int = -1  # of an array of jobs, which is several runs' in common; -1: of none
    complete: bool = False  # all jobs of the chain are in the queue
    jobs: tuple[str, ...] = field(default=())

    @classmethod
    def new(
        cls, run: Path, scheduler: str, site: str, nodes: int, ranks: int, walltime: int, chain: int
    ) -> "Submission":
        now = datetime.now(UTC)
        token = secrets.token_hex(6)
        path = run / "batch" / f"{now:%Y%m%dT%H%M%S%f}-{token}"
        submitted = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(path, token, scheduler, site, nodes, ranks, walltime, chain, submitted)

    @property
    def run(self) -> Path:
        return self.path.parent.parent

    def tag(self, link: int) -> str:
        """Return the text by which a job is found in the queue if its number is unknown."""
        return f"hpczero:{self.id}:{link}"

    def owns(self, job: QueuedJob) -> bool:
        """Return True if the job's tag is that of this record; those of an array share one."""
        if not job.tag.startswith(f"hpczero:{self.id}:"):
            return False
        return self.task < 0 or SCHEDULERS[self.scheduler].task_of(job.number)[1] == self.task

    def command(self, link: int, after: str, held: bool) -> list[str]:
        """Return the command that submits a job of the chain."""
        kind = SCHEDULERS[self.scheduler]
        script = self.path / "job.sh"
        return list(kind.submission(script, self.path, self.tag(link), after, held))

    def entered(self, number: str) -> str:
        """Return the number to keep of a job that is in the queue under this one."""
        return number

    def with_job(self, number: str) -> "Submission":
        jobs = (*self.jobs, number)
        return replace(self, jobs=jobs, complete=len(jobs) == self.chain)

    def log(self, job: str) -> Path:
        return self.path / f"log-{job}"

    def message_file(self, job: str) -> Path:
        """Return the file for the message of the scheduler on a job that it ends."""
        folder = self.path if self.task < 0 else self.run.parent / "batch" / self.path.name
        return folder / f"{job}.OU"

    @property
    def last_event_time(self) -> float:
        """The last time that a job ended, or nothing was left to do, in seconds since 1970.

        Infinity while a job has begun and not ended.
        """
        moments = [0.0]
        for time, _, event, _ in self.events():
            with contextlib.suppress(ValueError, OverflowError):
                if event == "began":
                    moments.append(math.inf)
                    continue
                moments.append(datetime.fromisoformat(time).timestamp())
                if event == "ended":
                    moments = [moment for moment in moments if moment < math.inf]
        with contextlib.suppress(OSError):
            moments.append((self.path / "over").stat().st_mtime)
        return max(moments)

    def events(self) -> list[tuple[str, str, str, str]]:
        """Return the lines of `links`: time, job, event, detail; malformed ones are left out."""
        try:
            lines = _text(self.path / "links").splitlines()
        except OSError:
            return []
        split = [line.split(" ", 3) for line in lines]
        return [(words[0], words[1], words[2], words[3]) for words in split if len(words) == 4]

    def unsettled(self) -> list[str]:
        """Return, in order, the jobs whose end is not in the record: only the scheduler knows."""
        last = self.last_events()
        return [job for job in self.jobs if last.get(job) not in ("0", "2", "75", "passed")]

    def last_events(self) -> dict[str, str]:
        """Return job -> "began", "passed" or, once it has ended, its exit code."""
        return {
            job: detail if event == "ended" else event for _, job, event, detail in self.events()
        }

    @property
    def closed_reason(self) -> str:
        """The reason why nothing is left to do; empty while something is."""
        try:
            return _text(self.path / "over").strip()
        except OSError:
            return ""

    def close(self, reason: str) -> None:
        """Leave nothing to do for the jobs that have not begun."""
        try:
            safe_files.write_text(self.path / "over", reason + "\n")
        except OSError as error:
            raise HpczeroError(f"cannot write {self.path / 'over'}: {error.strerror}") from error

    def write(self) -> None:
        values = {name: value for name, value in asdict(self).items() if name != "path"}
        try:
            text = json.dumps(values, indent=2) + "\n"
            safe_files.write_text(self.path / "submission.json", text)
        except OSError as error:
            raise HpczeroError(
                f"cannot write {self.path / 'submission.json'}: {error.strerror}"
            ) from error

    @classmethod
    def read(cls, path: Path) -> "Submission | None":
        """Return None for a folder that no version of hpczero wrote."""
        try:
            values = json.loads(_text(path / "submission.json"))
            record = cls(path=path, **{**values, "jobs": tuple(map(str, values["jobs"]))})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return record if record._is_sound() else None

    def _is_sound(self) -> bool:
        """Return True if the values can be used: job numbers become words of commands."""
        counts = (self.nodes, self.ranks, self.walltime, self.chain)
        texts = (self.id, self.site, self.submitted)
        return (
            all(type(count) is int and 0 <= count < 10**12 for count in counts)
            and (type(self.task) is int and -1 <= self.task < 10**9)
            and all(isinstance(text, str) for text in texts)
            and self.scheduler in tuple(SCHEDULERS)
            and all(_NUMBER.fullmatch(job) for job in self.jobs)
        )


@dataclass(frozen=True)
class ArraySubmission:
    """One array of jobs, each task the run of one of these records. It has no record of its own.

    Its script lies in `<sweep>/batch/<time>-<id>`; each run's folder has one as if it were alone.
    """

    members: tuple[Submission, ...]
    jobs: tuple[str, ...] = ()
    chain: int = 1

    @property
    def path(self) -> Path:
        first = self.members[0]
        return first.run.parent / "batch" / first.path.name

    @property
    def scheduler(self) -> str:
        return self.members[0].scheduler

    def tag(self, link: int) -> str:
        return self.members[0].tag(link)

    def owns(self, job: QueuedJob) -> bool:
        return any(member.owns(job) for member in self.members)

    def command(self, link: int, after: str, held: bool) -> list[str]:
        kind = SCHEDULERS[self.scheduler]
        script = self.path / "job.sh"
        return list(kind.submission(script, self.path, self.tag(link), after, held, array=True))

    def entered(self, number: str) -> str:
        array, _ = SCHEDULERS[self.scheduler].task_of(number)
        return str(array)

    def with_job(self, number: str) -> "ArraySubmission":
        kind = SCHEDULERS[self.scheduler]
        members = [one.with_job(kind.task_number(number, one.task)) for one in self.members]
        return replace(self, members=tuple(members), jobs=(number,))

    def write(self) -> None:
        for member in self.members:
            member.write()


def _text(path: Path) -> str:
    """Return the beginning of a plain file; raise OSError for a pipe."""
    with os.fdopen(safe_files.open_to_read(path), "rb") as file:
        return file.read(_LONGEST).decode("utf-8", "replace")


def of_run(run: Path) -> list[Submission]:
    """Return the run's submissions, the oldest first."""
    folders = sorted(path for path in (run / "batch").glob("*") if _FOLDER.match(path.name))
    return [record for path in folders if (record := Submission.read(path))]


def remember(runs: Sequence[Path]) -> None:
    """Add the runs to the list of the user's runs.

    Their jobs are in the queue already, so that a failure is only a warning.
    """
    known = remembered()
    if new := [run for run in runs if run not in known]:
        try:
            safe_files.make_own_folder(env.state_folder())
            with safe_files.append_to(env.state_folder() / "runs") as file:
                file.write("".join(json.dumps(str(run)) + "\n" for run in new))
        except OSError as error:
            without = f"hpczero status without an argument will not show {new[0]}"
            print(
                f"hpczero: cannot write {env.state_folder() / 'runs'}: {error.strerror}; {without}",
                file=sys.stderr,
            )


def remembered() -> list[Path]:
    """Return the runs that were submitted from this computer and still exist."""
    try:
        lines = _text(env.state_folder() / "runs").splitlines()
    except OSError:
        return []
    runs: list[Path] = []
    for line in lines:
        try:
            path = Path(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue
        if path not in runs and (path / "batch").is_dir():
            runs.append(path)
    return runs
