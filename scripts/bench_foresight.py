#!/usr/bin/env python3
"""Hold the model of time and memory against real runs: replayed, and calibrated.

    python scripts/bench_foresight.py --jobs 60                       # links as they are
    sudo env PATH="$PATH" python scripts/bench_foresight.py --rates 100mbit 300mbit 1gbit
    python scripts/bench_foresight.py --cluster clusters/mine.toml    # calibrated before

Jobs of 2 ranks, one core each, are drawn from families, sizes, grids, ZeRO stages, schedules and
what is computed again. For each `hpczero run` trains a few steps with a trace. *Replayed*: the step
composed of the run's own spans, by the measured one. *Calibrated*: the predicted step, by the
median one, on the cluster that `hpczero calibrate` measured with the same links. *Memory*: what was
predicted of each rank, by what it held. A probe times products before and after each run; where the
two differ by more than 10 %, others used the machine and the run is made again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

import numpy as np  # noqa: E402

from hpczero.calibrate.replay import replay  # noqa: E402
from hpczero.calibrate.run_trace import RunTrace  # noqa: E402
from hpczero.safe_files import make_folders, write_text  # noqa: E402
from hpczero.spec.load import to_toml  # noqa: E402
from hpczero.spec.rules import contradictions, without_effect  # noqa: E402
from hpczero.spec.schema import (  # noqa: E402
    Batch,
    Checkpoint,
    Memory,
    Model,
    Parallel,
    Spec,
    Train,
    Zero,
)

RANKS = 2
DISTURBED = 0.10
AGAIN = 3  # times at most
MINUTES = 60


@dataclass
class Errors:
    """Relative errors of all jobs, by what was held against what."""

    replayed: list[float] = field(default_factory=list)
    calibrated: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def print(self) -> None:
        for name, errors in vars(self).items():
            if errors:
                ranked = sorted(map(abs, errors))
                print(
                    f"{name:<11}{len(ranked):>4} median {median(ranked):.1%}, "
                    f"p90 {ranked[int(0.9 * (len(ranked) - 1))]:.1%}, worst {ranked[-1]:.1%}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--rates", nargs="+", default=[], help="of links between two hosts")
    parser.add_argument("--cluster", help="instead of calibrating (one rate, or none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="a folder for the runs and clusters")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.keep:
        make_folders(options.keep)
        hold_all(options, options.keep)
    else:
        with tempfile.TemporaryDirectory() as folder:
            hold_all(options, Path(folder))


def hold_all(options: argparse.Namespace, folder: Path) -> None:
    rates = options.rates or [""]
    clusters = {rate: options.cluster or calibrated(rate, folder) for rate in rates}
    errors = Errors()
    for number, spec in enumerate(islice(jobs(options.seed, options.steps), options.jobs)):
        rate = rates[number % len(rates)]
        hold(spec, rate, clusters[rate], folder, errors)
    errors.print()


def jobs(seed: int, steps: int) -> Iterator[Spec]:
    """Yield jobs of two ranks, the same for a seed."""
    choice = random.Random(seed)
    number = 0
    while True:
        family = choice.choice(("gpt", "llama"))
        tensor, pipeline = choice.choice(((1, 1), (1, 1), (2, 1), (1, 2), (1, 2)))
        chunks = choice.choice((1, 1, 2)) if pipeline > 1 else 1
        micro_batch = choice.choice((1, 2, 4))
        spec = Spec(
            name=f"job-{number}",
            model=Model(
                family=family,
                layers=choice.choice((4, 8)),
                hidden=choice.choice((256, 384, 512)),
                heads=8,
                seq_len=choice.choice((128, 256)),
                vocab=choice.choice((2048, 8192)),
            ),
            train=Train(
                steps=steps,
                micro_batch=micro_batch,
                global_batch=micro_batch * choice.choice((2, 4, 8)),
                trace=True,
            ),
            parallel=Parallel(
                tensor=tensor,
                pipeline=pipeline,
                sequence_parallel=tensor > 1 and choice.random() < 0.5,
                schedule="interleaved" if chunks > 1 else choice.choice(("1f1b", "gpipe")),
                chunks=chunks,
            ),
            zero=Zero(stage=choice.randrange(4), node_shared=choice.choice((True, False))),
            memory=Memory(recompute=choice.choice(("none", "none", "selective", "block"))),
            checkpoint=Checkpoint(every=0),
        )
        if not contradictions(spec) and not without_effect(spec):
            number += 1
            yield spec


def hold(spec: Spec, rate: str, cluster: str, folder: Path, errors: Errors) -> None:
    """Run a job, undisturbed if possible, and add its errors."""
    differ = 1.0
    tries = 0
    while differ > DISTURBED and tries < AGAIN:
        before = probe()
        run = trained(spec, rate, cluster, folder)
        differ = abs(probe() / before - 1)
        tries += 1
    summary = json.loads((run / "summary.json").read_text())
    step = summary["step"]
    again = replay(RunTrace.read(run))
    replayed = again.seconds / again.measured - 1
    predicted = step["predicted"]["step_seconds"] / step["seconds"] - 1
    memory = list(of_memory(summary))
    errors.replayed.append(replayed)
    errors.calibrated.append(predicted)
    errors.memory += memory
    p = spec.parallel
    print(
        f"{spec.name:<8}{rate:>8} {spec.model.family:<6}t{p.tensor} p{p.pipeline}x{p.chunks} "
        f"{p.schedule:<12}zero {spec.zero.stage} {step['seconds']:>8.4f} s  "
        f"replayed {replayed:+6.1%}  calibrated {predicted:+6.1%}  "
        f"memory {max(memory, key=abs):+5.1%}{'  disturbed' if differ > DISTURBED else ''}",
        flush=True,
    )


def of_memory(summary: dict[str, Any]) -> Iterator[float]:
    """Yield the error of each rank."""
    for rank in summary["memory"]["ranks"]:
        yield sum(rank["predicted"].values()) / rank["held"] - 1


def probe() -> float:
    """Return the median seconds of a product on every core's worth of threads."""
    one = np.ones((384, 384), np.float32)
    seconds = []
    for _ in range(15):
        begin = time.perf_counter()
        one @ one
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def command(rate: str, words: Sequence[str]) -> list[str]:
    """Return the command that starts two ranks: on this computer, or on two hosts of a rate."""
    own = [sys.executable, "-m", "hpczero", *words]
    if rate:
        testbed = str(ROOT / "scripts" / "netns_testbed.sh")
        return [testbed, "run", "--rate", rate, "--hosts", "2", "--ranks-per-host", "1", *own]
    return [str(Path(sys.executable).parent / "mpirun"), "-n", str(RANKS), *own]


def carry_out(words: list[str]) -> None:
    path = os.pathsep.join((str(ROOT), str(ROOT / "numba_cuda")))
    environment = os.environ | {"PYTHONPATH": path}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=10 * MINUTES, env=environment
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


def trained(spec: Spec, rate: str, cluster: str, folder: Path) -> Path:
    job = spec.model_copy(update={"output": str(folder), "batch": Batch(cluster=cluster)})
    path = folder / f"{spec.name}.toml"
    write_text(path, to_toml(job))
    carry_out(command(rate, ["run", str(path), "--fresh"]))
    return folder / spec.name


def calibrated(rate: str, folder: Path) -> str:
    path = folder / f"links-{rate or 'own'}.toml"
    if not path.exists():
        carry_out(command(rate, ["calibrate", "-o", str(path), "--folder", str(folder)]))
    return str(path)


if __name__ == "__main__":
    main()
