"""The search: which layouts there are, which are left out, and which come first."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hpczero.comm.grid import Grid
from hpczero.model import families
from hpczero.planner.allocation import Allocation
from hpczero.planner.layout_space import Saving, Space, round_numbers
from hpczero.planner.layouts import TABLES, Layout
from hpczero.planner.room import Room
from hpczero.planner.search import distinct
from hpczero.spec.keys import keys
from hpczero.spec.load import from_dict
from hpczero.spec.optimizer import Outer
from hpczero.spec.rules import contradictions, without_effect
from tests.support.plans import everything, search, space


def test_every_key_of_a_layout_is_one_of_the_spec_that_may_change() -> None:
    for key, table in TABLES.items():
        assert keys()[f"{table}.{key}"].role in ("changeable", "site")


@pytest.mark.parametrize(
    "keys",
    [
        {"model__family": "bert"},
        {"model__family": "t5"},
        {"optimizer__name": "lamb"},
        {"optimizer__name": "one_bit_adam", "zero__shard_ranks": "node"},
        {"optimizer__outer": Outer(every=5), "zero__shard_ranks": 2},
        {},
    ],
    ids=str,
)
def test_layouts_obey_the_rules_of_the_spec(keys: dict[str, Any]) -> None:
    of, _ = space(Allocation.of_nodes(2, 6), **keys)
    for spec in random.Random(1).sample(list(everything(of)), 200):
        assert not contradictions(spec)
        assert not without_effect(spec)
        assert from_dict(spec.model_dump()).spec == spec, "the schema takes it"


def test_states_of_replicas_stay_in_memory() -> None:
    of, _ = space(Allocation.of_nodes(1, 4), zero__shard_ranks=2)
    assert len(of.offloads) == 3
    of, _ = space(Allocation.of_nodes(1, 4), zero__shard_ranks=2, optimizer__outer=Outer(every=5))
    assert list(of.offloads) == ["none"]


def test_each_layout_comes_once_and_all_values_come() -> None:
    of, _ = space(Allocation.of_nodes(2, 4))
    layouts = [Layout.of(spec) for spec in everything(of)]
    assert len(set(layouts)) == len(layouts)
    values = {key: {getattr(one, key) for one in layouts} for key in TABLES}
    assert values["tensor"] == values["pipeline"] == {1, 2, 4, 8}
    assert values["stage"] == {0, 1, 2, 3}
    assert values["shard_ranks"] == {"all", "node"}
    assert values["micro_batch"] >= {1, 2, 3, 4, 8, 64}
    assert values["recompute"] == {"none", "selective", "block"}
    assert values["schedule"] == {"1f1b", "interleaved"}
    assert {place.partition(":")[0] for place in values["offload"]} == {"none", "cpu", "nvme"}
    for key in ("sequence_parallel", "partition_activations"):
        assert values[key] == {False, True}


def divisions(of: Space) -> set[Any]:
    return {Layout.of(spec).shard_ranks for spec in everything(of)}


@pytest.mark.slow
def test_states_are_divided_inside_nodes_only_where_that_differs() -> None:
    assert divisions(space(Allocation.of_nodes(1, 8))[0]) == {"all"}
    assert divisions(space(Allocation.of_nodes(4, 1))[0]) == {"all"}
    of, _ = space(Allocation.of_nodes(2, 4))
    for spec in everything(of):
        if spec.zero.shard_ranks == "node":
            grid = Grid.build(spec.parallel, of.nodes.node_of_rank).shards_and_replicas("node")
            assert grid.size("shard") > 1 < grid.size("replica")


def test_the_number_of_workers_is_the_user_s() -> None:
    ways = Outer(every=5), Outer()
    for name, outer in zip(("adamw", "one_bit_adam"), ways, strict=True):
        of, _ = space(Allocation.of_nodes(2, 4), zero__shard_ranks=4, optimizer__name=name)
        optimizer = of.spec.optimizer.model_copy(update={"outer": outer})
        spec = of.spec.model_copy(update={"optimizer": optimizer})
        assert divisions(Space(spec, of.nodes)) == {4}
        assert all(one.tensor * one.pipeline <= 2 for one in Space(spec, of.nodes).parallels)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("parallel", "tensor", 4),
        ("parallel", "schedule", "gpipe"),
        ("parallel", "chunks", 3),
        ("parallel", "order", "data,tensor,pipeline"),
        ("zero", "stage", 3),
        ("zero", "shard_ranks", 2),
        ("zero", "offload", "cpu"),
        ("train", "micro_batch", 5),
        ("memory", "recompute", "selective"),
        ("memory", "recompute", "block"),
        ("memory", "recompute_every", 3),
        ("memory", "loss_chunk", 100),
    ],
)
@pytest.mark.few(2)
def test_what_is_pinned_stays(table: str, key: str, value: Any) -> None:
    pinned = {f"{table}__{key}": value}
    if key == "schedule":
        pinned["parallel__pipeline"] = 2  # without one it would have no effect
    of, _ = space(Allocation.of_nodes(1, 8), **pinned)
    found = {getattr(Layout.of(spec), key) for spec in everything(of)}
    assert found == {value}


def test_a_pinned_recompute_leaves_the_rest_free() -> None:
    of, _ = space(Allocation.of_nodes(1, 8), memory__recompute="block")
    layouts = [Layout.of(spec) for spec in everything(of)]
    assert {one.partition_activations for one in layouts} == {False, True}
    assert {one.recompute_every for one in layouts} == {1, 2}
    of, _ = space(Allocation.of_nodes(1, 8), memory__recompute="auto")
    assert {one.recompute for one in map(Layout.of, everything(of))} == {
        "none",
        "selective",
        "block",
    }


def test_orders_that_lie_alike_on_the_nodes_are_one() -> None:
    of, _ = space(Allocation.of_nodes(1, 8))
    assert [len(of.orders(parallel)) for parallel in of.parallels] == [1] * len(of.parallels)
    of, _ = space(Allocation.of_nodes(8, 8))
    grids = {(one.tensor, one.pipeline): of.orders(one) for one in of.parallels}
    assert len(grids[1, 1]) == len(grids[2, 1]) - 1 == 1
    assert len(grids[4, 4]) == 6
    assert grids[4, 4][0] == "tensor,data,pipeline"


def test_a_way_comes_after_all_that_it_contains() -> None:
    of, _ = space(Allocation.of_nodes(1, 8))
    for parallel in of.parallels:
        ways = of.savings(parallel, 16)
        assert ways[0] == Saving(0, 0, 0, 0)
        assert all(ways[-1].gives_up(way) for way in ways)
        for number, way in enumerate(ways):
            assert not any(way.gives_up(later) for later in ways[number + 1 :])


@pytest.mark.parametrize("memory_gb", [1.6, 2.5, 16])
def test_nothing_that_fits_is_lost(memory_gb: float) -> None:
    """Every layout that fits is there, or one that gives up less in its place."""
    of, machine = space(Allocation.of_nodes(1, 4), memory_gb, train__micro_batch=4)
    found = search(of, machine).run(thorough=True)
    node = machine.cluster.hardware
    room = Room(families.layers(of.spec.model), machine.platform, node, of.nodes)
    kept = {one.layout: one.fit.verdict for one in found.planned}
    assert len(kept) == len(found.planned) == found.counts.timed
    assert all(room.fit(one.spec) == one.fit for one in found.planned)
    tried = 0
    for parallel in of.parallels:
        order = of.orders(parallel)[0]
        for states in of.states(parallel, order):
            layout = of.layout(parallel, order, states, 4)
            fitting: list[Saving] = []
            for way in of.savings(parallel, 4):
                tried += 1
                one = of.saving(layout, way)
                verdict = room.fit(of.spec_with(one)).verdict
                needless = any(way.gives_up(less) for less in fitting)
                assert (one in kept) == (verdict != "does not fit" and not needless)
                if verdict == "fits":
                    fitting.append(way)
    counts = found.counts
    assert tried == counts.all
    assert counts.timed + counts.too_large + counts.needless == tried


@pytest.mark.parametrize(
    ("nodes", "spared", "memory_gb"), [(1, 3, 16), (1, 3, 2.5), (2, 16, 16), (2, 16, 2.5)]
)
@pytest.mark.slow
def test_bounds_lose_no_row_of_the_table(nodes: int, spared: int, memory_gb: float) -> None:
    """At most one layout in `spared` is timed of those that a thorough search times."""
    of, machine = space(Allocation.of_nodes(nodes, 4), memory_gb)
    short, thorough = (search(of, machine).run(slow) for slow in (False, True))
    rows, all_rows = (distinct(found.planned, 10) for found in (short, thorough))
    assert [one.layout for one in rows] == [one.layout for one in all_rows]
    assert short.counts.all == thorough.counts.all
    assert short.counts.timed < thorough.counts.timed / spared


def test_the_fastest_come_first_and_of_equal_ones_the_smallest() -> None:
    of, machine = space(Allocation.of_nodes(1, 4))
    planned = search(of, machine).run().planned
    for one, after in pairwise(planned):
        assert one.order <= after.order
    rows = distinct(planned, 10)
    assert rows[0] is planned[0]
    assert len(rows) == 10
    grids = {(one.layout.tensor, one.layout.pipeline, one.layout.micro_batch) for one in rows}
    assert len(grids) > 4, "no ten variants of one layout"


def test_rows_differ_in_time_or_memory() -> None:
    of, machine = space(Allocation.of_nodes(1, 4))
    one = search(of, machine).run().planned[0]
    account = one.fit.first
    same = replace(one, layout=one.layout._replace(stage=0))
    smaller = replace(account, size=account.size // 2)
    lighter = replace(one, fit=replace(one.fit, accounts=(smaller,)))
    other = replace(one, layout=one.layout._replace(tensor=64))
    assert distinct([one, same, lighter, other], 10) == [lighter, one, other]


@pytest.mark.slow
def test_a_layout_is_judged_as_the_search_does() -> None:
    of, machine = space(Allocation.of_nodes(2, 4))
    looking = search(of, machine)
    for one in looking.run().planned[:20]:
        assert looking.judge(one.spec) == one
    auto = one.spec.parallel.model_copy(update={"order": "auto"})
    decided = looking.judge(one.spec.model_copy(update={"parallel": auto}))
    assert decided.layout.order != "auto"


def test_round_numbers() -> None:
    assert round_numbers(1) == [1]
    assert round_numbers(10) == [1, 2, 3, 4, 6, 8, 10]
    assert round_numbers(64)[-3:] == [32, 48, 64]
