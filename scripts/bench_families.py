#!/usr/bin/env python3
"""The engine's own part of a step, of GPT and of Llama with as many parameters.

    mpirun -n 2 python scripts/bench_families.py              time, stages 0 to 3
    python scripts/bench_families.py --rounds 0               counts alone

A step less forward and backward alone (the floor of bench_step.py) is the engine's: sums over the
ranks, clipping, AdamW, gathering, hooks. It is counted (calls of Python functions, operations of
torch), and timed: in a round each family takes a step of the floor, of ours, and of ours once more,
which shows the noise; processor seconds, the mean of the ranks. Ratios are Llama's over GPT's.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda"), str(ROOT / "scripts")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from bench_contenders import Contender, Job, built, entries  # noqa: E402

from hpczero.comm.world import World  # noqa: E402
from hpczero.model.batch import MicroBatch  # noqa: E402
from hpczero.model.families import parameter_count  # noqa: E402
from hpczero.spec.schema import Model, Optimizer, Spec, Train  # noqa: E402
from hpczero.train.malloc import keep_free_memory  # noqa: E402

FAMILIES = ("gpt", "llama")


def job_of(family: str, hidden: int, layers: int, world: World) -> Job:
    """A block of either has 12 hidden^2 parameters, and as many more as its biases and norms."""
    keys: dict[str, Any] = {"ffn": round(8 * hidden / 3)} if family == "llama" else {}
    sizes = {"layers": layers, "hidden": hidden, "heads": hidden // 64, "vocab": 8192}
    model = Model(family=family, **sizes, seq_len=128, **keys)
    train = Train(precision="bf16", micro_batch=1, global_batch=world.size, grad_clip=1.0)
    spec = Spec(model=model, train=train, optimizer=Optimizer(lr=1e-4))
    generator = torch.Generator().manual_seed(world.rank)
    text = torch.randint(model.vocab, (1, model.seq_len + 1), generator=generator)
    samples = torch.tensor([world.rank])
    return Job(
        spec, world, MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), samples, 0, 1)
    )


def counts(contender: Contender) -> tuple[int, int]:
    """Return the calls of Python functions and the operations of torch in a step."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    contender.step()
    sys.setprofile(count)
    contender.step()
    sys.setprofile(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        contender.step()
    return calls, sum(event.name.startswith("aten::") for event in profile.events())


def contenders(stage: int, jobs: dict[str, Job], stack: ExitStack) -> dict[str, Contender]:
    found = {}
    known = entries()
    for family, job in jobs.items():
        for name in ("floor", f"ours-{stage}"):
            found[f"{family} {name}"] = stack.enter_context(built(known[name], job))
    return found


def count(stage: int, jobs: dict[str, Job]) -> None:
    with ExitStack() as stack:
        found = {name: counts(one) for name, one in contenders(stage, jobs, stack).items()}
    own = {
        family: [
            ours - floor
            for ours, floor in zip(
                found[f"{family} ours-{stage}"], found[f"{family} floor"], strict=True
            )
        ]
        for family in FAMILIES
    }
    for what, gpt, llama in zip(("calls", "operations"), own["gpt"], own["llama"], strict=True):
        print(
            f"stage {stage}: the engine's {what:10} GPT {gpt:6,}, Llama {llama:6,}: "
            f"{llama / gpt:.3f}"
        )


def timed(world: World, contender: Contender) -> float:
    world.everyone.barrier()
    began = time.process_time()
    contender.step()
    seconds = torch.tensor([time.process_time() - began], dtype=torch.float64)
    world.everyone.all_reduce(seconds)
    return seconds.item() / world.size


def rounds(number: int, world: World, found: dict[str, Contender]) -> Iterator[dict[str, float]]:
    for contender in found.values():
        for _ in range(3):
            contender.step()
    for _ in range(number):
        took = {name: timed(world, contender) for name, contender in found.items()}
        again = {f"{name} again": timed(world, contender) for name, contender in found.items()}
        yield took | again


def measure(stage: int, number: int, world: World, jobs: dict[str, Job]) -> None:
    with ExitStack() as stack:
        found = contenders(stage, jobs, stack)
        times = list(rounds(number, world, found))
    if world.rank:
        return
    for again in ("", " again"):
        own = {
            family: [
                took[f"{family} ours-{stage}{again}"] - took[f"{family} floor{again}"]
                for took in times
            ]
            for family in FAMILIES
        }
        ratios = [llama / gpt for gpt, llama in zip(own["gpt"], own["llama"], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        print(
            f"stage {stage}{again}: the engine's processor time GPT {1e3 * median(own['gpt']):.0f} "
            f"ms, Llama {1e3 * median(own['llama']):.0f} ms: {middle:.3f} ({low:.3f}-{high:.3f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="0: counts alone")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    keep_free_memory()
    torch.set_num_threads(1)
    with World.start() as world:
        jobs = {
            family: job_of(family, options.hidden, options.layers, world) for family in FAMILIES
        }
        if world.rank == 0:
            for family, job in jobs.items():
                print(f"{family}: {parameter_count(job.spec.model):,} parameters")
        for stage in range(4):
            if world.size == 1:
                count(stage, jobs)
            if options.rounds:
                measure(stage, options.rounds, world, jobs)


if __name__ == "__main__":
    main()
