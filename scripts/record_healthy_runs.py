"""Record the times of ranks of healthy runs, in which `hpczero blame` must find no slow rank.

    python scripts/record_healthy_runs.py [NAME ...]

Each run of RUNS (or those named) trains for a minute at most; its file of `rank_times` is copied to
tests/unit/runs/healthy/NAME.bin, and README.md there says how each was recorded. A run that is
slowed on purpose has all its ranks slowed alike.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hpczero import safe_files  # noqa: E402

HEALTHY = ROOT / "tests" / "unit" / "runs" / "healthy"
FACTS = HEALTHY / "recorded.json"
_MOST = 900  # seconds of a run, on a busy machine
SETTINGS = {
    "model.layers": 2,
    "model.hidden": 48,
    "model.heads": 4,
    "model.seq_len": 32,
    "data.source": '"synthetic"',
    "train.steps": 60,
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.eval_batches": 0,
    "train.log_every": 2,
    "train.precision": '"fp32"',
    "checkpoint.every": -1,
}


@dataclass(frozen=True)
class Recorded:
    """A run of so many ranks; `loads`: loops that keep processors busy meanwhile, anywhere."""

    name: str
    ranks: int
    what: str
    settings: dict[str, object]
    loads: int = 0

    @property
    def spec(self) -> str:
        lines = (f"{key} = {value}\n" for key, value in (SETTINGS | self.settings).items())
        return f'name = "{self.name}"\n' + "".join(lines)


RUNS = (
    Recorded("data-2", 2, "two data ranks", {}),
    Recorded(
        "data-3-uneven", 3, "samples that three ranks cannot share", {"train.global_batch": 7}
    ),
    Recorded("data-4", 4, "twice as many ranks as cores", {}),
    Recorded("data-8", 8, "four times as many", {}),
    Recorded("each-step", 2, "a row for each step", {"train.log_every": 1}),
    Recorded("zero-0", 2, "nothing is sharded", {"zero.stage": 0}),
    Recorded("zero-2", 3, "gradients are sharded", {"zero.stage": 2}),
    Recorded("zero-3", 4, "parameters are sharded", {"zero.stage": 3}),
    Recorded("tensor-2", 2, "two tensor ranks", {"parallel.tensor": 2}),
    Recorded(
        "tensor-2-data-2",
        4,
        "both, and the sequence",
        {"parallel.tensor": 2, "parallel.sequence_parallel": "true"},
    ),
    Recorded("pipeline-2", 2, "stages with other work", {"parallel.pipeline": 2}),
    Recorded(
        "pipeline-3-uneven",
        3,
        "five layers on three stages, and a large vocabulary on the last",
        {"parallel.pipeline": 3, "model.layers": 5, "model.vocab": 8000},
    ),
    Recorded(
        "pipeline-2-data-2",
        4,
        "stages of two ranks",
        {"parallel.pipeline": 2, "model.vocab": 4000, "model.layers": 3},
    ),
    Recorded(
        "all-axes",
        8,
        "2 x 2 x 2 ranks",
        {
            "parallel.pipeline": 2,
            "parallel.tensor": 2,
        },
    ),
    Recorded(
        "evaluations",
        2,
        "an evaluation every five steps",
        {"train.eval_every": 5, "train.eval_batches": 4},
    ),
    Recorded(
        "saves",
        3,
        "a checkpoint every four steps, by each node",
        {"checkpoint.every": 4, "checkpoint.asynchronous": "false"},
    ),
    Recorded(
        "saves-seldom",
        3,
        "a checkpoint every ten steps: most rows have none",
        {"checkpoint.every": 10, "checkpoint.asynchronous": "false"},
    ),
    Recorded(
        "saves-behind",
        4,
        "a checkpoint every five steps, by each rank, while training goes on",
        {"checkpoint.every": 5, "checkpoint.writers": '"rank"'},
    ),
    Recorded(
        "accumulation",
        2,
        "many micro-batches a step",
        {"train.global_batch": 24, "train.micro_batch": 1, "train.steps": 30, "train.log_every": 1},
    ),
    Recorded("loaded", 2, "three loops keep both cores busy", {}, 3),
)


@contextmanager
def busy(loops: int) -> Iterator[None]:
    started = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(loops)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def record(run: Recorded) -> dict[str, object]:
    """Run it, copy its file, and return when and how that was."""
    began = datetime.now(UTC)
    with tempfile.TemporaryDirectory() as folder, busy(run.loads):
        safe_files.write_text(Path(folder) / "spec.toml", run.spec)
        launcher = str(Path(sys.executable).with_name("mpirun"))
        command = [launcher, "-n", str(run.ranks), sys.executable, "-m", "hpczero", "run"]
        # threads that wait for each other leave their processors to those that work
        calm = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        command += ["spec.toml"]
        subprocess.run(command, cwd=folder, env=calm, check=True, timeout=_MOST)
        (file,) = (Path(folder) / "runs" / run.name / "rank_times").glob("*.bin")
        with safe_files.written_whole(HEALTHY / f"{run.name}.bin") as copy:
            copy.write(file.read_bytes())
    return {
        "date": f"{began:%Y-%m-%d %H:%M} UTC",
        "machine": f"{psutil.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "load": round(psutil.getloadavg()[1], 1),
    }


def readme(facts: dict[str, dict[str, object]]) -> str:
    """Return how each was recorded."""
    common = "\n".join(f"    {key} = {value}" for key, value in SETTINGS.items())
    lines = [
        "# Times of ranks of healthy runs",
        "",
        "Each `NAME.bin` is the file of `rank_times` that a run left in which no rank was slower",
        "than others by itself. `scripts/record_healthy_runs.py [NAME ...]` records them again",
        "and writes this page. Command: `mpirun -n RANKS python -m hpczero run spec.toml`, with",
        "",
        common,
        "",
        "and what the table says. Load: the machine's mean of 5 minutes, with whatever",
        "else ran there.",
        "",
        "| run | ranks | what it is | other settings | recorded | machine | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in RUNS:
        if fact := facts.get(run.name):
            settings = ", ".join(f"`{key} = {value}`" for key, value in run.settings.items())
            lines.append(
                f"| {run.name} | {run.ranks} | {run.what} | {settings} | {fact['date']} | "
                f"{fact['machine']} | {fact['load']} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of RUNS; none: all")
    names = parser.parse_args().names
    safe_files.make_folders(HEALTHY)
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    for run in RUNS:
        if not names or run.name in names:
            facts[run.name] = record(run)
            safe_files.write_text(FACTS, json.dumps(facts, indent=1) + "\n")
            safe_files.write_text(HEALTHY / "README.md", readme(facts))


if __name__ == "__main__":
    main()
