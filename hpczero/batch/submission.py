"""What is kept of a submission: the folder `<run>/batch/<time>-<id>/`.

    submission.json   this record; written before the first job is submitted, and again after each
    spec.toml         the resolved spec        job.sh   the script
    log-<job>         what the job printed
    links             a line for each thing that happened to a job: time, job, `began` and the newest checkpoint, `ended` and the exit code, `passed`
    code              how the ranks of the newest job ended
    over              why nothing is left to do (then the jobs that follow end at once)

Beside these folders lies `lock`, while somebody submits the run. The environment is never kept, nor any value of batch.env_pass.
"""

import json
import re
import secrets
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from hpczero import env
from hpczero.errors import HpczeroError

_FOLDER = re.compile(r"^\d{8}T\d{6}-[0-9a-f]{12}$")


@dataclass(frozen=True)
class Submission:
    path: Path  # its folder
    id: str  # unique: part of each job's tag
    scheduler: str
    site: str
    nodes: int
    ranks: int
    walltime: int  # seconds
    chain: int
    submitted: str  # UTC
    complete: bool = False  # all jobs of the chain are in the queue
    jobs: tuple[str, ...] = field(default=())

    @classmethod
    def new(cls, run: Path, scheduler: str, site: str, nodes: int, ranks: int, walltime: int, chain: int) -> "Submission":
        now = datetime.now(UTC)
        own = secrets.token_hex(6)
        path = run / "batch" / f"{now:%Y%m%dT%H%M%S}-{own}"
        return cls(path, own, scheduler, site, nodes, ranks, walltime, chain, now.strftime("%Y-%m-%dT%H:%M:%SZ"))

    @property
    def run(self) -> Path:
        return self.path.parent.parent

    def tag(self, link: int) -> str:
        """By which a job is found in the queue whose number was never heard of."""
        return f"hpczero:{self.id}:{link}"

    def owns(self, tag: str) -> bool:
        return tag.startswith(f"hpczero:{self.id}:")

    def with_job(self, number: str) -> "Submission":
        jobs = (*self.jobs, number)
        return replace(self, jobs=jobs, complete=len(jobs) == self.chain)

    def log(self, job: str) -> Path:
        return self.path / f"log-{job}"

    def events(self) -> list[tuple[str, str, str, str]]:
        """The lines of `links`: time, job, event, detail; nonsense is left out."""
        try:
            lines = (self.path / "links").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found = [line.split(" ", 3) for line in lines]
        return [(words[0], words[1], words[2], words[3]) for words in found if len(words) == 4]

    def unsettled(self) -> list[str]:
        """Its jobs of which only the scheduler can tell more: all but those that have said themselves how they ended, in order."""
        told = {number: detail if event == "ended" else event for _, number, event, detail in self.events()}
        return [number for number in self.jobs if told.get(number) not in ("0", "2", "75", "passed")]

    @property
    def over(self) -> str:
        """Why nothing is left to do; empty as long as something is."""
        try:
            return (self.path / "over").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def close(self, reason: str) -> None:
        """Its jobs that have not begun will find nothing to do."""
        try:
            (self.path / "over").write_text(reason + "\n", encoding="utf-8")
        except OSError as error:
            raise HpczeroError(f"cannot write {self.path / 'over'}: {error.strerror}") from error

    def write(self) -> None:
        values = {name: value for name, value in asdict(self).items() if name != "path"}
        temporary = self.path / "submission.json.new"
        try:
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            temporary.replace(self.path / "submission.json")
        except OSError as error:
            raise HpczeroError(f"cannot write {self.path / 'submission.json'}: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> "Submission | None":
        """None for a folder in which no version of hpczero wrote."""
        try:
            values = json.loads((path / "submission.json").read_text(encoding="utf-8"))
            return cls(path=path, **{**values, "jobs": tuple(map(str, values["jobs"]))})
        except (OSError, ValueError, TypeError, KeyError):
            return None


def of_run(run: Path) -> list[Submission]:
    """The oldest first."""
    folders = sorted(path for path in (run / "batch").glob("*") if _FOLDER.match(path.name))
    return [found for path in folders if (found := Submission.read(path))]


def remember(run: Path) -> None:
    """Enters the run into the list of the user's runs. Its jobs are in the queue: that the list cannot be written must not look like a failure."""
    if run not in remembered():
        try:
            env.state_folder().mkdir(parents=True, exist_ok=True)
            with (env.state_folder() / "runs").open("a", encoding="utf-8") as file:
                file.write(json.dumps(str(run)) + "\n")
        except OSError as error:
            without = f"hpczero status without an argument will not show {run}"
            print(f"hpczero: cannot write {env.state_folder() / 'runs'}: {error.strerror}; {without}", file=sys.stderr)


def remembered() -> list[Path]:
    """The runs that were submitted from here and are still there."""
    try:
        lines = (env.state_folder() / "runs").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            path = Path(json.loads(line))
        except (ValueError, TypeError):
            continue
        if path not in found and (path / "batch").is_dir():
            found.append(path)
    return found
