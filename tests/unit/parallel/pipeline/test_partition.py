"""Cutting the model into stages: against all possible cuts, and what the costs are."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.errors import InputError
from hpczero.model import families
from hpczero.parallel.pipeline.partition import cut, estimated_costs, layers_of, parts
from hpczero.spec.schema import Model, Parallel


def all_cuts(layers: int, count: int) -> Iterator[tuple[range, ...]]:
    for inner in combinations(range(1, layers), count - 1):
        yield tuple(range(begin, end) for begin, end in pairwise((0, *inner, layers)))


def rank_of(cuts: Sequence[range], costs: Sequence[int]) -> tuple[object, ...]:
    """Return the key to minimise, in this order: the largest cost, the unevenness, the layers in
    front.
    """
    sums = [sum(costs[layer] for layer in part) for part in cuts]
    return max(sums), sum(cost * cost for cost in sums), [-len(part) for part in reversed(cuts)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.data())
@settings(max_examples=400, deadline=None)
def test_the_cut_is_the_best_of_all_cuts(costs, data):
    count = data.draw(st.integers(1, len(costs)))
    assert cut(costs, count) == min(
        all_cuts(len(costs), count), key=lambda cuts: rank_of(cuts, costs)
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_measured_costs_are_cut_into_contiguous_parts_with_the_smallest_largest_cost(costs, data):
    count = data.draw(st.integers(1, len(costs)))
    found = cut(costs, count)
    assert [layer for part in found for layer in part] == list(range(len(costs)))
    assert all(len(part) for part in found)
    largest = [
        max(sum(costs[layer] for layer in part) for part in cuts)
        for cuts in all_cuts(len(costs), count)
    ]
    assert max(sum(costs[layer] for layer in part) for part in found) == pytest.approx(min(largest))


def test_seven_equal_layers_on_three_stages() -> None:
    assert [len(part) for part in cut([0.1] * 7, 3)] == [
        2,
        2,
        3,
    ]  # 0.1 three times is not 0.3 in floating point


def test_chunks_of_a_stage_are_far_apart() -> None:
    found = parts([1] * 8, stages=2, chunks=2)
    assert layers_of(found, 2, 0) == (range(2), range(4, 6))
    assert layers_of(found, 2, 1) == (range(2, 4), range(6, 8))


def test_costs_of_gpt_are_its_matrix_products() -> None:
    model = Model(layers=3, hidden=16, heads=2, ffn=24, vocab=100, seq_len=10)
    embedding, *blocks, head = estimated_costs(model, model.seq_len)
    weights = sum(
        parameter.size
        for parameter in families.layers(model)[1].parameters
        if parameter.decays and len(parameter.shape) > 1
    )
    biases = 3 * 16  # qkv's is [3, inner]: no matrix
    attention = 2 * 2 * 10 * 16  # a token's products with all keys and all values
    assert blocks == [3 * 10 * (2 * (weights - biases) + attention)] * 3
    assert head == 3 * 10 * 2 * 16 * 100
    assert 0 < embedding < blocks[0] / 10


def test_a_large_vocabulary_takes_blocks_off_the_last_stage() -> None:
    small, large = (
        estimated_costs(Model(layers=16, hidden=256, heads=4, vocab=vocab), 128)
        for vocab in (257, 50257)
    )
    assert [len(part) for part in parts(small, 4)] == [5, 4, 4, 5]
    assert [len(part) for part in parts(large, 4)] == [6, 5, 6, 1]


def test_costs_are_there_for_every_layer() -> None:
    for model in (Model(), Model(layers=1, heads=3, head_dim=7, ffn=5)):
        assert len(estimated_costs(model, model.seq_len)) == len(families.layers(model))


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "expected"),
    [
        (
            6,
            7,
            1,
            (
                "parallel.pipeline = 7, but layers() gives 6: use parallel.pipeline = 6 or "
                "fewer, or at least 7 layers"
            ),
        ),
        (
            10,
            3,
            4,
            (
                "makes 12 parts, but layers() gives 10: use parallel.chunks = 3, or "
                "parallel.pipeline = 2 or fewer, or"
            ),
        ),
        (
            10,
            12,
            2,
            "makes 24 parts, but layers() gives 10: use parallel.pipeline = 5 or fewer, or",
        ),
        (
            2,
            5,
            3,
            (
                "makes 15 parts, but layers() gives 2: use parallel.pipeline = 2 with "
                "parallel.chunks = 1, or"
            ),
        ),
        (1, 2, 1, "use parallel.pipeline = 1, or at least 2 layers"),
        (0, 2, 1, "parallel.pipeline = 2, but layers() gives 0: use at least 2 layers"),
    ],
)
def test_more_parts_than_layers_of_a_module_is_refused_with_what_would_work(
    layers: int, stages: int, chunks: int, expected: str
) -> None:
    nn = pytest.importorskip("torch").nn
    from hpczero.parallel.pipeline.user_stages import stage_of

    class Offering(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))

        def layers(self) -> list[object]:
            return list(self.own)

        def loss(self, output: object, targets: object) -> None: ...

    with pytest.raises(InputError) as error:
        stage_of(Offering(), Parallel(pipeline=stages, chunks=chunks, schedule="interleaved"), 0)
    assert expected in str(error.value)


def test_what_the_message_proposes_works() -> None:
    assert len(parts([1] * 10, 3, 3)) == 9
    assert len(parts([1] * 10, 2, 4)) == 8
    assert len(parts([1] * 10, 5, 2)) == 10
    assert len(parts([1] * 2, 2, 1)) == 2


def test_wrong_costs_are_refused() -> None:
    for costs in ([1, -1], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(AssertionError, match="finite"):
            cut(costs, 1)
    with pytest.raises(AssertionError, match="package:factory"):
        estimated_costs(Model(family="package:factory"), 128)


def test_hundreds_of_layers_are_cut_at_once() -> None:
    """A cut that tries all places for all parts would take minutes here."""
    found = cut([3, *[10] * 2000, 7], 256)
    assert max(len(part) for part in found) == 8
