"""Cuts of tensor plans (pure): sections of fused maps, element by element, and heads."""

from itertools import product
from math import prod

import pytest

from hpczero.errors import InputError
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import unit_layout
from hpczero.parallel.tensor.heads import Column, columns_of_parent

SHAPES = [((12,), 0), ((12, 2), 0), ((2, 12), 1), ((3, 12), 1), ((2, 12, 2), 1)]


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("sections", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("grain", [1, 2])
@pytest.mark.few(40)
def test_a_rank_has_its_part_of_each_section(
    shape: tuple[int, ...], dim: int, sections: int, ranks: int, grain: int
) -> None:
    """By addresses and by rectangles, every stretch; together the ranks have each element once."""
    parameter = Parameter("fused", shape, ZEROS, split=dim, grain=grain, sections=sections)
    strides = [prod(shape[after + 1 :]) for after in range(len(shape))]
    held = []
    for rank in range(ranks):
        slot = unit_layout(Layer("layer", (parameter,)), 1, ranks, rank).slots[0]
        size = prod(slot.shape)
        own = [index for part in slot.logical(0, size) for index in range(part.start, part.stop)]
        assert len(own) == size
        assert own == sorted(own), "as in the memory of the rank's part"
        held += own
        for start in range(size + 1):
            for stop in range(start, size + 1):
                by_spans = slot.logical(start, stop)
                found = [index for part in by_spans for index in range(part.start, part.stop)]
                assert found == own[start:stop]
                boxes = slot.rectangles(slot.offset + start, slot.offset + stop)
                by_boxes = [
                    sum(index * stride for index, stride in zip(element, strides, strict=True))
                    for box in boxes
                    for element in product(*(range(part.start, part.stop) for part in box))
                ]
                assert by_boxes == own[start:stop]
    assert sorted(held) == list(range(prod(shape)))


@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_each_rank_has_the_keys_that_its_queries_see(queries: int, ranks: int) -> None:
    width = 3
    for keys in (keys for keys in range(1, queries + 1) if queries % keys == 0):
        facts = {"head_dim": width, "num_key_value_groups": queries // keys}
        columns = {"q": (queries * width, Column()), "k": (keys * width, Column())}
        if ranks > queries:
            with pytest.raises(InputError, match="every tensor rank needs one"):
                columns_of_parent("attention", facts, columns, ranks)
            continue
        found = columns_of_parent("attention", facts, columns, ranks)
        own = [list(found.own(ranks, rank)) for rank in range(ranks)]
        assert [head for heads in own for head in heads] == list(range(queries))
        assert all(own)
        for rank, heads in enumerate(own):
            assert found.seen(ranks, rank) == [head * keys // queries for head in heads]
            groups = found.sizes(facts, ranks, rank).get("num_key_value_groups")
            if queries > 1:
                assert groups == (queries // keys if ranks <= keys else 1)
        assert found.is_kept_whole("k") == (keys < ranks)


def test_columns_without_heads_and_wrong_heads() -> None:
    found = columns_of_parent("mlp", {}, {"up": (37, Column()), "gate": (37, Column())}, 4)
    assert (found.width, found.queries) == (37, 0)
    for facts, columns, what in [
        ({}, {"up": (3, Column())}, "fewer than the 4"),
        ({"num_heads": 5, "head_dim": 8}, {"q": (41, Column())}, "not a whole number of heads"),
        ({"num_heads": 4}, {"q": (32, Column(sections=3))}, "3 equal sections"),
        (
            {"head_dim": 4},
            {"q": (32, Column()), "k": (16, Column()), "v": (8, Column())},
            "cannot be cut alike",
        ),
    ]:
        with pytest.raises(InputError, match=what):
            columns_of_parent("module", facts, columns, 4)
