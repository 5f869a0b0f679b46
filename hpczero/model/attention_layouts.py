"""Layouts of block-sparse attention: the blocks of keys that a block of queries sees (pure).

With i a block of queries, j a block of keys, w = window, g = global; a causal model sees j <= i of
them, and of its own block the keys up to each query:

    local       the w blocks around its own; causal: up to its own
    longformer  local, and the first g blocks, which see all themselves (Beltagy et al. 2020)
    bigbird     the same, and `random` others; not causal: the last g, too (Zaheer et al. 2020)
    fixed       its group of w blocks, and the last g of each other group (Child et al. 2019)
    strided     local, and each w-th block before and behind it (the same)
    variable    its group, of a size in `groups`, the first g blocks, which see all, and `random`

Each kind has both forms, and a block of queries always sees itself. Random blocks are a hash of
(layer, head, i), so every rank has the same. In a causal layout no row depends on the length, so
that a model generates with what it was trained with.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from hpczero.hashing import mix
from hpczero.model import shapes
from hpczero.spec.model import Model

Row = tuple[int, ...]
EFFECT: dict[str, set[str]] = {  # the keys of [model.attention] that a kind reads
    "dense": set(),
    "local": {"block", "window"},
    "longformer": {"block", "window", "global"},
    "bigbird": {"block", "window", "global", "random", "heads"},
    "fixed": {"block", "window", "global", "heads"},
    "strided": {"block", "window", "heads"},
    "variable": {"block", "groups", "global", "random", "heads"},
}
PER_LAYER = ("kind", "block", "window", "global", "random")  # keys that may be lists over layers
_WITH_GLOBALS = ("longformer", "bigbird", "variable")  # blocks that all see, and that see all
_LEAST = 8  # positions in a block
_TRIES = 16  # draws for each random block, before all are put in order


@dataclass(frozen=True)
class Layout:
    """A layout of some heads for one number of positions.

    `patterns`: pattern -> block of queries -> blocks of keys, ascending.
    """

    block: int
    causal: bool
    patterns: tuple[tuple[Row, ...], ...]
    of_head: tuple[int, ...]  # head -> its pattern


@dataclass(frozen=True)
class LayoutRule:
    """The rule of a layer's layout of attention, for any number of positions."""

    layer: int  # that random blocks depend on; 0 if there are none
    kind: str
    block: int
    window: int
    groups: tuple[int, ...]
    globals: int
    random: int
    heads_differ: bool
    causal: bool = True

    def blocks(self, positions: int) -> int:
        return -(-positions // self.block)

    def patterns(self, heads: int) -> int:
        """Return how many patterns a layer with so many heads has; they take turns."""
        if not self.heads_differ:
            return 1
        if self.kind == "strided":
            return 2
        if self.kind == "fixed":
            return min(heads, max(1, self.window // max(1, self.globals)))
        return heads


def rule_of(model: Model, layer: int) -> LayoutRule | None:
    """Return the rule of a layer; None if it is dense. What its kind does not read is 0."""
    keys = model.attention

    def of_layer(name: str) -> Any:
        value = getattr(keys, name)
        return value[layer % len(value)] if isinstance(value, tuple) else value

    kind = of_layer("kind")
    if kind == "dense":
        return None
    read = {name: of_layer(name) if name in EFFECT[kind] else 0 for name in PER_LAYER[1:]}
    differ = keys.heads == "different" and model.heads > 1 and bool(_differs_by(kind, read))
    return LayoutRule(
        layer if read["random"] else 0,
        kind,
        read["block"],
        read["window"],
        keys.groups if kind == "variable" else (),
        read["global"],
        read["random"],
        differ,
        shapes.is_causal(model, layer),
    )


def _differs_by(kind: str, read: Mapping[str, int]) -> int:
    """Return the number of blocks that heads of a kind may see otherwise than others."""
    return read[{"strided": "window", "fixed": "global"}.get(kind, "random")]


def rules_of(model: Model) -> list[LayoutRule | None]:
    """Return the rules of all layers."""
    return [rule_of(model, layer) for layer in range(model.layers)]


def layout_of(rule: LayoutRule, positions: int, heads: range, all_heads: int) -> Layout:
    """Return the layout of these of a layer's heads."""
    count = rule.patterns(all_heads)
    numbers = [head % count for head in heads]
    used = sorted(set(numbers))
    blocks = rule.blocks(positions)
    patterns = tuple(
        tuple(_row(rule, blocks, number, row) for row in range(blocks)) for number in used
    )
    # a single block is no larger than what is in it
    block = rule.block if blocks > 1 else min(rule.block, -(-positions // _LEAST) * _LEAST)
    return Layout(block, rule.causal, patterns, tuple(map(used.index, numbers)))


def _row(rule: LayoutRule, blocks: int, number: int, row: int) -> Row:
    last = row + 1 if rule.causal else blocks  # the blocks that it may see end here
    if rule.kind in _WITH_GLOBALS and row in _globals(rule, blocks):
        return tuple(range(last))
    seen = {row, *(block for block in _seen(rule, blocks, number, row) if 0 <= block < last)}
    if rule.random:
        seen |= set(_random(rule, number, row, last, seen))
    return tuple(sorted(seen))


def _seen(rule: LayoutRule, blocks: int, number: int, row: int) -> Iterator[int]:
    """Yield the blocks that a row sees, before what is not there or is behind it is left out."""
    window = rule.window
    before = window - 1 if rule.causal else window // 2
    near = range(row - before, row + (window - 1) // 2 + 1)
    if rule.kind == "fixed":
        yield from _group(row, (window,))
        shift = number * rule.globals if rule.heads_differ else 0
        for end in range(window, blocks + window, window):
            yield from range(end - shift - rule.globals, end - shift)
    elif rule.kind == "strided":
        ways = near, range(row % window, blocks, window)
        yield from ways[number] if rule.heads_differ else chain(*ways)
    elif rule.kind == "variable":
        yield from _group(row, rule.groups)
    else:
        yield from near
    if rule.kind in _WITH_GLOBALS:
        yield from _globals(rule, blocks)


def _globals(rule: LayoutRule, blocks: int) -> list[int]:
    """Return the global blocks: in a causal layout those at the end have nobody to see them."""
    first = [*range(min(rule.globals, blocks))]
    if rule.kind == "bigbird" and not rule.causal:
        first += range(max(len(first), blocks - rule.globals), blocks)
    return first


def _group(row: int, sizes: tuple[int, ...]) -> range:
    """Return the blocks of the row's group; the last of these sizes repeats."""
    first = 0
    for size in sizes[:-1]:
        if row < first + size:
            return range(first, first + size)
        first += size
    first += (row - first) // sizes[-1] * sizes[-1]
    return range(first, first + sizes[-1])


def _random(rule: LayoutRule, number: int, row: int, last: int, seen: set[int]) -> list[int]:
    """Draw `random` blocks of those before `last` that are not seen; all where there are fewer."""
    key = mix(mix(mix(rule.layer) ^ number) ^ row)
    drawn: dict[int, None] = {}
    if last - len(seen) > 2 * rule.random:
        for turn in range(_TRIES * rule.random):
            block = mix(key ^ turn) % last
            if block not in seen:
                drawn[block] = None
            if len(drawn) == rule.random:
                return list(drawn)
    others = [block for block in range(last) if block not in seen]
    return sorted(others, key=lambda block: mix(key ^ block))[: rule.random]


def computed_pairs(
    rule: LayoutRule, positions: int, heads: int, of_rank: int | None = None
) -> float:
    """Return the pairs of a query and a key in the blocks that are there, of a head on average.

    `of_rank`: so many heads next to each other are a tensor rank's; the average of the busiest.
    """
    pairs = _of_heads(replace(rule, layer=0), positions, heads)  # random ones are as many
    count = max(1, of_rank or heads)
    of_ranks = [sum(pairs[first : first + count]) for first in range(0, max(1, heads), count)]
    return max(of_ranks) / count


@lru_cache(maxsize=1024)
def _of_heads(rule: LayoutRule, positions: int, heads: int) -> list[int]:
    layout = layout_of(rule, positions, range(heads), heads)
    pairs = [_pairs(pattern, rule.block, positions) for pattern in layout.patterns]
    return [pairs[number] for number in layout.of_head]


def _pairs(pattern: tuple[Row, ...], block: int, positions: int) -> int:
    last = len(pattern) - 1
    end = positions - last * block  # positions in the last block

    def size(number: int) -> int:
        return end if number == last else block

    return sum(
        size(row) * (len(columns) * block - (block - end) * (last in columns[-1:]))
        for row, columns in enumerate(pattern)
    )


def density(
    rule: LayoutRule | None, positions: int, heads: int, of_rank: int | None = None
) -> float:
    """Return the pairs that are computed as a share of those that dense attention has."""
    if rule is None:
        return 1.0
    return computed_pairs(rule, positions, heads, of_rank) / dense_pairs(positions, rule.causal)


@lru_cache(maxsize=1024)
def hides_nothing(rule: LayoutRule, positions: int, heads: int) -> bool:
    return all(
        len(row) == (number + 1 if rule.causal else len(rows))
        for rows in layout_of(rule, positions, range(heads), heads).patterns
        for number, row in enumerate(rows)
    )


def density_of_layers(model: Model, seq_len: int) -> float:
    """Return the density of all layers together, each in the positions of its stream."""
    computed = dense = 0.0
    for layer, rule in enumerate(rules_of(model)):
        positions = shapes.positions(model, layer, seq_len)
        pairs = dense_pairs(positions, shapes.is_causal(model, layer))
        computed += density(rule, positions, model.heads) * pairs
        dense += pairs
    return computed / dense


def dense_pairs(positions: int, causal: bool = True) -> int:
    return positions * (positions + 1) // 2 if causal else positions**2
