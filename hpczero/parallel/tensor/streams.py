"""Streams side by side, those of an encoder and a decoder, among tensor ranks.

With sequence parallelism the ranks share the positions of each stream by itself: a rank has some
rows of the first, then some of the second. A module works on one of them, or on both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hpczero.comm.group import Group
from hpczero.parallel.tensor.linear import Residual, StreamLayout, Wait


class ResidualOfStreams(Residual):
    """The layout of all `streams` together; a single one is the whole.

    `lengths_of`: positions of a sequence -> those of each stream.
    """

    def __init__(
        self,
        group: Group,
        sequence_parallel: bool,
        lengths_of: Callable[[int], Sequence[int]],
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.streams = [Residual(group, sequence_parallel) for _ in lengths_of(1)]
        self._lengths_of = lengths_of

    def follow(self, seq_len: int) -> None:
        """Lay out what comes next as streams of sequences of this length."""
        for stream, length in zip(self.streams, self._lengths_of(seq_len), strict=True):
            stream.follow(length)
        layouts = [stream.layout for stream in self.streams]
        if self.sequence_parallel:
            one = len(layouts) == 1
            self.layout = layouts[0] if one else SideBySide(layouts, self._lengths_of(seq_len))


class SideBySide:
    """Every rank has a part of each stream's positions."""

    rows = slice(0, 0)  # they do not lie together

    def __init__(self, layouts: Sequence[StreamLayout], lengths: Sequence[int]) -> None:
        self.group = layouts[0].group
        self._lengths = list(lengths)
        self.own = [layout.rows.stop - layout.rows.start for layout in layouts]
        self._layouts = layouts

    def start_gather(self, own: torch.Tensor) -> Wait:
        parts = zip(self._layouts, own.split(self.own, 1), strict=True)
        return _joined([layout.start_gather(part) for layout, part in parts])

    def start_sum(self, partial: torch.Tensor) -> Wait:
        parts = zip(self._layouts, partial.split(self._lengths, 1), strict=True)
        return _joined([layout.start_sum(part) for layout, part in parts])


def _joined(waits: Sequence[Wait]) -> Wait:
    return lambda: torch.cat([wait() for wait in waits], 1)


class StreamsOfRows(nn.Module):
    """This rank's rows of each stream."""

    def __init__(self, serial: nn.Module, residual: Any) -> None:
        super().__init__()
        self._residual = residual

    def forward(self, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        return x.split(self._residual.layout.own, 1)
