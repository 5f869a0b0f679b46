"""1-bit Adam, local steps and sums in 8 bits equal workers that one process simulates."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.parallel.parallelize import assemble
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import Comm, Data, Model, Optimizer, Parallel, Spec, Train, Zero
from tests.support.covering import Case
from tests.support.training import train
from tests.support.workers_twin import Twin

pytestmark = pytest.mark.mpi

METHODS: dict[str, dict[str, Any]] = {
    "one_bit_adam": {"name": "one_bit_adam", "freeze": 6},
    "local steps": {"outer": Outer(every=4, lr=0.9, momentum=0.3)},
    "local steps, streamed": {"outer": Outer(every=5, fragments=3, lr=0.9, momentum=0.3)},
    "late local steps, bf16": {
        "outer": Outer(every=4, begin=5, precision="bf16", lr=0.9, momentum=0.3)
    },
    "local steps, int8": {"outer": Outer(every=4, precision="int8", lr=0.9, momentum=0.3)},
    "local steps, int4": {"outer": Outer(every=3, precision="int4", lr=0.9, momentum=0.3)},
    "late local steps": {"outer": Outer(every=4, begin=5, lr=0.9, momentum=0.3)},
    "int8": {},
}
# ranks -> layouts; `shards`: the data ranks of a worker, which `shard_ranks` is to find
LAYOUTS: dict[int, list[Case]] = {
    2: [{"per_node": 1, "shard_ranks": "node", "shards": 1}],
    3: [
        {"per_node": 1, "shard_ranks": 1, "shards": 1},
        {"per_node": 2, "shard_ranks": "node", "shards": 1},
    ],
    4: [
        {"per_node": 2, "shard_ranks": "node", "shards": 2},
        {"per_node": 1, "shard_ranks": 1, "shards": 1},
        {"per_node": 2, "tensor": 2, "shard_ranks": "node", "shards": 1},
        {"per_node": 2, "pipeline": 2, "shard_ranks": 1, "shards": 1},
        {"per_node": 3, "shard_ranks": 2, "shards": 2},
    ],
}


def cases(ranks: int, everything: bool) -> list[Case]:
    """Every method and every layout at least once; all pairs of them with `everything`."""
    layouts = LAYOUTS.get(ranks, [])
    pairs = list(product(METHODS, layouts)) if everything else _few(layouts)
    return [
        {"method": method, "stage": 1 + number % 3, "tensor": 1, "pipeline": 1} | layout
        for number, (method, layout) in enumerate(pairs)
    ]


def _few(layouts: list[Case]) -> list[tuple[str, Case]]:
    methods = [*METHODS, *list(METHODS)[:3]] if layouts else []
    return [(method, layouts[at % len(layouts)]) for at, method in enumerate(methods)]


def spec_of(case: Case, steps: int) -> Spec:
    method = case["method"]
    shape = {"layers": 3, "hidden": 24, "heads": 4, "seq_len": 17, "vocab": 67}
    batches = {"steps": steps, "global_batch": 12, "micro_batch": 2, "eval_batches": 0}
    return Spec(
        model=Model(**shape, tied_embeddings=case["pipeline"] == 1),
        data=Data(source="synthetic"),
        train=Train(**batches, precision="fp32", grad_clip=0.7),
        # Where a rounding turns a sign, or an integer, a weight moves by the learning rate: with
        # 3e-3 workers whose gradients differ by 1e-7 have losses that differ by 3e-4 after 50 steps
        optimizer=Optimizer(lr=2e-4, eps=1e-4, **METHODS[method]),
        parallel=Parallel(tensor=case["tensor"], pipeline=case["pipeline"]),
        zero=Zero(stage=case["stage"], shard_ranks=case["shard_ranks"]),
        comm=Comm(compress="int8" if method == "int8" else "none"),
    )


@pytest.mark.cases(of=cases)
@pytest.mark.few(4)
def test_equals_workers_that_one_process_simulates(
    world: World, case: Case, everything: bool
) -> None:
    spec = spec_of(case, steps=50 if everything else 12)
    nodes = world.part(range(world.size), case["per_node"])
    found = train(nodes, spec)
    nodes.close()
    steps = [str(metrics["loss"]) for metrics in found.metrics_seen]
    assert steps == world.broadcast_object(steps)
    if world.rank:
        return
    data_ranks = world.size // (case["tensor"] * case["pipeline"])
    twin = Twin(spec, data_ranks // case["shards"], case["shards"], case["tensor"])
    first = {name: weight.clone() for name, weight in twin.weights.items()}
    twin.train()
    assert found.losses == pytest.approx(twin.losses, rel=1e-5)
    moved = _apart(first, twin.weights)
    assert _apart(found.weights, twin.weights) < 0.01 * moved


def _apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the distance of all weights but the keys' bias, whose gradient is rounding alone."""
    names = [name for name in one if not name.endswith("qkv.bias")]
    squares = [float((one[name] - other[name]).double().square().sum()) for name in names]
    return sum(squares) ** 0.5


@pytest.mark.ranks(2)
def test_an_engine_made_without_values_begins_with_those_that_come_later(world: World) -> None:
    """`hpczero run` makes it so: a checkpoint may have them."""
    case = {"method": "local steps", "stage": 1, "tensor": 1, "pipeline": 1, "shard_ranks": 1}
    spec = spec_of(case, steps=3)
    grid = Grid.build(spec.parallel, world.node_of_rank)
    engine = assemble(spec, world, grid, accumulates=False, bare=True).engine
    engine.begin_with_initial_values()
    for unit in engine.units:
        assert torch.equal(engine.update.common_weights(unit), unit.master)
        assert unit.master.count_nonzero() > 0
    engine.close()
