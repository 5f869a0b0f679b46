#!/usr/bin/env python3
"""Time how long a plan takes: processor-milliseconds of a layout, by part, and of one search.

    python scripts/bench_plan.py                                  # 20,000 layouts of each job
    python scripts/bench_plan.py --layouts 2000 --search

Layouts are drawn at random from all that can exist, whether they fit or not. One layout on
100,000 ranks is judged as well.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.layout_space import Space
from hpczero.planner.platform import Platform
from hpczero.planner.room import Room
from hpczero.planner.search import Machine, Search
from hpczero.planner.step_seconds import of_cluster
from hpczero.spec.load import load
from hpczero.spec.schema import Spec

SPECS = Path(__file__).resolve().parents[1] / "jobspecs"
JOBS = (("gpt-7b-h100", "dgx-h100", 8), ("gpt-100b", "dgx2-v100", 25), ("gpt-1t", "dgx2-v100", 50))
MANY = ("gpt-7b-h100", "dgx-h100", 12_500)  # nodes of 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=int, default=20_000)
    parser.add_argument("--search", action="store_true", help="also search each job's layouts")
    options = parser.parse_args()
    print(
        f"{'job':<14}{'ranks':>8}{'layouts':>9}{'specs':>8}{'memory':>8}{'time':>8}{'all':>8}  ms"
    )
    for name, cluster, nodes in JOBS:
        bench(name, cluster, nodes, options.layouts)
        if options.search:
            search(name, cluster, nodes)
    one_of_many()


def prepared(name: str, cluster: str, nodes: int) -> tuple[Space, Machine]:
    found = find(cluster).cluster
    spec = load(SPECS / f"{name}.toml").spec
    train = spec.train.model_copy(update={"device": found.device.kind})
    kernels = KERNELS_THAT_CHANGE_MEMORY[found.device.kind]
    machine = Machine(found, Platform(found.device.kind, kernels, native=True))
    space = Space(
        spec.model_copy(update={"train": train}),
        Allocation.of_nodes(nodes, found.node.devices),
        has_files=bool(found.node.nvme_gb),
    )
    return space, machine


def drawn(space: Space, count: int) -> Iterator[Spec]:
    """Yield the specs of so many layouts."""
    choice = random.Random(1)
    for _ in range(count):
        parallel = choice.choice(space.parallels)
        size = choice.choice(space.micro_batches(parallel))
        states = choice.choice(list(space.states(parallel)))
        layout = space.layout(parallel, choice.choice(space.orders(parallel)), states, size)
        saving = choice.choice(space.savings(parallel, size))
        yield space.spec_with(space.saving(layout, saving))


def bench(name: str, cluster: str, nodes: int, count: int) -> None:
    space, machine = prepared(name, cluster, nodes)
    model = layers(space.spec.model)
    room = Room(model, machine.platform, machine.node, space.nodes)
    seconds = of_cluster(model, machine.cluster, machine.platform)
    begin = time.process_time()
    specs = list(drawn(space, count))
    drawn_at = time.process_time()
    for spec in specs:
        room.fit(spec)
    fitted_at = time.process_time()
    for spec in specs:
        seconds(spec, space.nodes.ranks, space.nodes.ranks_per_node)
    end = time.process_time()
    took = (drawn_at - begin, fitted_at - drawn_at, end - fitted_at, end - begin)
    columns = "".join(f"{1e3 * part / count:>8.3f}" for part in took)
    print(f"{name:<14}{space.nodes.ranks:>8,}{count:>9,}{columns}", flush=True)


def search(name: str, cluster: str, nodes: int) -> None:
    space, machine = prepared(name, cluster, nodes)
    model = layers(space.spec.model)
    begin = time.process_time()
    seconds = of_cluster(model, machine.cluster, machine.platform)
    counts = Search(space, model, machine, seconds).run().counts
    took = time.process_time() - begin
    print(f"{'':<14}a search: {took:.1f} s, {counts}", flush=True)


def one_of_many() -> None:
    space, machine = prepared(*MANY)
    begin = time.process_time()
    model = layers(space.spec.model)
    seconds = of_cluster(model, machine.cluster, machine.platform)
    settings = {"tensor": 8, "pipeline": 25, "order": "auto"}
    batch = space.spec.train.model_copy(update={"global_batch": 40_000})
    parallel = space.spec.parallel.model_copy(update=settings)
    spec = space.spec.model_copy(update={"parallel": parallel, "train": batch})
    Search(space, model, machine, seconds).judge(spec)
    took = time.process_time() - begin
    print(f"one layout on {space.nodes.ranks:,} ranks: {took:.2f} processor-seconds")


if __name__ == "__main__":
    sys.exit(main())
