#!/usr/bin/env python3
"""Show why more ranks of equal memory do more than their share: real runs of 2, 4 and 8 ranks.

    python scripts/bench_superlinear.py
    python scripts/bench_superlinear.py --memory 1.0e9 --ranks 2 4 8 --steps 3

With a fixed memory a rank, more ranks hold fewer of the states that ZeRO shards, so that a larger
micro-batch fits; then a token costs fewer bytes on the links and fewer passes of the optimizer.
For each number of ranks the planner says the largest micro-batch that fits and what follows; then
`hpczero run` trains with it, and its summary has what was held and sent. The time is printed only:
there are no more cores than there are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

from hpczero.comm.grid import Grid  # noqa: E402
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers  # noqa: E402
from hpczero.planner.memory import needs_on_grid  # noqa: E402
from hpczero.planner.platform import Platform  # noqa: E402
from hpczero.planner.volumes import Volumes  # noqa: E402
from hpczero.safe_files import write_text  # noqa: E402
from hpczero.spec.load import to_toml  # noqa: E402
from hpczero.spec.schema import Batch, Checkpoint, Model, Parallel, Spec, Train, Zero  # noqa: E402

MODEL = Model(layers=12, hidden=512, heads=8, seq_len=256, vocab=8192)
PLATFORM = Platform("cpu", KERNELS_THAT_CHANGE_MEMORY["cpu"])
MOST = 64  # sequences of a micro-batch
HOUR = 3600
_FIRST = 2  # steps of the shorter run


@dataclass(frozen=True)
class Figures:
    """What a rank holds at most (bytes), and what a token costs."""

    held: float
    sent: float  # bytes between ranks
    passes: float  # of the optimizer over all parameters
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=float, default=0.8e9, help="bytes of a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="of ZeRO")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.memory / 1e9:.2f} GB a rank, ZeRO stage {options.stage}")
    print("             predicted                                  measured")
    print("ranks micro  held GB  bytes/token  passes/token   held GB  bytes/token  passes/token  s")
    for ranks in options.ranks:
        spec = largest(ranks, options)
        said, seen = predicted(spec, ranks), measured(spec, ranks)
        print(
            f"{ranks:>5}{spec.train.micro_batch:>6}{_columns(said)} {_columns(seen)}"
            f"{seen.seconds:>9.2f}",
            flush=True,
        )


def _columns(figures: Figures) -> str:
    return f"{figures.held / 1e9:>9.3f}{figures.sent:>13,.0f}{figures.passes:>14.3e}"


def spec_of(ranks: int, micro_batch: int, options: argparse.Namespace) -> Spec:
    """Return the job in which each rank has one micro-batch a step."""
    return Spec(
        name=f"ranks-{ranks}",
        model=MODEL,
        train=Train(steps=options.steps, global_batch=ranks * micro_batch, micro_batch=micro_batch),
        parallel=Parallel(order="tensor,data,pipeline"),
        zero=Zero(stage=options.stage, node_shared=False),
        checkpoint=Checkpoint(every=0),
        batch=Batch(),
    )


def largest(ranks: int, options: argparse.Namespace) -> Spec:
    """Return the job with the largest micro-batch that fits."""
    fitting = [
        spec
        for spec in (spec_of(ranks, size, options) for size in range(1, MOST + 1))
        if predicted(spec, ranks).held <= options.memory
    ]
    if not fitting:
        sys.exit(f"{ranks} ranks of {options.memory / 1e9:.2f} GB hold no sequence of this model")
    return fitting[-1]


def predicted(spec: Spec, ranks: int) -> Figures:
    model = layers(spec.model)
    grid = Grid.build(spec.parallel, [0] * ranks)
    need = needs_on_grid(spec, model, grid, PLATFORM)[0]
    totals = Volumes(spec, model, ranks).totals(grid)["data"].values()
    sent = sum(total.all.inside + total.all.between for total in totals)
    tokens = spec.train.global_batch * spec.seq_len
    return Figures(sum(need.rank.values()), sent / tokens, 1 / tokens)


def measured(spec: Spec, ranks: int) -> Figures:
    """Return the figures of the steps of a job, by two runs, of which one has that many more.

    What is sent once a run, before the first step and after the last one, is in neither.
    """
    steps = spec.train.steps
    first, longer = (summary_of(spec, ranks, count) for count in (_FIRST, _FIRST + steps))
    tokens = longer["tokens"] - first["tokens"]
    sent = _sent(longer) - _sent(first)
    seconds = longer["step"]["seconds"]
    return Figures(longer["fullest"]["held"], sent / tokens, steps / tokens, seconds)


def summary_of(spec: Spec, ranks: int, steps: int) -> dict[str, Any]:
    """Run the job for so many steps, and return its summary."""
    train = spec.train.model_copy(update={"steps": steps})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.toml"
        job = spec.model_copy(update={"output": folder, "train": train})
        write_text(path, to_toml(job))
        mpirun = str(Path(sys.executable).parent / "mpirun")
        command = [mpirun, "-n", str(ranks), sys.executable, "-m", "hpczero", "run", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HOUR, cwd=ROOT)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        text = (Path(folder) / spec.name / "summary.json").read_text()
    summary: dict[str, Any] = json.loads(text)
    return summary


def _sent(summary: dict[str, Any]) -> int:
    return sum(
        operation["bytes"] for rank in summary["comm"] for operation in rank["data"].values()
    )


if __name__ == "__main__":
    main()
