#!/usr/bin/env python3
"""Throughput of one job on different grids of the same ranks, and where a step's time goes on each,
from the trace.

    mpirun -n 2 python scripts/bench_grids.py
    mpirun -n 4 python scripts/bench_grids.py --grids 'data; tensor=2; pipeline=2;
    tensor=2,pipeline=2'

A grid is a list of settings of the spec's table `parallel`; data is what remains of the ranks. All
train the same batches from the same weights, in the same processes, with one thread each; the
losses must agree within 1 %. In every round each grid is built, takes `--warmup` steps and
`--steps` timed ones, and is freed; every other round goes backwards. A step takes as long as its
slowest rank. Ratios are taken within a round.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GRIDS = (
    "data; tensor=2; tensor=2,sequence_parallel=true; pipeline=2; pipeline=2,schedule=gpipe; "
    "pipeline=2,schedule=interleaved,chunks=2"
)
TOLERANCE = 0.01


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--grids",
        default=GRIDS,
        help="separated by semicolons; the first is what the others are compared with",
    )
    parser.add_argument("--stage", type=int, default=1, choices=range(4), help="of ZeRO")
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often each grid is built and timed"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps in a round; one more is traced"
    )
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=128)
    return parser.parse_args()


@dataclass
class Seen:
    """Figures of one grid over all rounds: seconds of each step (the median of a round's), losses,
    and of the traced step what each rank did.
    """

    rounds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


def main() -> int:
    arguments = options()
    from hpczero.train.malloc import keep_free_memory

    keep_free_memory()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from hpczero.comm.world import World

    torch.set_num_threads(1)
    grids = [grid.strip() for grid in arguments.grids.split(";")]
    seen = {grid: Seen() for grid in grids}
    with World.start() as world:
        for number in range(arguments.rounds):
            for grid in grids[:: -1 if number % 2 else 1]:
                if world.rank == 0:
                    print(
                        f"round {number + 1} of {arguments.rounds}: {grid}",
                        file=sys.stderr,
                        flush=True,
                    )
                measure(spec_of(arguments, grid), world, arguments, seen[grid])
        return conclude(seen) if world.rank == 0 else 0


def spec_of(arguments: argparse.Namespace, grid: str) -> Any:
    import tomllib

    from hpczero.spec.schema import Model, Optimizer, Parallel, Spec, Train, Zero

    settings: dict[str, Any] = {}
    for setting in grid.split(","):
        key, given, value = setting.partition("=")
        if given:
            settings[key] = (
                value if key in ("schedule", "order") else tomllib.loads(f"x = {value}")["x"]
            )
    model = Model(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        vocab=arguments.vocab,
        seq_len=arguments.seq_len,
    )
    train = Train(
        precision="bf16",
        micro_batch=arguments.micro_batch,
        global_batch=arguments.global_batch,
        grad_clip=1.0,
    )
    return Spec(
        model=model,
        train=train,
        optimizer=Optimizer(lr=1e-4),
        parallel=Parallel(**settings),
        zero=Zero(stage=arguments.stage),
    )


def measure(spec: Any, world: Any, arguments: argparse.Namespace, seen: Seen) -> None:
    from hpczero.comm.grid import Grid
    from hpczero.data.dataset import SyntheticSource
    from hpczero.parallel.parallelize import assemble
    from hpczero.planner.volumes import resolved
    from hpczero.train.batches import Batches

    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    source = SyntheticSource(spec.seed, spec.model.vocab, spec.model.seq_len)
    batches = Batches(spec, source, grid.coordinate(world.rank, "data"), grid.size("data"))
    way = assemble(spec, world, grid, accumulates=len(batches.parts()) > 1)
    seconds, losses = [], []
    for _ in range(arguments.warmup + arguments.steps):
        world.everyone.barrier()
        begun = time.perf_counter()
        losses.append(step(spec, world, way, batches.training(0)))
        seconds.append(max(world.gather_objects(time.perf_counter() - begun) or [0.0]))
    seen.parts = traced(spec, world, way, batches.training(0))
    seen.rounds.append(median(seconds[arguments.warmup :]))
    seen.losses = losses
    way.engine.close()


def step(spec: Any, world: Any, way: Any, batches: Any) -> float:
    """Make a step as the trainer does; return the mean loss of the global batch."""
    import torch

    tokens = spec.train.global_batch * spec.model.seq_len
    read_loss = way.train(batches, tokens, world.trace)
    with world.trace.span("optimizer step"):
        way.engine.finish_step(spec.optimizer.lr)
    with world.trace.span("loss agreement"):
        total = torch.tensor(read_loss() * way.engine.losses_count, dtype=torch.float64)
        world.everyone.all_reduce(total)
    return float(total) / tokens


def traced(spec: Any, world: Any, way: Any, batches: Any) -> list[dict[str, float]]:
    """Return what every rank did in one step, in seconds, on rank 0."""
    from hpczero.comm.trace import Recording, Trace, events
    from hpczero.train import trace_file

    recording = Recording()
    world.record(recording)
    with world.trace.step(1):
        step(spec, world, way, batches)
    world.record(Trace())
    happened = [event for kept in recording.steps for event in events(kept.rows, recording.whats)]
    found = world.gather_objects(trace_file.exclusive_seconds(trace_file.of_step(happened, 1)))
    return found or []


def conclude(seen: dict[str, Seen]) -> int:
    first, *_ = seen.values()
    print(
        "| grid | ms a step | throughput, first = 1 (range) | losses |\n"
        "| --- | ---: | ---: | ---: |"
    )
    for grid, of_grid in seen.items():
        ratios = [theirs / own for theirs, own in zip(first.rounds, of_grid.rounds, strict=True)]
        losses = f"{of_grid.losses[0]:.4f} → {of_grid.losses[-1]:.4f}"
        print(
            f"| {grid} | {1e3 * median(of_grid.rounds):.0f} | {median(ratios):.3f} "
            f"({min(ratios):.3f}–{max(ratios):.3f}) | {losses} |"
        )
    names = sorted({name for of_grid in seen.values() for parts in of_grid.parts for name in parts})
    print(
        f"\nOf one step, each rank's ms:\n\n| grid | rank | {' | '.join(names)} | all |\n"
        f"| --- | ---: |{' ---: |' * (len(names) + 1)}"
    )
    for grid, of_grid in seen.items():
        for rank, parts in enumerate(of_grid.parts):
            cells = [1e3 * parts.get(name, 0.0) for name in names]
            print(
                f"| {grid} | {rank} | {' | '.join(f'{cell:.0f}' for cell in cells)} | "
                f"{sum(cells):.0f} |"
            )
    wrong = [
        grid
        for grid, of_grid in seen.items()
        if any(not agree(pair) for pair in zip(of_grid.losses, first.losses, strict=True))
    ]
    if wrong:
        print(
            (
                f"bench_grids.py: {'; '.join(wrong)}: losses differ by more than {TOLERANCE:.0%} "
                f"from the first grid's"
            ),
            file=sys.stderr,
        )
    return 1 if wrong else 0


def agree(losses: tuple[float, float]) -> bool:
    return abs(losses[0] - losses[1]) <= TOLERANCE * abs(losses[1])  # so a NaN does not


if __name__ == "__main__":
    sys.exit(main())
