"""Small jobs and machines for the search: whatever ranks hold, next to one another."""

import random
from collections.abc import Iterator
from typing import Any

from hpczero.model import families
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.layout_space import Space
from hpczero.planner.needs import Hardware
from hpczero.planner.platform import Platform
from hpczero.planner.search import Machine, Search
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Model, Spec
from tests.support.jobs import any_job

SMALL = Model(layers=10, hidden=768, heads=12, seq_len=512, vocab=8192)


def on_nodes(choice: random.Random) -> tuple[Spec, Allocation, Platform, Hardware]:
    """Draw a job of any grid, what it keeps where, and nodes with or without GPUs."""
    sizes = 1, 2, 3, 4, 6, 8
    nodes = Allocation.of_nodes(choice.choice(sizes), choice.choice(sizes))
    device = choice.choice(("cpu", "cuda"))
    kernels = choice.choice((frozenset(), families.KERNELS_THAT_CHANGE_MEMORY[device]))
    spec = any_job(choice, nodes.ranks)
    offload = choice.choice(("none", "none", "cpu", "nvme:/states"))
    away = choice.choice(("none", "cpu"))
    changes: dict[str, Any] = {
        "zero": spec.zero.model_copy(update={"offload": offload}),
        "memory": spec.memory.model_copy(update={"offload_activations": away}),
        "checkpoint": spec.checkpoint.model_copy(update={"every": choice.choice((0, 2))}),
        "train": spec.train.model_copy(update={"eval_batches": choice.choice((0, 1))}),
        "parallel": resolved(spec, nodes.node_of_rank),
    }
    if choice.random() < 0.4:
        changes["model"] = spec.model.model_copy(update={"layers": 23})
    gpus = choice.choice((0, 1, 2, 4)) if device == "cuda" else 0
    return (
        spec.model_copy(update=changes),
        nodes,
        Platform(device, kernels, native=choice.random() < 0.5),
        Hardware(1, gpus, 1, 1),
    )


def space(nodes: Allocation, memory_gb: float = 16, **pinned: Any) -> tuple[Space, Machine]:
    """Return a small job on GPUs of so much memory; pinned: key -> value of its table."""
    found = find("dgx-h100").cluster
    device = found.device.model_copy(update={"memory_gb": memory_gb})
    cluster = found.model_copy(update={"device": device})
    kernels = families.KERNELS_THAT_CHANGE_MEMORY["cuda"]
    train = {"device": "cuda", "global_batch": 64, "micro_batch": 4}
    spec = Spec(model=SMALL)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update=train)})
    for table, key, value in ((*name.split("__"), value) for name, value in pinned.items()):
        changed = getattr(spec, table).model_copy(update={key: value})
        spec = spec.model_copy(update={table: changed})
    keys = frozenset(name.split("__")[1] for name in pinned)
    return Space(spec, nodes, keys, True), Machine(cluster, Platform("cuda", kernels, True))


def search(of: Space, machine: Machine) -> Search:
    return Search(of, families.layers(of.spec.model), machine)


def everything(of: Space) -> Iterator[Spec]:
    """Yield the spec of each layout of a space."""
    for parallel in of.parallels:
        for order in of.orders(parallel):
            for states in of.states(parallel, order):
                for size in of.micro_batches(parallel):
                    layout = of.layout(parallel, order, states, size)
                    for saving in of.savings(parallel, size):
                        yield of.spec_with(of.saving(layout, saving))
