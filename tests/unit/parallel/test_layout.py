"""The place of every element: units, shards, what is stored; exhaustively on small models and
grids.
"""

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.checkpoint.piece_table import RankShard, stored_spans
from hpczero.model import families
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import (
    ALIGNMENT,
    Gaps,
    rectangles,
    shard_range,
    spans_of_part,
    unit_layout,
)
from hpczero.spec.schema import Model

ODD = Model(layers=2, hidden=10, heads=3, vocab=11, seq_len=5, ffn=7)


def elements(slices: tuple[slice, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(part.start, part.stop) for part in slices)))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_rectangles_are_the_stretch_in_order(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = list(rectangles(tuple(shape), start, stop))
    everything = elements(tuple(slice(0, length) for length in shape))
    assert [element for rectangle in found for element in elements(rectangle)] == everything[
        start:stop
    ]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("length", "grain", "ranks"),
    [(24, 4, 4), (24, 4, 6), (24, 4, 7), (257, 1, 4), (10, 4, 3), (0, 1, 2), (5, 1, 1)],
)
def test_shares_deal_out_whole_grains(length, grain, ranks):
    parts = [shard_range(length, grain, ranks, rank) for rank in range(ranks)]
    assert [element for part in parts for element in range(part.start, part.stop)] == list(
        range(length)
    )
    assert all(part.start % grain == 0 or part.start == length for part in parts)
    grains = [-(-(part.stop - part.start) // grain) for part in parts]
    assert max(grains) - min(grains) <= 1


def test_six_heads_on_four_ranks():
    assert [
        (part.stop - part.start) // 4 for part in (shard_range(24, 4, 4, rank) for rank in range(4))
    ] == [2, 2, 1, 1]


@pytest.mark.parametrize(("shards", "tensor"), list(product((1, 2, 3, 5), (1, 2, 3))))
def test_units_are_aligned_and_padded(shards, tensor):
    for layer, rank in product(families.layers(ODD), range(tensor)):
        layout = unit_layout(layer, shards, tensor, rank)
        assert layout.shard_size % ALIGNMENT == 0
        assert all(place.offset % ALIGNMENT == 0 for place in layout.slots)
        ends = [place.stop for place in layout.slots]
        assert all(end <= place.offset for end, place in zip(ends, layout.slots[1:], strict=False))
        assert ends[-1] <= layout.size < ends[-1] + (shards + 1) * ALIGNMENT + shards * ALIGNMENT


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (3, 2), (2, 3), (7, 1)])
def test_every_element_is_stored_once_without_gaps(data, tensor):
    """Over all ranks: what is whole on each tensor rank by the first one."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for shard, rank in product(range(data), range(tensor)):
        units = [unit_layout(layer, data, tensor, rank) for layer in families.layers(ODD)]
        offset = 0
        for stretch in stored_spans(RankShard(units, shard, rank)):
            assert stretch.offset == offset
            offset += stretch.inside.stop - stretch.inside.start
            found.setdefault(stretch.name, []).extend(
                element for box in stretch.rectangles for element in elements(box)
            )
    for parameter in (
        parameter for layer in families.layers(ODD) for parameter in layer.parameters
    ):
        assert sorted(found[parameter.name]) == elements(
            tuple(slice(0, length) for length in parameter.shape)
        )


def test_a_one_element_parameter_lies_on_one_rank():
    layout = unit_layout(
        Layer("unit", (Parameter("scale", (1,), ZEROS), Parameter("scalar", (), ZEROS))), 4
    )
    names = [
        [stretch.name for stretch in stored_spans(RankShard([layout], shard))] for shard in range(4)
    ]
    assert names == [["scale"], ["scalar"], [], []]


def test_rectangles_follow_each_other_as_their_elements_lie_in_the_unit():
    for layer, shard in product(families.layers(ODD), range(3)):
        layout = unit_layout(layer, 3)
        place_of = {place.parameter.name: place for place in layout.slots}
        for stretch in stored_spans(RankShard([layout], shard)):
            place = place_of[stretch.name]
            strides = [prod(place.shape[dim + 1 :]) for dim in range(len(place.shape))]
            flat = [
                sum(index * stride for index, stride in zip(at, strides, strict=True))
                for box in stretch.rectangles
                for at in elements(box)
            ]
            assert [place.offset + at for at in flat] == list(
                range(stretch.inside.start, stretch.inside.stop)
            )
            assert (
                layout.shard(shard).start
                <= stretch.inside.start
                < stretch.inside.stop
                <= layout.shard(shard).stop
            )


def rectangles_in(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    return list(
        product(
            *(
                [
                    slice(first, stop)
                    for first in range(length + 1)
                    for stop in range(first, length + 1)
                ]
                for length in shape
            )
        )
    )


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 4), (1, 4), (4, 1), (2, 3, 2), (0, 3), (2, 1, 2, 2)], ids=str
)
def test_stretches_of_every_part_in_the_flattened_whole(shape):
    """Every stretch of every rectangle, against the addresses of its elements one by one; as few
    stretches as there can be.
    """
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for part in rectangles_in(shape):
        addresses = [
            sum(index * stride for index, stride in zip(element, strides, strict=True))
            for element in elements(part)
        ]
        for start in range(len(addresses) + 1):
            for stop in range(start, len(addresses) + 1):
                found = list(spans_of_part(shape, part, start, stop))
                assert [
                    address for stretch in found for address in range(stretch.start, stretch.stop)
                ] == addresses[start:stop]
                breaks = sum(
                    after != before + 1
                    for before, after in zip(
                        addresses[start:stop], addresses[start + 1 : stop], strict=False
                    )
                )
                assert len(found) <= breaks + 1


@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_the_parts_of_the_tensor_ranks_hold_the_whole_parameter(tensor):
    for layer in families.layers(ODD):
        for index, parameter in enumerate(layer.parameters):
            held = []
            for rank in range(tensor):
                place = unit_layout(layer, 1, tensor, rank).slots[index]
                held += [
                    element
                    for part in place.logical(0, prod(place.shape))
                    for element in range(part.start, part.stop)
                ]
            copies = 1 if parameter.split is not None else tensor
            assert sorted(held) == sorted(list(range(parameter.size)) * copies)


def test_a_gap_that_just_fits_is_taken() -> None:
    gaps = Gaps(3 * ALIGNMENT)
    assert [gaps.take(ALIGNMENT), gaps.take(1), gaps.take(ALIGNMENT)] == [0, 64, 128]
    assert gaps.take(1) is None
    gaps.give_back(64)
    assert gaps.take(ALIGNMENT + 1) is None
    assert gaps.take(ALIGNMENT) == 64
