#!/usr/bin/env python3
"""How well communication hides behind compute: a step beside its forward and backward alone, and
beside its communication alone.

    scripts/netns_testbed.sh run --rate 1gbit --hosts 2 --ranks-per-host 1 python
        scripts/bench_overlap.py --micro-batches 1,4,8,16

Compute is `bench_step.py`'s floor. Communication: the sums of all units' gradients, one after the
other, then the gathers of all units' weights, with nothing in between. A step cannot be faster than
the longer of the two. The last column says, from a trace, how many of a step's reductions had
started before its backward ended, and how much of the communication lay beside compute.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--micro-batches",
        default="1,4,8",
        help="sequences of a rank in a step, separated by commas",
    )
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--steps", type=int, default=5, help="timed ones")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=128)
    return parser.parse_args()


def main() -> int:
    arguments = options()
    from hpczero.train.malloc import keep_free_memory

    keep_free_memory()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from hpczero.comm.world import World

    torch.set_num_threads(1)
    with World.start() as world:
        rows = [measure(arguments, world, int(size)) for size in arguments.micro_batches.split(",")]
        if world.rank == 0:
            print(
                "| micro-batch | compute s | communication s | step s | step / longer | "
                "reductions begun in backward | beside compute |"
            )
            print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
            print("\n".join(rows))
    return 0


def measure(arguments: argparse.Namespace, world: Any, micro_batch: int) -> str:
    from bench_contenders import Floor, Ours
    from bench_step import job_of

    job = job_of(argparse.Namespace(**vars(arguments) | {"micro_batch": micro_batch}), world)
    ours = Ours(arguments.stage, False, job)
    floor = Floor("auto", job)
    for _ in range(2):
        floor.step(), ours.step()
    parts = {
        "compute": floor.step,
        "communication": lambda: communicate(ours.engine),
        "step": ours.step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(arguments.steps):
        for name, part in parts.items():
            if name == "step":
                # one in flight before, so that the gathers of its predecessor are in what is timed
                part()
            else:
                ours.engine.wait_for_weights()
            world.everyone.barrier()
            begun = time.perf_counter()
            part()
            seconds[name].append(max(world.gather_objects(time.perf_counter() - begun) or [0.0]))
    begun_in_backward, hidden = traced(world, ours)
    ours.close()
    compute, communication, step = (
        median(seconds[name]) for name in ("compute", "communication", "step")
    )
    longer = max(compute, communication) or 1.0
    return (
        f"| {micro_batch} | {compute:.2f} | {communication:.2f} | {step:.2f} | "
        f"{step / longer:.2f} | "
        f"{begun_in_backward[0]} of {begun_in_backward[1]} | {hidden:.0%} |"
    )


def communicate(engine: Any) -> None:
    """A step's messages, without its arithmetic but for the sums."""
    reduction = engine.reduction
    reduction.begin(last=True)
    reduction.end()
    reduction.finish()
    for unit in engine.units:
        engine._start_arriving(unit)
    engine.wait_for_weights()


def traced(world: Any, ours: Any) -> tuple[tuple[int, int], float]:
    """Trace a step in the middle of others: reductions begun while backward went on, of how many;
    the share of communication beside compute.
    """
    from hpczero.comm.trace import Recording, Trace, events
    from hpczero.train import trace_file

    recording = Recording()
    world.record(recording)
    for number in (1, 2, 3):
        with world.trace.step(number):
            step_in_phases(world, ours)
    ours.engine.wait_for_weights()
    world.record(Trace())
    happened = [event for step in recording.steps for event in events(step.rows, recording.whats)]
    middle = trace_file.of_step(happened, 2)
    return trace_file.started_during(middle, "reduce_scatter", "backward"), trace_file.hidden(
        middle, "data"
    )


def step_in_phases(world: Any, ours: Any) -> None:
    job, engine = ours.job, ours.engine
    with world.trace.span("forward"):
        loss = engine(job.batch)
    with world.trace.span("backward"):
        engine.backward(loss / (job.tokens * world.size), last=True)
    with world.trace.span("optimizer step"):
        engine.finish_step(job.spec.optimizer.lr)


if __name__ == "__main__":
    sys.exit(main())
