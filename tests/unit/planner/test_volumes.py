"""Bytes sent in a step, and the order of the axes that follows from them. That runs send just
this: tests/mpi/planner/test_volumes.py.
"""

import itertools
import random
from collections import Counter
from math import prod
from typing import Any

import pytest

from hpczero.comm.grid import Grid
from hpczero.errors import InputError
from hpczero.model import families
from hpczero.model.shapes import Moments, Peak
from hpczero.parallel.pipeline.partition import chunks_of_stages, layers_that_run
from hpczero.parallel.pipeline.schedule import (
    RECEIVED_AHEAD,
    forward_only,
    most_arrived,
    schedule,
    scheduled_actions,
)
from hpczero.parallel.pipeline.simulate import simulate
from hpczero.planner.activations import arrived, peak
from hpczero.planner.gathers import gathers, gathers_in_step, simulate_gathers
from hpczero.planner.memory import needs_on_grid
from hpczero.planner.sent import Sent
from hpczero.planner.volumes import Volumes, resolved
from hpczero.spec.rules import AXES
from hpczero.spec.schema import Model, Parallel, Spec, Train, Zero

MODEL = Model(layers=6, hidden=64, heads=4, vocab=257, seq_len=32)
TWO_NODES = [0, 0, 0, 0, 1, 1, 1, 1]


def job(model: Model = MODEL, batch: int = 16, stage: Any = 1, **parallel: Any) -> Spec:
    return Spec(
        model=model,
        train=Train(global_batch=batch, micro_batch=2),
        zero=Zero(stage=stage),
        parallel=Parallel(**parallel),
    )


def grid_of(spec: Spec, node_of_rank: list[int]) -> Grid:
    return Grid.build(resolved(spec, node_of_rank), node_of_rank)


def volumes(spec: Spec, grid: Grid) -> Volumes:
    return Volumes(spec, families.layers(spec.model), grid.size("data"))


