"""`hpczero show attention SPEC`: which blocks of keys a layer's queries see, as text and SVG."""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpczero import svg
from hpczero.errors import InputError, for_terminal
from hpczero.model.attention_layouts import (
    LayoutRule,
    computed_pairs,
    dense_pairs,
    density,
    layout_of,
    rule_of,
)
from hpczero.model.families import known
from hpczero.model.shapes import positions
from hpczero.safe_files import write_text
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from hpczero.text import printable

_MOST_CELLS = 64  # rows and columns of a text; a cell of a larger layout is several blocks
_SHADES = " .:+#"  # of a cell by the share of its blocks that are seen
_SIDE, _MARGIN, _TOP = 640, 20, 60  # pixels of a picture


@dataclass(frozen=True)
class Seen:
    """Figures of a layer's layout at so many positions."""

    layer: int
    stream: str  # "encoder" or "decoder", of a model that has both
    kind: str
    positions: int
    block: int
    blocks: int
    patterns: int  # that heads take turns with
    computed_pairs: float  # of a query and a key, of a head on average, in the blocks that are seen
    dense_pairs: int  # of dense attention
    density: float


def attention(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    layer, rule = _layer(spec, options.layer)
    heads, seq = spec.model.heads, positions(spec.model, layer, spec.seq_len)
    if not 0 <= options.head < heads:
        raise InputError(f"--head {options.head}: a layer has heads 0 to {heads - 1}")
    whole = layout_of(rule, seq, range(heads), heads)
    pattern = whole.patterns[whole.of_head[options.head]]
    shown = Seen(
        layer,
        _stream(spec, layer),
        rule.kind,
        seq,
        rule.block,
        len(pattern),
        len(whole.patterns),
        computed_pairs(rule, seq, heads),
        dense_pairs(seq, rule.causal),
        density(rule, seq, heads),
    )
    if options.svg:
        write_text(Path(options.svg), picture(shown, options.head, pattern))
    if options.json:
        print(json.dumps(asdict(shown) | {"head": options.head, "rows": pattern}))
        return 0
    for line in in_lines(shown):
        print(for_terminal(line))
    print(f"head {options.head}; a row is a block of queries, a column a block of keys")
    for row in cells(pattern):
        print(row.rstrip())
    return 0


def _layer(spec: Spec, number: int | None) -> tuple[int, LayoutRule]:
    """Return the layer that is asked for, or the first one with blocks."""
    model = spec.model
    if not known(model):
        raise InputError(f"model.family = {printable(model.family)} has no [model.attention]")
    if number is not None and not 0 <= number < model.layers:
        raise InputError(f"--layer {number}: the model has layers 0 to {model.layers - 1}")
    for layer in range(model.layers) if number is None else [number]:
        if rule := rule_of(model, layer):
            return layer, rule
    where = "all layers are" if number is None else f"layer {number} is"
    raise InputError(
        f"{where} dense: each query sees all keys, or those of model.window; "
        'model.attention.kind = "local" and others are sparse'
    )


def _stream(spec: Spec, layer: int) -> str:
    first = spec.model.encoder_blocks
    return "" if not first else "encoder" if layer < first else "decoder"


def in_lines(shown: Seen) -> list[str]:
    patterns = "all heads alike" if shown.patterns == 1 else f"{shown.patterns} patterns of heads"
    where = f"layer {shown.layer}" + (f" ({shown.stream})" if shown.stream else "")
    return [
        f"{where}: {shown.kind}, {shown.positions:,} positions in {shown.blocks:,} "
        f"blocks of {shown.block}; {patterns}",
        f"computed: {shown.computed_pairs:,.0f} pairs of a query and a key, "
        f"{shown.density:.1%} of the {shown.dense_pairs:,} of dense attention",
    ]


def cells(pattern: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield the rows of a picture in letters."""
    blocks = len(pattern)
    each = -(-blocks // _MOST_CELLS)
    for first in range(0, blocks, each):
        rows = pattern[first : first + each]
        counts = [0] * -(-blocks // each)
        for row in rows:
            for column in row:
                counts[column // each] += 1
        yield "".join(
            _SHADES[_shade(count, len(rows) * min(each, blocks - number * each))]
            for number, count in enumerate(counts)
        )


def _shade(count: int, of: int) -> int:
    """Return the shade of a cell in which so many blocks are seen: none only where none is."""
    return -(-count * (len(_SHADES) - 1) // of)


def picture(shown: Seen, head: int, pattern: Sequence[Sequence[int]]) -> str:
    title = f"{shown.kind}: {shown.density:.1%} of dense attention"
    page = svg.Page(_SIDE + 2 * _MARGIN, _SIDE + _TOP + 2 * _MARGIN, title)
    page.words(_MARGIN, 24, title, size=16)
    what = f"layer {shown.layer}, head {head}; {shown.positions:,} positions"
    page.words(_MARGIN, 46, f"{what} in blocks of {shown.block}")
    page.rectangle(_MARGIN, _TOP, _SIDE, _SIDE, svg.PALE)
    side = _SIDE / max(1, len(pattern))
    for number, row in enumerate(pattern):
        for first, count in _runs(row):
            x, y = _MARGIN + first * side, _TOP + number * side
            tip = f"block {number} sees {first} to {first + count - 1}"
            page.rectangle(x, y, count * side, side * 0.96, svg.BLUE, tip)
    page.words(_MARGIN, _TOP + _SIDE + 16, "keys from left to right, queries downwards")
    return str(page)


def _runs(row: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first block and the length of each run of neighbours."""
    first, count = 0, 0
    for column in row:
        if count and column == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = column, 1
    if count:
        yield first, count
