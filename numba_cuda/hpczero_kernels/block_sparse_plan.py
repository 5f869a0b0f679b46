"""Work of block-sparse attention in the order in which it is done; numpy alone.

An item is a block of queries of one sample and head, with the blocks of keys that some of its
queries see. Items with the same number of blocks stand together; a chunk is as many of them as
stay in a core's cache. A query sees an interval of positions, [low, high): up to its own if the
layout is causal, of its own document alone. What of an item's blocks is outside of it is masked,
and a block wholly outside is not part of the item.

Legend: unit: a head of a sample, sample * heads + head. `documents` has, for each sample, the ends
of its documents, the last of them seq.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from hpczero_kernels.block_layout import BlockLayout

Documents = Sequence[Sequence[int]]
Ends = tuple[tuple[int, ...], ...]
Numbers = NDArray[np.int64]

PART = 4096  # keys of an item that are worked on together
_CHUNK = 1 << 20  # elements of a chunk's probabilities, keys and values (docs/benchmarks.md)
_OF_KEY = 128  # elements of a key and its value, about: heads have 64 or 128


@dataclass(frozen=True)
class Chunk:
    """Items first .. last - 1 of a plan, of `width` blocks of keys each.

    Gradients of keys are added up chunk after chunk: `after` are those whose keys this one shares.
    """

    first: int
    last: int
    width: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Items first .. last - 1, and of the blocks of keys of each those from `begin` to `end`."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def items(self) -> int:
        return self.last - self.first

    @property
    def width(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class Plan:
    """Items and chunks for one shape, and the intervals that queries see."""

    block: int
    blocks: int  # of one head
    groups: int  # heads of queries that share a head of keys
    keys: NDArray[np.int32]  # blocks of keys within a head, item after item
    starts: Numbers  # item -> where its blocks begin in `keys`
    queries: Numbers  # item -> its block of queries: unit * blocks + the block within its head
    low: NDArray[np.int32]  # [samples, or 1 if all are alike, blocks * block]
    high: NDArray[np.int32]
    rows: int  # units that share a row of `low` and `high`
    chunks: list[Chunk]

    @property
    def computed_pairs(self) -> int:
        """Pairs of a query and a key in the blocks that are worked on, of all samples and heads."""
        blocks = sum((chunk.last - chunk.first) * chunk.width for chunk in self.chunks)
        return blocks * self.block**2

    def parts(self, chunk: Chunk) -> list[Part]:
        """Return the parts of a chunk whose blocks are worked on together."""
        most = max(1, PART // self.block)
        return [
            Part(chunk.first, chunk.last, begin, min(begin + most, chunk.width))
            for begin in range(0, chunk.width, most)
        ]


@dataclass(frozen=True)
class _Rows:
    """Blocks of keys of all rows of one pattern: `columns`, row after row, `counts` in each."""

    columns: Numbers
    counts: Numbers

    @property
    def of_columns(self) -> Numbers:
        return np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)


def plan_of(
    layout: BlockLayout,
    samples: int,
    heads: int,
    kv_heads: int,
    seq: int,
    documents: Documents | None = None,
) -> Plan:
    """Return the plan for these shapes, a kept one if there is one."""
    key = samples, heads, kv_heads, seq, ends_of(documents, samples)
    plan: Plan = layout.kept("plan", key, lambda: _planned(layout, *key))
    return plan


def ends_of(documents: Documents | None, samples: int) -> Ends | None:
    """Return the documents as a key; None where each sample is a single one."""
    if documents is None or all(len(of_sample) == 1 for of_sample in documents):
        return None
    assert len(documents) == samples, (len(documents), samples)
    return tuple(tuple(map(int, of_sample)) for of_sample in documents)


def _planned(
    layout: BlockLayout,
    samples: int,
    heads: int,
    kv_heads: int,
    seq: int,
    documents: Documents | None,
) -> Plan:
    assert len(layout.of_head) == heads, (len(layout.of_head), heads)
    assert heads == 0 or heads % kv_heads == 0, (heads, kv_heads)
    blocks = -(-seq // layout.block)
    groups = heads // kv_heads if heads else 1
    of_sample = [
        intervals(layout, seq, ends) for ends in ([[seq]] if documents is None else documents)
    ]
    low, high = (np.stack(both).astype(np.int32) for both in zip(*of_sample, strict=True))
    seen = [
        [_within(rows, layout.block, seq, *one) for rows in _rows_of(layout, blocks)]
        for one in of_sample
    ]
    flat = list(chain.from_iterable(seen))
    counts = np.stack([rows.counts for rows in flat]) if flat else np.zeros((1, blocks), np.int64)
    starts = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
    # [samples, heads] -> number of its rows in `flat`
    number = np.zeros((samples, heads), np.int64) + np.array(layout.of_head, np.int64)
    if documents is not None:
        number += np.arange(samples, dtype=np.int64)[:, None] * len(layout.patterns)
    widths = counts[number.ravel()].ravel()
    order = np.argsort(widths, kind="stable")
    order = order[np.searchsorted(widths[order], 1) :]
    keys = np.concatenate([rows.columns for rows in flat]) if flat else np.zeros(0, np.int64)
    return Plan(
        layout.block, blocks, groups, keys.astype(np.int32),
        starts[number.ravel()].ravel()[order], order.astype(np.int64), low, high,
        samples * heads if documents is None else heads,
        _chunks(widths[order], order // max(1, blocks * groups), layout.block),
    )  # fmt: skip


def _rows_of(layout: BlockLayout, blocks: int) -> list[_Rows]:
    """Return the rows of each pattern as arrays."""

    def made() -> list[_Rows]:
        found = []
        for pattern in layout.patterns:
            assert len(pattern) == blocks, (len(pattern), blocks)
            counts = np.fromiter(map(len, pattern), np.int64, blocks)
            columns = np.fromiter(chain.from_iterable(pattern), np.int64, int(counts.sum()))
            rows = _Rows(columns, counts)
            last = rows.of_columns if layout.causal else blocks - 1
            assert ((columns >= 0) & (columns <= last)).all(), "a block behind its row"
            found.append(rows)
        return found

    rows: list[_Rows] = layout.kept("rows", blocks, made)
    return rows


def intervals(layout: BlockLayout, seq: int, ends: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return the first key that each query may see, and the one behind the last.

    Queries behind the sequence, in its last block, may see none.
    """
    at = np.arange(seq, dtype=np.int64)
    edges = np.array([0, *ends], np.int64)
    assert edges[-1] == seq, (ends, seq)
    number = np.searchsorted(edges[1:], at, side="right")
    padding = 0, -seq % layout.block
    return (
        np.pad(edges[number], padding),
        np.pad(at + 1 if layout.causal else edges[number + 1], padding),
    )


