#!/usr/bin/env python3
"""Time of a step whose activations are computed again, beside one that keeps them all.

    OMP_NUM_THREADS=1 python scripts/bench_recompute.py
    OMP_NUM_THREADS=1 mpirun -n 2 python scripts/bench_recompute.py --tensor 2 --partition

In each round every way takes a step of the same batch, one after the other, in the same process;
every other round goes backwards. Ratios are of the two steps in a round. `bound` is 1 + 1.08 f,
where f is forward's share of the step that keeps all. The operations that "selective" computes
again are timed alone, too, in a step of their own: `extra / alone` is what they cost in the step.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from one_batch import Job

from hpczero.train.malloc import keep_free_memory

WAYS = {
    "none": "none",
    "none again": "none",
    "selective": "selective",
    "selective again": "selective",
    "block": "block",
    "block again": "block",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--families", nargs="*", default=["gpt", "llama"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--partition", action="store_true", help="memory.partition_activations")
    return parser.parse_args()


def values(world: Any, arguments: argparse.Namespace, family: str, way: str) -> dict[str, Any]:
    """Return the tables of the spec."""
    shape = {name: getattr(arguments, name) for name in ("layers", "hidden", "heads", "seq_len")}
    samples = arguments.samples
    return {
        "model": {**shape, "family": family},
        "train": {
            "precision": arguments.precision,
            "global_batch": samples * world.size // arguments.tensor,
            "micro_batch": samples,
        },
        "parallel": {"tensor": arguments.tensor},
        "memory": {"recompute": way, "partition_activations": arguments.partition},
    }


def seconds_alone(job: Job) -> float:
    """Return the seconds of a forward's cheap operations, each run once more by itself."""
    import torch

    from hpczero.parallel.activations.recompute import Again

    first_run, total = Again.first_run, 0.0

    def timed(again: Again) -> Any:
        nonlocal total
        begun = time.perf_counter()
        with torch.enable_grad():
            again._function(*again._given)
        total += time.perf_counter() - begun
        return first_run(again)

    Again.first_run = timed
    try:
        job.step()
    finally:
        Again.first_run = first_run
    return total


def measure(world: Any, arguments: argparse.Namespace, family: str) -> None:
    jobs = {name: Job(world, values(world, arguments, family, way)) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    shares, alone = [], []
    for job in jobs.values():
        job.step()
    for number in range(arguments.rounds):
        for name in list(WAYS)[:: -1 if number % 2 else 1]:
            step, forward = jobs[name].step()
            seconds[name].append(step)
            if name == "none":
                shares.append(forward / step)
        alone.append(seconds_alone(jobs["selective"]))
    for job in jobs.values():
        job.engine.close()
    if world.rank:
        return
    share = median(shares)
    print(f"{family}: a step {median(seconds['none']) * 1e3:.0f} ms, f {share:.3f}, bound", end=" ")
    print(f"{1 + 1.08 * share:.3f}; cheap operations alone {median(alone) * 1e3:.1f} ms")
    for name, took in seconds.items():
        ratios = [one / kept for one, kept in zip(took, seconds["none"], strict=True)]
        low, middle, high = quantiles(ratios)
        line = f"  {name:16} {median(took) * 1e3:7.1f} ms"
        line += f", / none {middle:.3f} ({low:.3f}-{high:.3f})"
        if name.startswith("selective"):
            triples = zip(took, seconds["none"], alone, strict=True)
            extra = median((one - kept) / by_itself for one, kept, by_itself in triples)
            line += f", extra / alone {extra:.2f}"
        print(line, flush=True)


def main() -> int:
    arguments = options()
    keep_free_memory()
    import torch

    from hpczero.comm.world import World
    from hpczero.train import setup

    world = World.start()
    torch.set_num_threads(1)
    setup.use_kernels(world)
    for family in arguments.families:
        measure(world, arguments, family)
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
