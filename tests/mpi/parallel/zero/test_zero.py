"""ZeRO at every stage, node-shared or not, equals the serial run; bitwise where that is
promised; and sends what it says.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpczero.comm.world import World
from hpczero.parallel.zero.buffers import Region
from hpczero.spec.schema import Data, Model, Optimizer, Spec, Train, Zero
from tests.support.training import Record, assert_same, train

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("poisoned_regions")]

WAYS = list(product((0, 1, 2, 3), (False, True)))  # stage, node-shared


def spec_of(
    stage: int,
    shared: bool,
    global_batch: int = 5,
    micro_batch: int = 2,
    precision: str = "fp32",
    **train: Any,
) -> Spec:
    settings = {"steps": 4, "eval_batches": 1, **train}
    return Spec(
        model=Model(layers=2, hidden=24, heads=3, seq_len=17, vocab=61, dropout=0.1),
        data=Data(source="synthetic"),
        train=Train(
            global_batch=global_batch, micro_batch=micro_batch, precision=precision, **settings
        ),
        optimizer=Optimizer(lr=1e-2, eps=1e-6),
        zero=Zero(stage=stage, node_shared=shared),
    )


def bitwise(one: Record, other: Record) -> bool:
    return one.losses == other.losses and all(
        torch.equal(one.weights[name], other.weights[name]) for name in one.weights
    )


@pytest.mark.parametrize("accumulation", [3, 1])
@pytest.mark.few(1)
def test_every_way_equals_the_serial_run(world: World, accumulation: int) -> None:
    alone = world.part([world.rank])
    uneven = 2 * accumulation * world.size - 1
    batch = {"global_batch": uneven, "micro_batch": 2, "steps": 8}
    serial = train(alone, spec_of(0, False, **batch))
    alone.close()
    for stage, shared in WAYS:
        assert_same(serial, train(world, spec_of(stage, shared, **batch)))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.few(2)
def test_all_stages_are_bitwise_equal_with_one_micro_batch(world: World, precision: str) -> None:
    batch = {"global_batch": 2 * world.size, "micro_batch": 2, "precision": precision}
    first = train(world, spec_of(0, False, **batch))
    for stage, shared in WAYS[1:]:
        assert bitwise(first, train(world, spec_of(stage, shared, **batch))), (stage, shared)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.few(1)
def test_accumulating_stages_are_bitwise_equal_in_pairs(world: World, precision: str) -> None:
    """Stages 0 and 1 add up micro-batches before ranks, 2 and 3 ranks before micro-batches:
    docs/zero.md.
    """
    batch = {"global_batch": 6 * world.size, "micro_batch": 2, "precision": precision}
    for pair in ((0, 1), (2, 3)):
        first, *others = (
            train(world, spec_of(stage, shared, **batch))
            for stage, shared in product(pair, (False, True))
        )
        assert all(bitwise(first, other) for other in others), pair


def nodes_of(ranks: int, everything: bool) -> list[dict[str, int]]:
    """Nodes of 2, and of one rank, once."""
    return [
        {"ranks_per_node": size, "accumulation": count}
        for size in ((1, 2) if ranks == 3 else (2,))
        for count in (1, 3)
    ]


@pytest.mark.by_mpi_alone("what a node shares is in the CPU's memory")
@pytest.mark.cases(of=nodes_of)
@pytest.mark.few(2)
def test_several_nodes(world: World, case: dict[str, int]) -> None:
    """2 x 2, 2 + 1 and 3 x 2 ranks on simulated nodes, and nodes of one rank."""
    alone, nodes = world.part([world.rank]), world.part(range(world.size), case["ranks_per_node"])
    batch = {
        "global_batch": 2 * case["accumulation"] * world.size - 1,
        "micro_batch": 2,
        "steps": 8,
    }
    serial = train(alone, spec_of(0, False, **batch))
    for stage in range(4):
        assert_same(serial, train(nodes, spec_of(stage, True, **batch)))
    for part in (alone, nodes):
        part.close()


def totals(world: World, spec: Spec) -> dict[str, Any]:
    world.ledger.reset()
    return train(world, spec).sent


@pytest.mark.parametrize(("stage", "accumulation"), list(product(range(4), (1, 3))))
@pytest.mark.few(2)
def test_the_ledger_has_the_bytes_of_the_schedule(
    world: World, stage: int, accumulation: int
) -> None:
    """Per step, in half-precision elements x (N - 1) / N: 2, 2 and A + 1 times the parameters;
    at stage 3 A times them and what is gathered.
    """
    from hpczero.model import families
    from hpczero.parallel.layout import unit_layout

    count = world.size
    base = spec_of(stage, False, 2 * accumulation * count, 2, "bf16", eval_batches=0)
    specs = [
        base.model_copy(update={"train": base.train.model_copy(update={"steps": steps})})
        for steps in (1, 3)
    ]
    sent = [
        sum(
            entry["bytes"]
            for name, entry in totals(world, spec).items()
            if name in ("reduce_scatter", "all_gather")
        )
        for spec in specs
    ]
    units = [unit_layout(layer, count).size for layer in families.layers(base.model)]
    whole, at_stage_3 = sum(units), accumulation * sum(units) + gathered(units, accumulation)
    elements = {0: 2 * whole, 1: 2 * whole, 2: (accumulation + 1) * whole, 3: at_stage_3}[stage]
    norm = 8 * (count - 1)
    assert (sent[1] - sent[0]) / 2 == pytest.approx(
        elements * 2 * (count - 1) / count + norm, abs=count * 8
    )


def gathered(units: list[int], passes: int) -> int:
    """Elements that a step of stage 3 gathers: every unit for forward and for backward, less what
    is still there, by the rule of docs/zero.md (room for the two largest, what was used longest ago
    goes first; the head works with the embedding's weight).
    """
    embedding, *blocks, head = range(len(units))
    forward = [[embedding], *([block] for block in blocks), [embedding, head]]
    region, there, total = Region(torch.empty(2 * max(units))), {}, 0
    for used in [*forward, [embedding, head], *([block] for block in reversed(blocks))] * passes:
        for unit in used:
            if unit not in there:
                total += units[unit]
                place = region.take(units[unit])
                while place is None:
                    region.give_back(there.pop(next(other for other in there if other not in used)))
                    place = region.take(units[unit])
                there[unit] = place
            there[unit] = there.pop(unit)
    return total


def test_inside_a_node_nothing_is_sent(world: World) -> None:
    for stage in range(4):
        entries = totals(world, spec_of(stage, True, eval_batches=0, precision="bf16"))
        gathers = entries.get("all_gather", {})
        assert entries.get("reduce_scatter", {}).get("bytes", 0) == 0
        assert gathers.get("bytes", 0) <= 4 * 64 * world.size * gathers.get("count", 0), (
            "only the norm"
        )
        assert world.size == 1 or entries["reduce_scatter"]["shared"] > 0


@pytest.mark.ranks(4)
def test_between_nodes_a_share_of_the_bytes_is_sent(world: World) -> None:
    nodes = world.part(range(4), ranks_per_node=2)
    sent = [
        totals(nodes, spec_of(2, shared, eval_batches=0, precision="bf16"))["reduce_scatter"][
            "between"
        ]
        for shared in (False, True)
    ]
    nodes.close()
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.1)


def test_fp16_overflow_is_skipped_alike_at_every_stage(world: World) -> None:
    scales = []
    for stage, shared in WAYS:
        record = train(world, spec_of(stage, shared, precision="fp16", loss_scale=2.0**40, steps=3))
        scales.append([metrics["loss_scale"] for metrics in record.metrics_seen])
    assert scales == [[2.0**40, 2.0**39, 2.0**38]] * len(WAYS)


def test_a_parameter_used_outside_its_layer_is_named(world: World) -> None:
    from hpczero.comm.grid import Grid
    from hpczero.errors import HpczeroError
    from hpczero.parallel.parallelize import assemble

    spec = spec_of(3, False)
    engine = assemble(
        spec, world, Grid.build(spec.parallel, world.node_of_rank), accumulates=False
    ).engine
    weight = engine.module.blocks[0].feed_forward.up.weight
    assert weight.shape == (96, 24)
    with pytest.raises(
        HpczeroError,
        match=r"blocks\.0\.feed_forward\.up\.weight is used outside of the model's forward",
    ):
        torch.nn.functional.linear(torch.ones(1, 24), weight)
    engine.close()


def test_memory_is_what_the_states_say(world: World) -> None:
    from hpczero.comm.grid import Grid
    from hpczero.parallel.parallelize import assemble

    count, held = world.size, {}
    for stage in range(4):
        spec = spec_of(stage, False, precision="bf16")
        engine = assemble(
            spec, world, Grid.build(spec.parallel, world.node_of_rank), accumulates=False
        ).engine
        held[stage] = engine.memory()
        engine.close()
    assert held[1]["moments"] * count == pytest.approx(held[0]["moments"], rel=0.02)
    assert held[2]["gradients"] * count == pytest.approx(held[1]["gradients"], rel=0.02)
    assert held[3]["weights"] * count == pytest.approx(held[2]["weights"], rel=0.02)


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if (
                isinstance(result, torch.Tensor)
                and result.untyped_storage().data_ptr() not in known
            ):
                self.largest = max(self.largest, result.untyped_storage().nbytes())
        return results


@pytest.mark.parametrize(("stage", "shared"), WAYS)
@pytest.mark.by_mpi_alone("what gloo makes for a gather, and pinned memory, are PyTorch's own")
@pytest.mark.few(2)
def test_the_step_allocates_nothing_to_speak_of(
    world: World, stage: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums and the step of a model of 3.6 MB make no tensor that grows with it, from the
    second step on.
    """
    from hpczero.parallel.zero.engine import Engine
    from hpczero.parallel.zero.unit import Unit

    base = spec_of(stage, shared, 6 * world.size, 2, "bf16", steps=3)
    spec = base.model_copy(update={"model": base.model.model_copy(update={"hidden": 288})})
    finish, complete, seen = Engine.finish_step, Unit.complete, []

    def watched(engine: Engine, lr: float) -> Any:
        with Allocations() as allocations:
            result = finish(engine, lr)
        seen.append(allocations.largest)
        return result

    def watched_complete(unit: Unit) -> None:
        with Allocations() as allocations:
            complete(unit)
        seen.append(allocations.largest)

    monkeypatch.setattr(Engine, "finish_step", watched)
    monkeypatch.setattr(Unit, "complete", watched_complete)
    train(world, spec)
    assert max(seen[len(seen) // 3 :]) <= 1 << 18