def _within(rows: _Rows, block: int, seq: int, low: Numbers, high: Numbers) -> _Rows:
    """Leave out the blocks of keys that no query of the row's block may see.

    Intervals begin and end in ascending order, so that those of a block have no gap.
    """
    blocks = len(rows.counts)
    at = np.arange(blocks, dtype=np.int64) * block
    row = rows.of_columns
    begins = rows.columns * block
    lowest, highest = low[at], high[np.minimum(at + block, seq) - 1]
    kept = (begins < highest[row]) & (begins + block > lowest[row])
    return _Rows(rows.columns[kept], np.bincount(row[kept], minlength=blocks))


def _chunks(widths: Numbers, kv_units: Numbers, block: int) -> list[Chunk]:
    """Cut the items, in order of width, into chunks; those of a head of keys lie far apart.

    Then no thread waits for another one to add its gradients.
    """
    found: list[tuple[int, int, int, int]] = []  # first, last, width, chunks of its head before it
    before: dict[int, int] = {}
    edges = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(widths)]
    for begin, end in pairwise(edges):
        if begin == end:
            continue
        width = int(widths[begin])
        elements = min(width * block, max(PART, block)) * (block + _OF_KEY)
        size = max(1, _CHUNK // elements)
        for first in range(begin, end, size):
            unit = int(kv_units[first])
            before[unit] = before.get(unit, -1) + 1
            found.append((first, min(first + size, end), width, before[unit]))
    found.sort(key=lambda chunk: (chunk[3], chunk[0]))
    latest: dict[int, int] = {}
    chunks = []
    for number, (first, last, width, _) in enumerate(found):
        units = np.unique(kv_units[first:last]).tolist()
        after = {latest[unit] for unit in units if unit in latest}
        chunks.append(Chunk(first, last, width, tuple(sorted(after))))
        latest |= dict.fromkeys(units, number)
    return chunks
