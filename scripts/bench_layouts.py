#!/usr/bin/env python3
"""Regret: how much slower the layout that is predicted to be the fastest is than the fastest one.

    mpirun -n 2 python scripts/bench_layouts.py --cluster clusters/mine.toml
    scripts/netns_testbed.sh run --rate 300mbit --hosts 2 --ranks-per-host 1 \\
        python scripts/bench_layouts.py --cluster clusters/slow.toml

A set is a job with some of the layouts that it can have on these ranks: the one that is predicted
to be the fastest of all, and others drawn at random. The layouts of a set are interleaved in one
process group: in every round each is built, takes `--warmup` steps and `--steps` timed ones, and is
freed; every other round goes backwards. A layout takes the median of its rounds.
"""

import argparse
import os
import random
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda"), str(ROOT / "scripts")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from bench_grids import step  # noqa: E402

from hpczero.comm.grid import Grid  # noqa: E402
from hpczero.comm.world import World  # noqa: E402
from hpczero.data.dataset import SyntheticSource  # noqa: E402
from hpczero.model.families import layers  # noqa: E402
from hpczero.parallel.parallelize import assemble  # noqa: E402
from hpczero.planner.allocation import Allocation  # noqa: E402
from hpczero.planner.cluster import find  # noqa: E402
from hpczero.planner.layout_space import Saving, Space  # noqa: E402
from hpczero.planner.layouts import Layout  # noqa: E402
from hpczero.planner.step_time import StepTimes  # noqa: E402
from hpczero.spec.schema import Model, Spec, Train  # noqa: E402
from hpczero.train.batches import Batches  # noqa: E402
from hpczero.train.malloc import keep_free_memory  # noqa: E402
from hpczero.train.preflight import platform_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--sets", type=int, default=6)
    parser.add_argument("--layouts", type=int, default=8, help="of a set")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    keep_free_memory()
    torch.set_num_threads(1)
    with World.start() as world:
        regrets = [regret(number, world, options) for number in range(options.sets)]
        if world.rank == 0:
            ranked = sorted(regrets)
            print(f"regret of {len(ranked)} sets: median {median(ranked):.1%}, ", end="")
            print(f"worst {ranked[-1]:.1%}")


def job(choice: random.Random) -> Spec:
    return Spec(
        model=Model(
            family=choice.choice(("gpt", "llama")),
            layers=choice.choice((4, 6, 8)),
            hidden=choice.choice((256, 512, 768)),
            heads=8,
            seq_len=choice.choice((128, 256)),
            vocab=choice.choice((2048, 8192)),
        ),
        train=Train(global_batch=choice.choice((4, 8, 16)), micro_batch=1, device="cpu"),
    )


def every_layout(space: Space) -> list[Layout]:
    """Return all layouts, but for what only saves memory and changes nothing else."""
    found = []
    for parallel in space.parallels:
        for order in space.orders(parallel):
            for states, size in product(
                space.states(parallel, order), space.micro_batches(parallel)
            ):
                layout = space.layout(parallel, order, states, size)
                found += [space.saving(layout, Saving(again, 0, 0, 0)) for again in range(4)]
    return found


def regret(number: int, world: World, options: argparse.Namespace) -> float:
    """Measure a set, and return the regret. Collective."""
    choice = random.Random(f"{options.seed} {number}")
    spec = job(choice)
    ranks_per_node = world.node_of_rank.count(world.node_of_rank[0])
    nodes = Allocation(world.size, ranks_per_node)
    space = Space(spec, nodes)
    times = StepTimes(layers(spec.model), find(options.cluster).cluster, platform_of(world, spec))
    known = every_layout(space)
    predicted = {one: times.of(space.spec_with(one), nodes).seconds for one in known}
    best = min(known, key=predicted.__getitem__)
    chosen = [best, *choice.sample([one for one in known if one != best], options.layouts - 1)]
    rounds: dict[Layout, list[float]] = {one: [] for one in chosen}
    for turn in range(options.rounds):
        for one in chosen[:: -1 if turn % 2 else 1]:
            rounds[one].append(measured(space.spec_with(one), world, options))
    seconds = {one: median(of_layout) for one, of_layout in rounds.items()}
    fastest = min(seconds, key=seconds.__getitem__)
    found = seconds[best] / seconds[fastest] - 1
    if world.rank == 0:
        print(
            f"set {number}: {spec.model.family}, hidden {spec.model.hidden}, "
            f"batch {spec.train.global_batch}: regret {found:.1%}"
        )
        for one in sorted(chosen, key=seconds.__getitem__):
            print(
                f"  {1e3 * seconds[one]:>8.1f} ms, predicted {1e3 * predicted[one]:>8.1f} ms  "
                f"{'>' if one == best else ' '} {one.differences(Layout.of(spec))}",
                flush=True,
            )
    return found


def measured(spec: Spec, world: World, options: argparse.Namespace) -> float:
    """Return the median seconds of a step on the slowest rank. Collective."""
    grid = Grid.build(spec.parallel, world.node_of_rank)
    source = SyntheticSource(spec.seed, spec.model.vocab, spec.model.seq_len)
    batches = Batches(spec, source, grid.coordinate(world.rank, "data"), grid.size("data"))
    runner = assemble(spec, world, grid, accumulates=len(batches.parts()) > 1)
    seconds = []
    for _ in range(options.warmup + options.steps):
        world.everyone.barrier()
        begun = time.perf_counter()
        step(spec, world, runner, batches.training(0))
        of_ranks = world.gather_objects(time.perf_counter() - begun) or [0.0]
        seconds.append(world.broadcast_object(max(of_ranks)))
    runner.engine.close()
    return median(seconds[options.warmup :])


if __name__ == "__main__":
    main()
