#!/usr/bin/env python3
"""Optimizers compared by what they learn: a small Llama on the standard library's text.

    python scripts/bench_optimizers.py lamb     LAMB at 8 times the batch, after as many tokens
    python scripts/bench_optimizers.py muon     steps in which Muon reaches AdamW's final loss
    python scripts/bench_optimizers.py lamb --batch 1 --steps 6400 --svg docs/lamb.svg

Every contender has the same search: each rate of a geometric row on the first seed, wider where
the best one is at an end of it; then all seeds at the best. Losses are those of the validation
split, over the same windows. Runs are processes of one core, `--at-once` of them at a time: nothing
here is timed. `--family gpt` has biases, which LAMB steps by its whole rate.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

import numpy as np  # noqa: E402

from hpczero import safe_files  # noqa: E402
from hpczero.report import as_svg  # noqa: E402
from hpczero.report.charts import Axes, Series, lines  # noqa: E402
from hpczero.report.marks import colour_of, dashes_of  # noqa: E402
from hpczero.runs.curves import Curve  # noqa: E402

_SPEC = """
[model]
family = "{family}"
layers = 4
hidden = 128
heads = 4
seq_len = 128
[train]
precision = "fp32"
eval_batches = 32
[schedule]
name = "linear"
[checkpoint]
every = -1
"""
_STEP = 2.0  # between two rates
_MOST = 3  # rates that a row grows by


@dataclass(frozen=True)
class Contender:
    """An optimizer, its batch and steps, and the rates to begin with."""

    name: str
    optimizer: str
    batch: int
    steps: int
    rates: tuple[float, ...]


def contenders(what: str, small: int, steps: int) -> list[Contender]:
    large, fewer = 8 * small, steps // 8
    if what == "lamb":
        return [
            Contender("AdamW, small batch", "adamw", small, steps, (1e-3, 2e-3, 4e-3)),
            Contender("AdamW, 8 times the batch", "adamw", large, fewer, (2e-3, 4e-3, 8e-3)),
            Contender("LAMB, 8 times the batch", "lamb", large, fewer, (1e-2, 2e-2, 4e-2)),
        ]
    return [
        Contender("AdamW", "adamw", small, steps, (1e-3, 2e-3, 4e-3)),
        Contender("Muon", "muon", small, steps, (2e-3, 4e-3, 8e-3)),
    ]


class Trials:
    """Runs in a folder, some at once; what has run is not run again. `finely`: in many points."""

    def __init__(self, folder: Path, family: str, at_once: int, finely: bool) -> None:
        self._folder = folder
        self._family = family
        self._finely = finely
        self._pool = ThreadPoolExecutor(at_once)
        # a run takes all cores that it may: beside others its threads would wait for theirs
        self._cores = SimpleQueue[int]()
        for _, core in zip(range(at_once), cycle(sorted(os.sched_getaffinity(0))), strict=False):
            self._cores.put(core)
        spec = _SPEC.format(family=family)
        safe_files.write_text(folder / "spec.toml", spec)

    def curves(self, wanted: Sequence[tuple[Contender, float, int]]) -> list[dict[int, float]]:
        """Return step -> validation loss of contenders at rates, with seeds."""
        return list(self._pool.map(lambda one: self._curve(*one), wanted))

    def _curve(self, contender: Contender, rate: float, seed: int) -> dict[int, float]:
        steps = contender.steps
        points = 40 if self._finely else 8
        size = f"{contender.batch}x{steps}"
        # all that a curve follows from: a folder may hold runs of other sizes
        name = f"{self._family}-{contender.optimizer}-{size}-{rate:g}-{seed}-{points}"
        settings = {
            "name": json.dumps(name),
            "seed": seed,
            "train.steps": steps,
            "train.global_batch": contender.batch,
            "train.micro_batch": min(16, contender.batch),
            "train.eval_every": max(1, steps // points),
            "train.eval_batches": max(1, 384 // contender.batch),
            "schedule.warmup_steps": max(1, steps // 10),
            "optimizer.name": json.dumps(contender.optimizer),
            "optimizer.lr": rate,
        }
        metrics = self._folder / "runs" / name / "metrics.jsonl"
        if not (metrics.parent / "summary.json").exists():
            words = [
                word for key, value in settings.items() for word in ("--set", f"{key}={value}")
            ]
            core = self._cores.get()
            of_core = ("taskset", "-c", str(core))
            done = subprocess.run(
                [*of_core, sys.executable, "-m", "hpczero", "run", "spec.toml", "--fresh", *words],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:2])},
                capture_output=True,
                text=True,
                check=False,
            )
            self._cores.put(core)
            if done.returncode:
                sys.exit(f"{name}: {done.stdout}{done.stderr}")
        lines = map(json.loads, metrics.read_text().splitlines())
        return {
            line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line
        }


def best_rate(trials: Trials, contender: Contender, seed: int) -> tuple[float, dict[float, float]]:
    """Return the rate with the lowest final loss, and the loss of each that was tried."""
    rates, found = list(contender.rates), dict[float, float]()
    for _ in range(1 + _MOST):
        new = [rate for rate in rates if rate not in found]
        curves = trials.curves([(contender, rate, seed) for rate in new])
        found |= {rate: final(curve) for rate, curve in zip(new, curves, strict=True)}
        best = min(found, key=found.__getitem__)
        if best == min(found):
            rates = [best / _STEP]
        elif best == max(found):
            rates = [best * _STEP]
        else:
            break
    return best, dict(sorted(found.items()))


def final(curve: Mapping[int, float]) -> float:
    return curve[max(curve)]


def reached(curve: Mapping[int, float], loss: float) -> int | None:
    """Return the first step with a loss as low as this."""
    return next((step for step, one in sorted(curve.items()) if one <= loss), None)


def picture(of_all: Mapping[Contender, list[dict[int, float]]]) -> str:
    """Return the losses of each contender over the sequences that it has seen, as SVG."""
    every = []
    for number, (contender, of_seeds) in enumerate(of_all.items()):
        steps = sorted(of_seeds[0])
        losses = np.array([[curve[step] for step in steps] for curve in of_seeds])
        seen = np.array(steps, np.float64) * contender.batch
        course = Curve(seen, losses.min(axis=0), losses.mean(axis=0), losses.max(axis=0))
        every.append(Series(contender.name, course, colour_of(number), dashes_of(number)))
    axes = Axes("Validation loss", "sequences", "nats per byte", width=720)
    drawing = lines(axes, every)
    assert drawing
    return as_svg.whole_file(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["lamb", "muon"])
    parser.add_argument("--family", choices=["llama", "gpt"], default="llama")
    parser.add_argument("--batch", type=int, default=8, help="the small one, in sequences")
    parser.add_argument("--steps", type=int, default=800, help="with the small batch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="keeps the runs (default: a temporary one)")
    parser.add_argument("--svg", type=Path, help="draw the curves: means and ranges of the seeds")
    options = parser.parse_args()
    folder = options.folder or safe_files.temporary_folder(Path("/tmp"), "hpczero-bench-")
    safe_files.make_folders(folder)
    try:
        finely = options.what == "muon"
        bench(options, Trials(folder, options.family, options.at_once, finely))
    finally:
        if not options.folder:
            safe_files.remove_tree(folder)


def bench(options: argparse.Namespace, trials: Trials) -> None:
    seeds = range(1, options.seeds + 1)
    of_all: dict[Contender, list[dict[int, float]]] = {}
    for contender in contenders(options.what, options.batch, options.steps):
        rate, tried = best_rate(trials, contender, seeds[0])
        row = ", ".join(f"{one:g}: {loss:.4f}" for one, loss in tried.items())
        print(f"{contender.name}: final loss by rate: {row}", flush=True)
        found = trials.curves([(contender, rate, seed) for seed in seeds])
        of_all[contender] = found
        finals = [final(curve) for curve in found]
        print(
            f"{contender.name}: rate {rate:g}, {contender.steps} steps of {contender.batch}: "
            f"{mean(finals):.4f} ({', '.join(f'{one:.4f}' for one in finals)})",
            flush=True,
        )
        steps = sorted(found[0])
        points = [steps[len(steps) * part // 8] for part in range(1, 8)] + [steps[-1]]
        print("    " + ", ".join(f"{s}: {mean(c[s] for c in found):.3f}" for s in points))
    if options.svg:
        safe_files.write_text(options.svg, picture(of_all))
    (first, of_first), *others = of_all.items()
    for contender, found in others:
        share = mean(map(final, found)) / mean(map(final, of_first))
        print(f"{contender.name}: {share:.4f} of {first.name}")
    if options.what == "muon":
        adamw, muon = of_all.values()
        for seed, one, other in zip(seeds, adamw, muon, strict=True):
            at = reached(other, final(one))
            print(f"seed {seed}: Muon has AdamW's final loss after {at} of {options.steps} steps")


if __name__ == "__main__":
    main()
