#!/usr/bin/env python3
"""Time how long a plan takes, and hold what its search goes by against the exact objects.

    python scripts/bench_plan.py                                  # 500 layouts of each job
    python scripts/bench_plan.py --layouts 0                      # the searches alone

Layouts are drawn at random from all that can exist, whether they fit or not: their time in closed
form, by the schedule that is carried on from its middle, and with all of the schedule simulated;
their memory, of kinds of ranks and of all nodes.
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
from hpczero.planner.search import Machine, Search
from hpczero.planner.step_time import StepTimes
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from tests.support.exact_time import exact_seconds

SPECS = Path(__file__).resolve().parents[1] / "jobspecs"
JOBS = (("gpt-7b-h100", "dgx-h100", 8), ("gpt-100b", "dgx2-v100", 25), ("gpt-1t", "dgx2-v100", 50))
MANY = ("gpt-7b-h100", "dgx-h100", 12_500)  # nodes of 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=int, default=500)
    options = parser.parse_args()
    one_of_many()  # before searches leave objects that the collector of garbage would look at
    for name, cluster, nodes in JOBS:
        search(name, cluster, nodes)
        if options.layouts:
            compare(name, cluster, nodes, options.layouts)


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
        order = choice.choice(space.orders(parallel))
        states = choice.choice(list(space.states(parallel, order)))
        layout = space.layout(parallel, order, states, size)
        saving = choice.choice(space.savings(parallel, size))
        yield space.spec_with(space.saving(layout, saving))


def search(name: str, cluster: str, nodes: int) -> None:
    space, machine = prepared(name, cluster, nodes)
    begin = time.process_time()
    counts = Search(space, layers(space.spec.model), machine).run().counts
    took = time.process_time() - begin
    each = 1e6 * took / counts.all
    print(f"{name} on {space.nodes.ranks:,} ranks: {took:.1f} processor-seconds, {each:.1f} us a")
    print(f"    layout: {counts}", flush=True)


def compare(name: str, cluster: str, nodes: int, count: int) -> None:
    space, machine = prepared(name, cluster, nodes)
    model = layers(space.spec.model)
    times = StepTimes(model, machine.cluster, machine.platform)
    bounds, of_middle = [], []
    for spec in drawn(space, count):
        exact = exact_seconds(spec, model, space.nodes, machine)
        bounds.append(times.at_least(spec, space.nodes) / exact - 1)
        of_middle.append(times.of(spec, space.nodes).seconds / exact - 1)
    for called, errors in (("a bound", bounds), ("what is ranked", of_middle)):
        ranked = sorted(map(abs, errors))
        print(
            f"    {called} against all of the schedule: median {ranked[count // 2]:.3%}, "
            f"p90 {ranked[count * 9 // 10]:.3%}, worst {min(errors):+.2%} {max(errors):+.2%}"
        )


def one_of_many() -> None:
    space, machine = prepared(*MANY)
    begin = time.process_time()
    model = layers(space.spec.model)
    settings = {"tensor": 8, "pipeline": 25, "order": "auto"}
    batch = space.spec.train.model_copy(update={"global_batch": 40_000})
    parallel = space.spec.parallel.model_copy(update=settings)
    spec = space.spec.model_copy(update={"parallel": parallel, "train": batch})
    Search(space, model, machine).judge(spec)
    took = time.process_time() - begin
    print(f"one layout on {space.nodes.ranks:,} ranks: {took:.2f} processor-seconds")


if __name__ == "__main__":
    sys.exit(main())
