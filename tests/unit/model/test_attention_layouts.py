"""Layouts of block-sparse attention by their definitions, block by block."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.model.attention_layouts import (
    EFFECT,
    Layout,
    LayoutRule,
    computed_pairs,
    dense_pairs,
    layout_of,
    rule_of,
)
from hpczero.spec.attention import Attention
from hpczero.spec.model import Model

KINDS = [kind for kind in EFFECT if kind != "dense"]


def rule(kind: str, heads: str = "alike", **keys: Any) -> LayoutRule:
    causal = keys.pop("causal", True)
    found = rule_of(Model(attention=Attention(kind=kind, heads=heads, **keys)), 0)
    assert found
    return replace(found, causal=causal)


def rows_of(of: LayoutRule, blocks: int, heads: int = 1) -> list[list[set[int]]]:
    """The blocks that each head's rows see."""
    made = layout_of(of, blocks * of.block, range(heads), heads)
    return [[set(row) for row in made.patterns[number]] for number in made.of_head]


def defined(of: LayoutRule, blocks: int, row: int, block: int) -> bool:
    """Return True if the published definition has a block of keys in a row, chance apart."""
    near = 0 <= row - block < of.window
    if not of.causal:
        near = -((of.window - 1) // 2) <= row - block <= of.window // 2
    is_global = {block < of.globals, row < of.globals}
    if of.kind == "bigbird" and not of.causal:
        is_global |= {block >= blocks - of.globals, row >= blocks - of.globals}
    group = {"fixed": lambda at: at // of.window, "variable": lambda at: group_of(of, at)}
    rules = {
        "local": lambda: near,
        "longformer": lambda: near or True in is_global,
        "bigbird": lambda: near or True in is_global,
        "fixed": lambda: (
            group["fixed"](row) == group["fixed"](block)
            or block % of.window >= of.window - of.globals
        ),
        "strided": lambda: near or (row - block) % of.window == 0,
        "variable": lambda: group["variable"](row) == group["variable"](block) or True in is_global,
    }
    return (block <= row or not of.causal) and rules[of.kind]()


def group_of(of: LayoutRule, at: int) -> int:
    ends, last = [], 0
    while last <= at:
        last += of.groups[min(len(ends), len(of.groups) - 1)]
        ends.append(last)
    return len(ends)


@given(
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(1, 24),
    st.integers(1, 7),
    st.integers(0, 4),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_rows_are_by_the_definition(
    kind: str, causal: bool, blocks: int, window: int, count: int, groups: list[int], random: int
) -> None:
    of = rule(
        kind, block=8, window=window, groups=tuple(groups), random=random, causal=causal,
        **{"global": count},
    )  # fmt: skip
    (rows,) = rows_of(of, blocks)
    for row, seen in enumerate(rows):
        expected = {block for block in range(blocks) if defined(of, blocks, row, block)}
        assert row in seen
        assert expected <= seen
        drawn = seen - expected
        room = (row + 1 if causal else blocks) - len(expected)
        assert len(drawn) == min(of.random, room)
        assert not causal or max(seen) <= row


@given(st.sampled_from(KINDS), st.integers(1, 30), st.integers(1, 30))
def test_a_causal_row_does_not_depend_on_the_length(kind: str, one: int, more: int) -> None:
    of = rule(kind, block=8, window=3, heads="different", random=2)
    for short, long in zip(rows_of(of, one, 5), rows_of(of, one + more, 5), strict=True):
        assert long[:one] == short


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "heads" in EFFECT[kind]])
def test_heads_that_differ_see_together_what_one_alone_would_not(kind: str) -> None:
    of = rule(kind, block=8, window=4, heads="different", random=2)
    heads = rows_of(of, 16, 6)
    assert len({str(head) for head in heads}) == of.patterns(6) > 1
    alike = rows_of(rule(kind, block=8, window=4, random=2), 16)[0]
    together = [set().union(*rows) for rows in zip(*heads, strict=True)]
    if kind in ("fixed", "strided"):
        assert all(seen >= one for seen, one in zip(together, alike, strict=True))
    else:
        assert sum(map(len, together)) > sum(map(len, alike))


def test_one_head_sees_what_heads_see_in_turn() -> None:
    one = rule_of(Model(heads=1, attention=Attention(kind="strided", heads="different")), 0)
    assert one == rule("strided")


def test_ranks_have_the_layouts_of_their_heads() -> None:
    of = rule("bigbird", block=8, heads="different")
    whole = layout_of(of, 160, range(6), 6)
    for own in (range(2), range(2, 5), range(5, 6), range(6, 6)):
        part = layout_of(of, 160, own, 6)
        found = [part.patterns[number] for number in part.of_head]
        assert found == [whole.patterns[whole.of_head[head]] for head in own]


def test_layers_draw_other_blocks() -> None:
    model = Model(attention=Attention(kind="bigbird", block=8))
    rows = [rows_of(of, 40) for layer in range(3) if (of := rule_of(model, layer))]
    assert rows[0] != rows[1] != rows[2]


def test_lists_begin_again() -> None:
    keys = Attention(kind=("local", "dense", "fixed"), block=(8, 16), window=5)
    model = Model(layers=7, attention=keys)
    kinds = [(of.kind, of.block) if (of := rule_of(model, at)) else None for at in range(7)]
    once = [("local", 8), None, ("fixed", 8), ("local", 16), None, ("fixed", 16)]
    assert kinds == [*once, ("local", 8)]


def test_what_a_kind_does_not_read_changes_nothing() -> None:
    plain = rule_of(Model(attention=Attention(kind="local")), 3)
    changed = Attention(kind="local", random=7, groups=(9,), heads="different", **{"global": 5})
    assert rule_of(Model(attention=changed), 5) == plain


@given(st.sampled_from(KINDS), st.booleans(), st.integers(1, 100), st.integers(8, 20))
def test_pairs_are_those_of_the_blocks(kind: str, causal: bool, positions: int, block: int) -> None:
    of = rule(kind, block=block, window=2, heads="different", causal=causal)
    pairs = computed_pairs(of, positions, 3)
    made = layout_of(of, positions, range(3), 3)
    assert pairs == pytest.approx(counted(made, positions) / 3)
    if not causal:
        assert pairs <= dense_pairs(positions, causal)


def test_the_busiest_of_ranks_with_few_heads() -> None:
    """Every second one of strided heads sees its neighbours alone."""
    of = rule("strided", block=8, window=2, heads="different")
    near, far = (counted(layout_of(of, 100, range(head, head + 1), 5), 100) for head in (0, 1))
    assert far > near
    for together, busiest in {1: far, 2: (near + far) / 2, 3: (2 * far + near) / 3}.items():
        assert computed_pairs(of, 100, 6, together) == pytest.approx(busiest)
    assert computed_pairs(of, 100, 5, 5) == computed_pairs(of, 100, 5)


def counted(of: Layout, positions: int) -> int:
    sizes = [min(of.block, positions - first) for first in range(0, positions, of.block)]
    return sum(
        sizes[row] * sizes[column]
        for number in of.of_head
        for row, columns in enumerate(of.patterns[number])
        for column in columns
    )