def test_a_step_in_formulas() -> None:
    """4 all-reduces a block and micro-batch, the activations at the boundary, the parameters
    twice.
    """
    spec = job(tensor=2, pipeline=2, order="tensor,data,pipeline")
    grid = grid_of(spec, TWO_NODES)
    found = volumes(spec, grid)
    stream = 2 * MODEL.seq_len * MODEL.hidden * 2  # bytes of a micro-batch of 2 sequences
    first, last = found.of_rank(grid, 0), found.of_rank(grid, 7)
    counts = [
        len([layer for layer in chunk if layer.name.startswith("blocks")])
        for (chunk,) in found.chunks
    ]
    assert sum(counts) == MODEL.layers
    loss = 4 * 3 * (2 * 4 * MODEL.seq_len)  # 4 micro-batches, 3 numbers of each token
    norm = Sent(8, 0)
    assert first["tensor"] == {
        "all_reduce": Sent(4 * (4 * counts[0] + 1) * stream, 0),
        "all_gather": norm,
    }
    assert last["tensor"] == {
        "all_reduce": Sent(4 * (4 * counts[1] + 1) * stream + loss, 0),
        "all_gather": norm,
    }
    assert first["pipeline"]["send"] == last["pipeline"]["send"] == Sent(0, 4 * stream)
    shard = (
        -(-(-(-MODEL.vocab // 2) * MODEL.hidden) // (2 * 64)) * 64
    )  # of a data rank, of the tokens' vectors of a tensor rank
    assert first["pipeline"]["all_reduce"] == Sent(0, shard * 2), "tied embeddings"
    assert first["pipeline"]["all_gather"] == Sent(0, 8)
    units = found.among_data.units(found.data_ranks).of(found.chunks[0][0])
    parameters = sum(unit.size for unit in units) * 2
    assert first["data"] == {"all_gather": norm}, (
        "the data ranks share a node, and its memory: they send the norm alone"
    )
    apart = job(tensor=2, pipeline=2, order="tensor,pipeline,data")
    grid = grid_of(apart, TWO_NODES)
    data = volumes(apart, grid).of_rank(grid, 0)["data"]
    assert data == {
        "reduce_scatter": Sent(0, parameters // 2),
        "all_gather": Sent(0, parameters // 2 + 8),
    }


def test_totals_are_the_ranks_together() -> None:
    """On nodes of any sizes, for every order, stage and schedule: the sum over ranks, and the
    most of a rank.
    """
    choice = random.Random(7)
    for order, stage in itertools.product(itertools.permutations(AXES), range(4)):
        parallel: dict[str, Any] = {
            "tensor": choice.choice((1, 2, 3)),
            "pipeline": choice.choice((1, 2)),
            "order": ",".join(order),
        }
        parallel |= choice.choice(
            (
                {},
                {"sequence_parallel": True},
                {"schedule": "interleaved", "chunks": 2},
                {"schedule": "gpipe"},
            )
        )
        ranks = parallel["tensor"] * parallel["pipeline"] * choice.choice((1, 2, 3))
        spec = job(MODEL.model_copy(update={"seq_len": 33}), 13, stage, **parallel)
        grid = grid_of(spec, sorted(choice.choices(range(3), k=ranks)))
        found = volumes(spec, grid)
        of_ranks = [found.of_rank(grid, rank) for rank in range(ranks)]
        for axis, operations in found.totals(grid).items():
            for name, total in operations.items():
                each = [sent.get(axis, {}).get(name, Sent()) for sent in of_ranks]
                assert total.all == Sent(
                    sum(sent.inside for sent in each), sum(sent.between for sent in each)
                )
                assert total.rank == Sent(
                    max(sent.inside for sent in each), max(sent.between for sent in each)
                )


def test_one_rank_sends_nothing() -> None:
    spec = job()
    grid = grid_of(spec, [0])
    assert volumes(spec, grid).totals(grid) == {}


def test_auto_is_the_order_with_the_fewest_bytes_between_nodes() -> None:
    choice = random.Random(3)
    for _ in range(40):
        parallel = {"tensor": choice.choice((1, 2, 4)), "pipeline": choice.choice((1, 2, 4))}
        model = MODEL.model_copy(
            update={"vocab": choice.choice((10, 50_000)), "seq_len": choice.choice((8, 512))}
        )
        spec = job(model, choice.choice((4, 64)), choice.choice((0, 3)), **parallel)
        ranks = parallel["tensor"] * parallel["pipeline"] * choice.choice((1, 2, 4))
        node_of_rank = choice.choices(range(4), k=ranks)
        between = {}
        for order in itertools.permutations(AXES):
            grid = Grid.build(
                spec.parallel.model_copy(update={"order": ",".join(order)}), node_of_rank
            )
            between[",".join(order)] = volumes(spec, grid).between_nodes(grid)
        chosen = resolved(spec, node_of_rank).order
        assert between[chosen] == min(between.values())
        assert chosen == next(
            order for order, sent in between.items() if sent == between[chosen]
        ), "of equal ones the first"


def test_what_is_cheapest_between_nodes_depends_on_the_model() -> None:
    """Long sequences make activations expensive, a large vocabulary the parameters."""
    long = job(MODEL.model_copy(update={"seq_len": 2048}), tensor=4)
    wide = job(MODEL.model_copy(update={"vocab": 2_000_000, "seq_len": 2}), 2, tensor=4)
    node_of_rank = [rank // 4 for rank in range(16)]
    assert resolved(long, node_of_rank).order == "tensor,data,pipeline"
    assert resolved(wide, node_of_rank).order == "data,tensor,pipeline"


def test_orders_that_are_equal_or_cannot_be_told_apart() -> None:
    assert resolved(job(tensor=2, pipeline=2), [0] * 8).order == "tensor,data,pipeline"
    assert resolved(job(), [0, 0, 1, 1]).order == "tensor,data,pipeline"
    unknown = job(Model(family="some.module:factory"), tensor=2)
    assert resolved(unknown, TWO_NODES).order == "tensor,data,pipeline"
    assert resolved(job(tensor=2, order="data,tensor"), TWO_NODES).order == "data,tensor", (
        "what is said is taken"
    )


def test_a_grid_that_does_not_fit_names_sizes_that_the_model_allows() -> None:
    with pytest.raises(InputError) as caught:
        resolved(job(tensor=3), [0] * 32)
    assert str(caught.value) == (
        "tensor(3) does not divide the 32 ranks given: use mpirun -n 33 or 30, or "
        "parallel.tensor = 2 or 4"
    )


def test_stages_hold_every_layer_once_and_a_copy_of_what_is_tied() -> None:
    layers = families.layers(MODEL)
    for parallel in (
        {"pipeline": 3},
        {"pipeline": 2, "schedule": "interleaved", "chunks": 3},
        {"pipeline": 8},
    ):
        chunks = chunks_of_stages(job(**parallel), layers)
        parts = [
            chunk for index in range(len(chunks[0])) for chunk in (stage[index] for stage in chunks)
        ]
        assert [layer.name for layer in layers_that_run(parts)] == [layer.name for layer in layers]
        tied, head = parts[-1][-2:]
        assert {parameter.name for parameter in head.parameters} == {
            "head.norm.weight",
            "head.norm.bias",
        }
        assert head.uses == ("embedding.lookup.tokens",) == (tied.name,)
        assert parts[0][0] == tied, "a unit of its own, equal on both stages"
        assert [parameter.name for parameter in parts[0][1].parameters] == [
            "embedding.lookup.positions"
        ]
    assert chunks_of_stages(job(), layers) == [(tuple(layers),)]


def test_units_are_gathered_when_they_are_gone() -> None:
    assert simulate_gathers([64, 64, 64], [[(0,), (1,), (0,), (2,), (1,)]]) == {0: 1, 1: 2, 2: 1}
    small = [64, 64, 192, 64, 64]  # room for six of the small ones
    assert simulate_gathers(small, [[(0,), (1,), (3,), (4,), (0,)]]) == {0: 1, 1: 1, 3: 1, 4: 1}
    assert simulate_gathers(small, [[(0, 1), (2,), (0,)], [(2,), (2,)]]) == {0: 1, 1: 1, 2: 1}, (
        "a pass begins with what is still there"
    )


def test_what_is_gathered_ahead_may_be_gone_before_it_is_used() -> None:
    """A pass that goes the way of the longest one at first: what comes next there is gathered,
    and makes no difference but to what has to go.
    """
    longest, other = [(0,), (1,), (2,), (1,), (0,)], [(0,), (2,)]
    assert simulate_gathers([64, 64, 64], [other, longest]) == {0: 3, 1: 2, 2: 2}
    assert simulate_gathers([64, 64, 64], [longest, other]) == {0: 2, 1: 1, 2: 2}


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"schedule": "gpipe"},
        {"pipeline": 3},
        {"pipeline": 4},
        *(
            {"pipeline": stages, "schedule": "interleaved", "chunks": chunks}
            for stages, chunks in ((2, 2), (2, 4), (4, 2))
        ),
        *({"pipeline": stages, "schedule": "gpipe"} for stages in (2, 3)),
    ],
    ids=str,
)
def test_long_schedules_repeat_themselves(parallel: dict[str, Any]) -> None:
    """The reckoning from the first micro-batches equals going through all of them."""
    spec = job(**parallel)
    stages = chunks_of_stages(spec, families.layers(MODEL))
    for stage, chunks in enumerate(stages):
        sizes = [-(-layer.size // 64) * 64 for chunk in chunks for layer in chunk]
        for many in (1, 2, 5, 12, 13, 18, 29):
            one_by_one = gathers(chunks, sizes, spec.parallel, stage, many)
            of_size = Counter[int]()
            for unit, often in one_by_one.items():
                of_size[sizes[unit]] += often
            assert gathers_in_step(chunks, sizes, spec.parallel, stage, many) == of_size


def moments(kept: float, forward: float, backward: float) -> Moments:
    return Moments(kept, Peak(kept, forward), Peak(kept, backward))


@pytest.mark.parametrize(
    ("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_what_is_under_way_is_what_the_simulator_sees(kind: Any, chunks: int) -> None:
    """Activations kept, and the buffers of messages that go with them: those kept, and of the
    next actions.
    """
    for stages, micro_batches in itertools.product((2, 3, 4), (1, 2, 3, 4, 6, 8, 12, 31)):
        parallel = Parallel(pipeline=stages, schedule=kind, chunks=chunks)
        actions = schedule(kind, stages, chunks, micro_batches)
        peaks = simulate(actions, chunks, micro_batches).peak_live
        assert peaks == tuple(
            peak(parallel, [moments(1, 1, 1)] * chunks, stage, micro_batches).widest
            for stage in range(stages)
        )
        for stage in range(stages):
            everything = most_arrived(scheduled_actions(actions, chunks, stage, RECEIVED_AHEAD))
            evaluation = most_arrived(
                scheduled_actions(forward_only(actions), chunks, stage, RECEIVED_AHEAD)
            )
            assert (
                arrived(parallel, stage, micro_batches, evaluates=False)
                == everything
                <= peaks[stage] + RECEIVED_AHEAD + 1
            )
            assert arrived(parallel, stage, micro_batches, evaluates=True) == max(
                everything, evaluation
            )


def test_the_widest_moment_depends_on_what_each_chunk_keeps() -> None:
    parallel = Parallel(pipeline=2, schedule="interleaved", chunks=2)
    first = peak(parallel, [moments(10, 10, 15), moments(1, 1, 1)], 1, 8)
    assert first == Peak(2 * 10 + 10, 2 * 10 + 15), "3 micro-batches of the first chunk"
    assert peak(parallel, [moments(1, 1, 1), moments(10, 10, 15)], 1, 8) == Peak(2 + 10, 2 + 15)
    assert peak(Parallel(), [moments(3, 5, 7)], 0, 100) == Peak(3, 7)
    gpipe = Parallel(pipeline=2, schedule="gpipe")
    assert peak(gpipe, [moments(3, 5, 7)], 1, 100) == Peak(100 * 3, 99 * 3 + 7)


def held(model: Model, **parallel: Any) -> list[int]:
    """Parameters of each part of the model that ranks have."""
    spec = job(model, 16, 0, **parallel)
    grid = grid_of(spec, [0] * (spec.parallel.tensor * spec.parallel.pipeline))
    return [
        part.rank["moments"] // 8
        for part in needs_on_grid(spec, families.layers(model), grid)[0].parts
    ]


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (
            Model(layers=24, hidden=1024, heads=16, vocab=257, seq_len=128),
            {"pipeline": 4, "tensor": 2},
        ),
        (
            Model(layers=8, hidden=1024, heads=16, vocab=8192, seq_len=128, tied_embeddings=False),
            {"pipeline": 2},
        ),
        (
            Model(layers=8, hidden=1024, heads=16, vocab=8192, seq_len=128, tied_embeddings=False),
            {"tensor": 2},
        ),
    ],
)
def test_a_ranks_parameters_are_the_balanced_share(model: Model, parallel: dict[str, int]) -> None:
    """The layers can be divided here."""
    share = families.parameter_count(model) / prod(parallel.values())
    assert all(0.95 * share < own < 1.05 * share for own in held(model, **parallel))


@pytest.mark.parametrize("pipeline", [2, 4])
def test_tied_embeddings_are_held_once_more_and_nothing_else_is(pipeline: int) -> None:
    tied = Model(layers=8, hidden=1024, heads=16, vocab=8192, seq_len=128)
    whole = families.parameter_count(tied)
    assert sum(held(tied, pipeline=pipeline)) == whole + tied.vocab * tied.hidden
    untied = tied.model_copy(update={"tied_embeddings": False})
    assert sum(held(untied, pipeline=pipeline)) == families.parameter_count(untied)


def test_with_the_copy_two_stages_have_equal_shares() -> None:
    tied = Model(layers=8, hidden=1024, heads=16, vocab=8192, seq_len=128)
    share = (families.parameter_count(tied) + tied.vocab * tied.hidden) / 2
    assert held(tied, pipeline=2) == pytest.approx([share, share], rel=0.01)


def test_memory_of_stages_and_tensor_ranks() -> None:
    """The node's need is that of all its ranks."""
    model = Model(layers=16, hidden=512, heads=8, vocab=1024, seq_len=64)
    whole = families.parameter_count(model)
    spec = job(model, 16, 0, tensor=2, pipeline=4, order="tensor,data,pipeline")
    needs = needs_on_grid(
        spec, families.layers(model), Grid.build(spec.parallel, [rank // 4 for rank in range(16)])
    )
    assert len(needs) == 4
    weights = [
        sum(part.rank["moments"] // 8 for part in need.parts) / len(need.parts)
        for need in needs.values()
    ]
    assert sum(weights) * 2 == pytest.approx(whole + 1024 * 512, rel=0.01), (
        "the last stage has a copy of the embedding"
    )
    assert all(need.ranks == 4 for need in needs.values())
    first, last = needs[0], needs[3]
    assert first.rank["activations"] > last.rank["activations"], (
        "the first stage keeps the most micro-batches"
    )
    parts = job(
        model, 16, 0, tensor=2, pipeline=4, sequence_parallel=True, order="tensor,data,pipeline"
    )
    shared = needs_on_grid(
        parts, families.layers(model), Grid.build(parts.parallel, [rank // 4 for rank in range(16)])
    )
    assert shared[0].rank["activations"] < first.rank["activations"]


def test_thousands_of_ranks_take_no_time() -> None:
    model = Model(layers=96, hidden=12288, heads=96, vocab=50257, seq_len=2048)
    spec = job(model, 1536, 3, tensor=8, pipeline=16)
    grid = grid_of(spec, [rank // 8 for rank in range(4096)])
    assert grid.axes == ("tensor", "data", "pipeline")
    found = volumes(spec, grid)
    assert found.totals(grid)["tensor"]["all_reduce"].all.between == 0
    assert len(found._known) < 400, "equal groups are counted once"
