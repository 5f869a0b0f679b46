"""A user of a real Slurm: submits runs, watches them, and reads what they leave."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.launch import CHECKOUT, hpczero
from tests.support.slurm import await_that

SPEC = """
output = "runs"
data.source = "synthetic"
model = { layers = 2, hidden = 32, heads = 2, seq_len = 32 }
train = { steps = 30, global_batch = 8, micro_batch = 4, device = "cpu", precision = "fp32" }
checkpoint = { every = 10, keep = 0 }

[batch]
site = "generic/slurm"
nodes = 2
ranks_per_node = 1
walltime = "10m"
env_pass = ["PYTHONPATH"]
setup = ["export PATH={path}:$PATH"]
"""


# On a busy machine Slurm 22.05's mpi/pmi2 sometimes cuts MPICH's messages, and the ranks abort at
# their start (docs/log.md). Tests that are not about srun start their jobs with mpirun; tests that
# use srun give the chain a job to spare.
LAUNCHERS = {
    "srun": ["--set", 'batch.launch_options=["--mpi=pmi2"]'],
    "mpirun": ["--set", "batch.launcher=mpirun"],
}


def mpich() -> bool:
    """Return True if this environment's mpirun is MPICH's."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    return (
        bool(program)
        and "HYDRA"
        in subprocess.run(
            [str(program), "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    )


class User:
    """A user with a folder, a spec and a shell."""

    def __init__(self, folder: Path, slurm: dict[str, str]) -> None:
        self.folder = folder
        path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "numba_cuda")])
        self.variables = {
            **os.environ,
            **slurm,
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONPATH": path,
        }
        (folder / "spec.toml").write_text(SPEC.replace("{path}", str(Path(sys.executable).parent)))

    def does(self, *words: str, code: int = 0, first: str = "") -> str:
        """Run a command and return its output. `first`: a folder to put first in PATH."""
        variables = self.variables | (
            {"PATH": first + os.pathsep + self.variables["PATH"]} if first else {}
        )
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def submits(self, name: str, *options: str, launcher: str = "mpirun", first: str = "") -> None:
        self.does(
            *hpczero(
                "submit", "spec.toml", "--set", f"name={name}", *LAUNCHERS[launcher], *options
            ),
            first=first,
        )

    def status(self, name: str) -> dict[str, Any]:
        shutil.rmtree(self.folder / "state" / "hpczero" / "slurm.json", ignore_errors=True)
        (self.folder / "state" / "hpczero" / "slurm.json").unlink(missing_ok=True)  # asked anew
        found: dict[str, Any] = json.loads(self.does(*hpczero("status", f"runs/{name}", "--json")))
        return found

    def waits(
        self, name: str, until: Callable[[dict[str, Any]], object], what: str
    ) -> dict[str, Any]:
        seen: list[dict[str, Any]] = [{}]

        def reached() -> bool:
            seen[0] = self.status(name)
            return bool(until(seen[0]))

        try:
            await_that(reached, 1500, what, look_every=1.0)
        except AssertionError as error:
            raise AssertionError(
                f"{error}: {seen[0]}; {[path.read_text() for path in self.logs(name)]}"
            ) from error
        return seen[0]

    def logs(self, name: str) -> list[Path]:
        return sorted((self.folder / "runs" / name / "batch").glob("*/log-*"))

    def losses(self, name: str) -> dict[int, float]:
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def queued_jobs(slurm: dict[str, str]) -> str:
    return subprocess.run(
        ["squeue", "--noheader"],
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def over(found: dict[str, Any]) -> bool:
    return not [link for link in found["links"] if link["state"] in ("queued", "held", "running")]


def states(found: dict[str, Any]) -> list[str]:
    return [link["state"] for link in found["links"]]
