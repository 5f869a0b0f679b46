#!/usr/bin/env python3
"""Validation loss of workers that send less, beside that of AdamW on all gradients.

    python scripts/bench_quality.py --plot docs/slow-networks.svg

Each way trains the same model on the text of Python's library from several seeds, on four ranks
that are nodes of one rank each; `one worker` is one rank with a quarter of the batch. 1-bit Adam
and local steps begin after 15 % of the steps. Differences are of two runs from the same seed: their
mean, and its standard error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

from hpczero.safe_files import written_durably  # noqa: E402

WORKERS = 4
WAYS: dict[str, list[str]] = {
    "AdamW": [],
    "1-bit Adam": ["optimizer.name=one_bit_adam", "optimizer.freeze={warm_up}"],
    "int8": ["comm.compress=int8"],
    "local steps": [
        "optimizer.outer.every={every}",
        "optimizer.outer.begin={warm_up}",
        "optimizer.outer.momentum=0.7",
    ],
    "one worker": [],
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="outer.every")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], help="of all ways, as in hpczero run")
    parser.add_argument("--at-once", type=int, default=1, help="runs")
    parser.add_argument("--plot", help="write a picture of the curves")
    return parser.parse_args()


Curve = dict[int, float]  # step -> validation loss


def main() -> int:
    arguments = options()
    jobs = [(way, seed) for seed in range(1, arguments.seeds + 1) for way in arguments.ways]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as pool:
        curves = list(pool.map(partial(trained, arguments, Path(folder)), jobs))
    of_way: dict[str, list[Curve]] = {way: [] for way in arguments.ways}
    for (way, _), curve in zip(jobs, curves, strict=True):
        of_way[way].append(curve)
    report(of_way)
    if arguments.plot:
        with written_durably(Path(arguments.plot)) as file:
            file.write(picture(of_way).encode())
    return 0


def trained(arguments: argparse.Namespace, folder: Path, job: tuple[str, int]) -> Curve:
    """Run one job; return its validation losses."""
    way, seed = job
    ranks = 1 if way == "one worker" else WORKERS
    batch = arguments.batch * ranks // WORKERS
    evaluated = 640 * WORKERS // ranks // arguments.batch  # global batches: as many sequences
    values = {"warm_up": arguments.steps * 15 // 100, "every": arguments.every}
    settings = [
        f"seed={seed}",
        f"output={folder / str(seed)}",
        f"name={way.replace(' ', '-')}",
        f"train.steps={arguments.steps}",
        f"train.global_batch={batch}",
        f"train.eval_batches={evaluated}",
        f"train.eval_every={max(1, arguments.steps // 10)}",
        f"schedule.warmup_steps={arguments.steps // 20}",
        *(setting.format(**values) for setting in WAYS[way]),
        *arguments.set,
    ]
    spec = folder / f"{way}-{seed}.toml"
    with written_durably(spec) as file:
        file.write(SPEC.encode())
    command = ["mpirun", "-n", str(ranks), sys.executable, "-m", "hpczero", "run", str(spec)]
    for setting in settings:
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{way}, seed {seed}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    metrics = next((folder / str(seed)).glob(f"{way.replace(' ', '-')}/metrics.jsonl"))
    lines = map(json.loads, metrics.read_text().splitlines())
    found = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    print(f"{way}, seed {seed}: {found[arguments.steps]:.4f}", flush=True)
    return found


SPEC = """
[model]
layers = 2
hidden = 64
heads = 4
seq_len = 64
[train]
micro_batch = 64
precision = "fp32"
log_every = 1000000
[optimizer]
lr = 1e-2
[zero]
shard_ranks = "node"
[comm]
ranks_per_node = 1
[checkpoint]
every = -1
"""


def report(of_way: Mapping[str, Sequence[Curve]]) -> None:
    plain = of_way.get("AdamW")
    for way, curves in of_way.items():
        last = [curve[max(curve)] for curve in curves]
        line = f"{way:<12} {mean(last):.4f}"
        if plain and plain is not curves and len(last) > 1:
            pairs = zip(last, plain, strict=True)
            above = [loss / curve[max(curve)] - 1 for loss, curve in pairs]
            error = stdev(above) / len(above) ** 0.5
            line += f"   above AdamW: {mean(above):+.2%}, standard error {error:.2%}"
        print(line)


def picture(of_way: Mapping[str, Sequence[Curve]]) -> str:
    """Return the mean curve of each way as SVG."""
    from hpczero.svg import BLUE, GREEN, INK, ORANGE, PALE, PINK, SKY, Page, Scale

    means = {
        way: {step: mean(curve[step] for curve in curves) for step in curves[0]}
        for way, curves in of_way.items()
    }
    losses = [loss for curve in means.values() for loss in curve.values()]
    steps = [step for curve in means.values() for step in curve]
    page = Page(720, 400, "Validation loss of workers that send less")
    across = Scale(0, max(steps), 60, 560)
    up = Scale(min(losses) - 0.05, min(max(losses), 4.0), 360, 40)
    for tick in up.ticks():
        page.line([(60, up.place(tick)), (560, up.place(tick))], PALE)
        page.words(54, up.place(tick) + 4, f"{tick:g}", "end")
    for tick in across.ticks():
        page.words(across.place(tick), 378, f"{tick:g}", "middle")
    page.words(60, 24, "validation loss (nats per byte), mean of seeds; below: steps")
    colours = (INK, BLUE, GREEN, ORANGE, PINK, SKY)
    for number, (way, curve) in enumerate(means.items()):
        points = [
            (across.place(step), up.place(min(loss, up.most))) for step, loss in curve.items()
        ]
        page.line(points, colours[number], 2)
        page.rectangle(575, 50 + 22 * number, 14, 4, colours[number])
        page.words(596, 56 + 22 * number, f"{way} {curve[max(curve)]:.3f}")
    return str(page)


if __name__ == "__main__":
    sys.exit(main())
