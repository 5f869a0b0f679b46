"""A PBS over a folder that stands for its queue: what qsub, qstat, qrls and qdel do and print.

It agrees with what OpenPBS 23.06 printed (tests/batch/pbs, compared by test_fake_pbs.py).

A job is a folder `<number>`: `words` (of qsub), `script`, `state`, `after` (the job that it depends
on), `variables` (those of -v, as PBS hands them over), `end` (substate, exit status and comment of an
ended job, as JSON). Files in the folder of the queue change what happens: `lose` (the next qsub enters
the job, then dies without an answer), `refuse` (its content is the error), `deaf` (the server is
down), `forgetful` (no history of ended jobs is kept).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

SERVER = "headnode"
QUOTES = "\"'"
_HEAD = f"""
{SERVER}: 
                                                            Req'd  Req'd   Elap
Job ID          Username Queue    Jobname    SessID NDS TSK Memory Time  S Time
--------------- -------- -------- ---------- ------ --- --- ------ ----- - -----
"""  # noqa: W291 (PBS prints the blank)
_NO_HISTORY = "PBS is not configured to maintain job history"
_FINISHED = "Job has finished, use -x or -H to obtain historical job information"


def end(code: int, text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(code)


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, folder.name

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def write(self, **values: str) -> None:
        for name, value in values.items():
            (self.folder / name).write_text(value)

    @property
    def state(self) -> str:
        return self.read("state")

    @property
    def end(self) -> dict[str, Any]:
        """End a job for a test, as if it had finished by itself."""
        finished = {
            "substate": 92,
            "Exit_status": 0,
            "comment": "Job run at Sun Nov 22 at 19:22 on (cn02:ncpus=2) and finished",
        }
        found: dict[str, Any] = json.loads(self.read("end") or json.dumps(finished))
        return found

    def ends(self, substate: int, status: int | None = None, comment: str = "") -> None:
        said = {"substate": substate, "Exit_status": status, "comment": comment}
        self.write(
            state="F",
            end=json.dumps(
                {name: value for name, value in said.items() if value not in (None, "")}
            ),
        )

    def attributes(self) -> list[tuple[str, object]]:
        state, after, ended = self.state, self.read("after"), self.end if self.state == "F" else {}
        found: list[tuple[str, object]] = [
            ("Job_Name", "a-run"),
            ("Job_Owner", f"user@{SERVER}.hpc.example"),
            ("job_state", state),
        ]
        found += [("queue", "workq"), ("server", SERVER)]
        found += [("depend", f"afterany:{after}@{SERVER}")] if after else []
        found += [("Execution_Time", "Thu Dec 31 23:59:00 2026")] if state == "W" else []
        found += [
            ("Hold_Types", "n" if state != "H" else "s" if after else "u"),
            ("Join_Path", "oe"),
        ]
        found += (
            [("stime", "Sun Nov 22 19:22:06 2026")]
            if state in "RES" or "Exit_status" in ended
            else []
        )
        found += [
            ("substate", ended.get("substate", {"W": 30, "H": 22, "R": 42, "S": 43}.get(state, 10)))
        ]
        found += [
            (
                "Variable_List",
                "PBS_O_HOME=/home/user,PBS_O_SYSTEM=Linux,"
                f"{self.read('variables')}PBS_O_QUEUE=workq",
            )
        ]
        waiting = "Not Running: Insufficient amount of resource: ncpus (R: 8 A: 0 T: 16)"
        comment = {"Q": waiting, "R": "Job run at Sun Nov 22 at 19:22 on (cn02:ncpus=2)"}.get(
            state, ended.get("comment")
        )
        found += [("comment", comment)] if comment else []
        found += [("Exit_status", ended["Exit_status"])] if "Exit_status" in ended else []
        return found

    def shown(self) -> str:
        lines = [f"Job Id: {self.number}"]
        for name, value in self.attributes():
            first, *more = wrapped(f"    {name} = {value}")
            lines += [first, *(f"\t{part}" for part in more)]
        return "\n".join(lines) + "\n"


def wrapped(line: str) -> list[str]:
    """PBS breaks at 79 columns, whatever stands there; what goes on begins with a tab."""
    return [line[:79], *(line[begin : begin + 72] for begin in range(79, len(line), 72))]


def handed_over(name: str, value: str) -> str:
    """Return what becomes of a value in `qsub -v NAME`."""
    if value.count('"') % 2 or value.count("'") % 2:
        end(1, "qsub: cannot send environment with the job")
    doubled = value.rstrip().replace("\\", "\\\\")
    return f"{name}={doubled.translate({ord(quote): chr(92) for quote in QUOTES})}"


class Server:
    def __init__(self, queue: Path) -> None:
        self.queue = queue
        self.history = not (queue / "forgetful").exists()

    def jobs(self) -> list[Job]:
        folders = [path for path in self.queue.iterdir() if path.is_dir()]
        return [
            Job(path) for path in sorted(folders, key=lambda path: int(path.name.split(".")[0]))
        ]

    def find(self, word: str) -> Job | None:
        """Find the job by its number; an ended one only where history is kept."""
        folder = self.queue / (word if "." in word else f"{word}.{SERVER}")
        known = (folder / "state").exists()
        return Job(folder) if known and (self.history or Job(folder).state != "F") else None

    def settle(self) -> None:
        """Let jobs go whose predecessor has ended; behind one that never began they stay held."""
        for job in self.jobs():
            if job.state == "H" and (after := job.read("after")):
                before = Job(self.queue / after)
                if not before.folder.exists():
                    job.ends(92)
                elif before.state == "F" and (
                    before.end["substate"] != 91 or "Exit_status" in before.end
                ):
                    job.write(state="Q")

    def qsub(self, words: list[str]) -> None:
        if (self.queue / "refuse").exists():
            end(166, (self.queue / "refuse").read_text())
        script = Path(words[-1]).read_text()
        named = [
            line.removeprefix("#PBS -v ")
            for line in script.splitlines()
            if line.startswith("#PBS -v ")
        ]
        entries = [entry for line in named for entry in line.split(",")]
        variables = [
            entry if "=" in entry else handed_over(entry, os.environ.get(entry, ""))
            for entry in entries
        ]
        number = f"{17 + len(self.jobs())}.{SERVER}"
        after = next(
            (word.partition(":")[2] for word in words if word.startswith("depend=afterany:")), ""
        )
        (self.queue / number).mkdir()
        job = Job(self.queue / number)
        job.write(
            words="\n".join(words),
            script=script,
            after=after,
            variables="".join(f"{entry}," for entry in variables),
        )
        job.write(state="H" if "-h" in words or after else "Q")
        if after and not self.find(after):
            job.ends(92)
        self.settle()
        if (self.queue / "lose").exists():
            (self.queue / "lose").unlink()
            end(15, "qsub: Connection timed out")
        print(number)

    def qstat(self, words: list[str]) -> None:
        if "-u" in words:
            lines = [
                f"{job.number:<15.15} user      workq    a-run         "
                f"--    1   2    --  00:05 {job.state}   -- "
                for job in self.jobs()
                if job.state != "F"
            ]
            print(_HEAD + "\n".join(lines) if lines else "", end="\n" if lines else "")
            return
        code = 0
        for word in (word for word in words if not word.startswith("-")):
            number = word if "." in word else f"{word}.{SERVER}"
            job = self.find(word)
            if "-x" in words and not self.history:
                print(f"qstat: {_NO_HISTORY} {number}", file=sys.stderr)
            elif not job:
                code = 153
                print(f"qstat: Unknown Job Id {number}", file=sys.stderr)
            elif job.state == "F" and "-x" not in words:
                code = 35
                print(f"qstat: {number} {_FINISHED}", file=sys.stderr)
            else:
                print(job.shown())
        sys.exit(code)

    def qrls(self, words: list[str]) -> None:
        for word in words:
            job = self.find(word)
            if not job:
                end(153, f"qrls: Unknown Job Id {word}")
            job.write(state="Q")

    def qdel(self, words: list[str]) -> None:
        code = 0
        for word in words:
            job = self.find(word)
            if not job:
                code = 153
                print(f"qdel: Unknown Job Id {word}", file=sys.stderr)
            elif job.state == "F":
                code = 35
                print(f"qdel: Job has finished {word}", file=sys.stderr)
            else:
                self.delete(job)
        self.settle()
        sys.exit(code)

    def delete(self, job: Job) -> None:
        """With a job that is held for another, those go that are held for it."""
        held = job.state == "H" and job.read("after")
        if job.state in "RES":
            job.ends(
                91,
                271,
                "Job run at Sun Nov 22 at 19:40 on (cn01:ncpus=1) "
                f"and terminated by user@{SERVER}.hpc.example",
            )
        else:
            job.ends(91)
        for other in self.jobs() if held else []:
            if other.read("after") == job.number and other.state == "H":
                self.delete(other)
                other.ends(92)


def main(queue: str) -> None:
    program, words = Path(sys.argv[0]).name, sys.argv[1:]
    with (Path(queue) / "calls").open("a") as file:
        file.write(program + " " + " ".join(words) + "\n")
    if (Path(queue) / "deaf").exists():
        end(
            255 if program == "qstat" else 162,
            f"Connection refused\n{program}: cannot connect to server {SERVER} (errno=15010)",
        )
    getattr(Server(Path(queue)), program)(words)
