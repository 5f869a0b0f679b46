"""Streams side by side, those of an encoder and a decoder, among tensor ranks.

With sequence parallelism the ranks share the positions of each stream by itself: a rank has some
rows of the first, then some of the second. A module works on one of them, or on both.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hpczero.comm.group import Group
from hpczero.parallel.tensor.linear import Residual, StreamLayout, Wait
from hpczero.spec.schema import Model


class ResidualOfStreams(Residual):
    """The layout of all `streams` together.

    `lengths_of`: positions of a sequence -> those of each stream.
    """

    def __init__(
        self, group: Group, sequence_parallel: bool, lengths_of: Callable[[int], Sequence[int]]
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.streams = [Residual(group, sequence_parallel) for _ in lengths_of(1)]
        self._lengths_of = lengths_of
        self._side_by_side: dict[int, SideBySide] = {}  # by the length of a sequence

    def follow(self, seq_len: int) -> None:
        """Lay out what comes next as streams of sequences of this length."""
        if not self.sequence_parallel:
            return
        lengths = self._lengths_of(seq_len)
        for stream, length in zip(self.streams, lengths, strict=True):
            stream.follow(length)
        if seq_len not in self._side_by_side:
            layouts = [stream.layout for stream in self.streams]
            self._side_by_side[seq_len] = SideBySide(layouts, lengths)
        self.layout = self._side_by_side[seq_len]

    @property
    def own(self) -> list[int]:
        """This rank's rows of each stream."""
        return [stream.layout.rows.stop - stream.layout.rows.start for stream in self.streams]


def residual_of(model: Model, group: Group, sequence_parallel: bool) -> Residual:
    """Return the layout of a model's residual stream, or of its streams."""
    if len(model.streams(model.seq_len)) == 1:
        return Residual(group, sequence_parallel)
    return ResidualOfStreams(group, sequence_parallel, model.streams)


class SideBySide:
    """Every rank has a part of each stream's positions.

    A collective is one for each stream, begun in their order, and all are in flight before the
    first wait.
    """

    def __init__(self, layouts: Sequence[StreamLayout], lengths: Sequence[int]) -> None:
        self.group = layouts[0].group
        self._layouts = layouts
        self._lengths = list(lengths)
        self._own = [layout.rows.stop - layout.rows.start for layout in layouts]

    @property
    def rows(self) -> slice:
        raise AssertionError(
            "rows of streams side by side do not lie together: the module needs its stream in "
            "`Family.stream_of`"
        )

    def start_gather(self, own: torch.Tensor) -> Wait:
        parts = zip(self._layouts, own.split(self._own, 1), strict=True)
        return _joined([layout.start_gather(part) for layout, part in parts])

    def start_sum(self, partial: torch.Tensor) -> Wait:
        parts = zip(self._layouts, partial.split(self._lengths, 1), strict=True)
        return _joined([layout.start_sum(part) for layout, part in parts])


def _joined(waits: Sequence[Wait]) -> Wait:
    return lambda: torch.cat([wait() for wait in waits], 1)


class SplitOfRows(nn.Module):
    """This rank's rows of each stream."""

    def __init__(self, serial: nn.Module, residual: Residual) -> None:
        super().__init__()
        assert isinstance(residual, ResidualOfStreams), "streams of a model of one"
        self._residual = residual

    def forward(self, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        return x.split(self._residual.own, 1)
