"""Fake qsub, qstat, qrls and qdel over a folder that stands for the queue. Their answers have the form of PBS Professional's:
they were written by hand, and held against records that users of PBS sites have published. `qstat -u` cuts the server's name.

A job is a folder `<number>`: `words` (of qsub), `state`. Files in the folder of the queue change what they do: `lose` (the next qsub enters the job,
then dies without an answer), `refuse` (its content is the error), `deaf` (nobody answers), `forgetful` (no history of ended jobs is kept).
"""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import sys, time
from pathlib import Path
queue, program, words = Path({queue!r}), Path(sys.argv[0]).name, sys.argv[1:]
with (queue / "calls").open("a") as file:
    file.write(program + " " + " ".join(words) + "\\n")

def end(code, text=""):
    print(text, file=sys.stderr)
    sys.exit(code)

def jobs():
    return sorted((path for path in queue.iterdir() if path.is_dir()), key=lambda path: int(path.name.split(".")[0]))

if (queue / "deaf").exists():
    end(111, "Connection refused\\nqstat: cannot connect to server pbs (errno=111)")
if program == "qsub":
    if (queue / "refuse").exists():
        end(166, (queue / "refuse").read_text())
    number = str(17 + len(jobs())) + ".pbs"
    job = queue / number
    job.mkdir()
    (job / "words").write_text("\\n".join(words))
    (job / "state").write_text("H" if "-h" in words or "-W" in words else "Q")
    (job / "script").write_text(Path(words[-1]).read_text())
    if (queue / "lose").exists():
        (queue / "lose").unlink()
        end(15, "qsub: Connection timed out")
    print(number)
elif program == "qstat" and "-u" in words:
    print("\\npbs:\\n                                                            Req'd  Req'd   Elap")
    print("Job ID          Username Queue    Jobname    SessID NDS TSK Memory Time  S Time\\n--------------- -------- -------- ---")
    for job in jobs():
        if (job / "state").read_text() in "QHRE":
            print(f"{{job.name.split('.')[0] + '.p*':<15}} ada      workq    a-run         --    2   4    --  01:00 Q   --")
elif program == "qstat":
    unknown, forgetful = 0, (queue / "forgetful").exists()
    if forgetful and "-x" in words:
        end(1, "qstat: PBS is not configured to maintain job history")
    for name in words:
        if name.startswith("-"):
            continue
        name += "" if "." in name else ".pbs"
        job = queue / name
        if not (job / "state").exists() or (forgetful and (job / "state").read_text() == "F"):
            unknown = 153
            print(f"qstat: Unknown Job Id {{name}}", file=sys.stderr)
            continue
        state = (job / "state").read_text()
        tags = [line.split("-v ")[1].split(",")[0] for line in (job / "script").read_text().splitlines() if line.startswith("#PBS -v HPCZERO")]
        print(f"Job Id: {{name}}\\n    Job_Name = a-run\\n    Job_Owner = ada@login\\n    job_state = {{state}}")
        if state in "QH":
            print("    comment = Not Running: Insufficient amount of resource: ncpus (R: 8\\n\\t A: 0 T: 16)")
        if state == "F":
            print("    Exit_status = 271")
        print("    Variable_List = PBS_O_HOME=/home/ada,PBS_O_LANG=C," + "".join(tags[:1]) + ",\\n\\tPBS_O_QUEUE=workq\\n")
    sys.exit(unknown)
else:
    for name in words:
        job = queue / name
        if not job.exists():
            end(153, f"{{program}}: Unknown Job Id {{name}}")
        (job / "state").write_text("Q" if program == "qrls" else "F")
"""


def install(folder: Path) -> Path:
    """Makes `folder/bin` with the programs; the queue's folder."""
    queue, programs = folder / "queue", folder / "bin"
    queue.mkdir(parents=True)
    programs.mkdir()
    for name in ("qsub", "qstat", "qrls", "qdel"):
        path = programs / name
        path.write_text(_PROGRAM.format(python=sys.executable, queue=str(queue)))
        path.chmod(0o755)
    return queue


def state(queue: Path, number: str, becomes: str | None = None) -> str:
    """Of a job; changed, where a new one is given."""
    path = queue / number / "state"
    if becomes:
        path.write_text(becomes)
    return path.read_text()


def calls(queue: Path, program: str) -> list[str]:
    path = queue / "calls"
    return [line for line in path.read_text().splitlines() if line.startswith(program + " ")] if path.exists() else []
