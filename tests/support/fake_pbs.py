"""A fake PBS: qsub, qstat, qrls and qdel over a folder that stands for the queue.

It prints what OpenPBS 23.06 printed (tests/unit/batch/pbs, compared by test_fake_pbs.py).

A job is a folder `<number>` with the files
    words       the arguments of qsub
    script      the batch script
    state       the letter of its state
    after       the job that it depends on
    variables   those of -v, as PBS hands them over
    end         substate, exit status and comment of an ended job, as JSON

An array (#PBS -J 0-N) is a folder `<number>[]`, and one such as `<number>[0]` for each task. Its
words follow the manuals of PBS: no array of a real one was seen.

Files in the folder of the queue change what happens:
    lose        the next qsub enters the job, then dies without an answer
    refuse      qsub fails; the content is the error
    deaf        the server is down
    forgetful   no history of ended jobs is kept
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

SERVER = "headnode"
_NUMBERS = re.compile(r"\d+")
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

    @property
    def task(self) -> str:
        """The number of a task in its array; "" for other jobs."""
        found = re.search(r"\[(\d+)\]", self.number)
        return found[1] if found else ""

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
        """The facts of an ended job; by default it finished by itself."""
        finished = {
            "substate": 92,
            "Exit_status": 0,
            "comment": "Job run at Sun Nov 22 at 19:22 on (cn02:ncpus=2) and finished",
        }
        facts: dict[str, Any] = json.loads(self.read("end") or json.dumps(finished))
        return facts

    def ends(self, substate: int, status: int | None = None, comment: str = "") -> None:
        facts = {"substate": substate, "Exit_status": status, "comment": comment}
        given = {name: value for name, value in facts.items() if value not in (None, "")}
        self.write(state="F", end=json.dumps(given))

    def attributes(self) -> dict[str, object]:
        """Return the attributes that `qstat -f` prints, in its order."""
        state = self.state
        after = self.read("after")
        ended = self.end if state == "F" else {}
        attributes: dict[str, object] = {
            "Job_Name": "a-run",
            "Job_Owner": f"user@{SERVER}.hpc.example",
            "job_state": state,
            "queue": "workq",
            "server": SERVER,
        }
        if after:
            attributes["depend"] = f"afterany:{after}@{SERVER}"
        if state == "W":
            attributes["Execution_Time"] = "Thu Dec 31 23:59:00 2026"
        attributes["Hold_Types"] = "n" if state != "H" else "s" if after else "u"
        attributes["Join_Path"] = "oe"
        if state in "RES" or "Exit_status" in ended:
            attributes["stime"] = "Sun Nov 22 19:22:06 2026"
        substate = {"W": 30, "H": 22, "R": 42, "S": 43}.get(state, 10)
        attributes["substate"] = ended.get("substate", substate)
        variables = f"{self.read('variables')}PBS_O_QUEUE=workq"
        attributes["Variable_List"] = f"PBS_O_HOME=/home/user,PBS_O_SYSTEM=Linux,{variables}"
        waiting = "Not Running: Insufficient amount of resource: ncpus (R: 8 A: 0 T: 16)"
        comments = {"Q": waiting, "R": "Job run at Sun Nov 22 at 19:22 on (cn02:ncpus=2)"}
        if comment := comments.get(state, ended.get("comment")):
            attributes["comment"] = comment
        if "Exit_status" in ended:
            attributes["Exit_status"] = ended["Exit_status"]
        return attributes

    def shown(self) -> str:
        lines = [f"Job Id: {self.number}"]
        for name, value in self.attributes().items():
            first, *more = wrapped(f"    {name} = {value}")
            lines += [first, *(f"\t{piece}" for piece in more)]
        return "\n".join(lines) + "\n"


def wrapped(line: str) -> list[str]:
    """Break a line at 79 columns, whatever stands there; PBS goes on behind a tab."""
    return [line[:79], *(line[begin : begin + 72] for begin in range(79, len(line), 72))]


def handed_over(name: str, value: str) -> str:
    """Return NAME=value as `qsub -v NAME` hands it over."""
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
            Job(path)
            for path in sorted(
                folders, key=lambda path: [int(n) for n in _NUMBERS.findall(path.name)]
            )
        ]

    def find(self, word: str) -> Job | None:
        """Find the job by its number; an ended one only where history is kept."""
        folder = self.queue / (word if "." in word else f"{word}.{SERVER}")
        known = (folder / "state").exists()
        return Job(folder) if known and (self.history or Job(folder).state != "F") else None

    def settle(self) -> None:
        """Release the jobs behind one that has ended; if it never began, they stay held."""
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
        variables = ""
        for line in script.splitlines():
            for entry in line[8:].split(",") if line.startswith("#PBS -v ") else ():
                named = "=" not in entry
                value = handed_over(entry, os.environ.get(entry, "")) if named else entry
                variables += f"{value},"
        first = 17 + len({job.number.split(".")[0].split("[")[0] for job in self.jobs()})
        array = re.search(r"^#PBS -J 0-(\d+)", script, re.MULTILINE)
        number = f"{first}[].{SERVER}" if array else f"{first}.{SERVER}"
        after = next(
            (word.partition(":")[2] for word in words if word.startswith("depend=afterany:")), ""
        )
        tasks = range(int(array[1]) + 1) if array else ()
        for name in (number, *(number.replace("[]", f"[{task}]") for task in tasks)):
            (self.queue / name).mkdir()
            job = Job(self.queue / name)
            job.write(words="\n".join(words), script=script, after=after, variables=variables)
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
                if job.state != "F" and ("-t" in words or not job.task)
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
                whole = job.number.partition("[]")
                its = [one for one in self.jobs() if one.number.startswith(whole[0] + "[")]
                for one in its if whole[1] else [job]:
                    self.delete(one)
        self.settle()
        sys.exit(code)

    def delete(self, job: Job) -> None:
        """Delete a job; along with one that is held for another, those that are held for it."""
        held = job.state == "H" and job.read("after")
        if job.state in "RES":
            ran = "Job run at Sun Nov 22 at 19:40 on (cn01:ncpus=1)"
            job.ends(91, 271, f"{ran} and terminated by user@{SERVER}.hpc.example")
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
        error = f"cannot connect to server {SERVER} (errno=15010)"
        end(255 if program == "qstat" else 162, f"Connection refused\n{program}: {error}")
    getattr(Server(Path(queue)), program)(words)
