"""How the residual stream, what layers hand on and add to, lies over the tensor ranks.

Between the products that tensor ranks share, either every rank has the whole of it, or (sequence parallelism, Korthikanti et al. 2022) a part
of the positions, so that norms, dropout and sums are shared as well, and so is what they keep for backward. An all-reduce is a reduce-scatter
and an all-gather; the second way gathers once more, in the backward of each column-parallel layer: five all-reduces' bytes a block in place of four.

The two directions, each of which is the other's backward, are started and give a function that waits for the result: `start_whole` (of what this
rank has, everything) and `start_sum` (of the sum over ranks of what each has computed of everything, what this rank has).

Legend: whole [samples, seq, hidden], own part [samples, rows, hidden], on the wire [ranks, samples, longest part, hidden].
"""

from collections.abc import Callable
from typing import Protocol

import torch

from hpczero.comm.group import Group
from hpczero.parallel.layout import share

Wait = Callable[[], torch.Tensor]


class Residual(Protocol):
    group: Group
    rows: slice  # the positions that this rank has

    def start_whole(self, own: torch.Tensor) -> Wait: ...

    def start_sum(self, partial: torch.Tensor) -> Wait:
        """`partial` may be overwritten."""
        ...


def residual_of(group: Group, sequence_parallel: bool, seq_len: int) -> Residual:
    return SequenceParts(group, seq_len) if sequence_parallel else Replicated(group)


class Replicated:
    """Every rank has all positions."""

    rows = slice(None)

    def __init__(self, group: Group) -> None:
        self.group = group

    def start_whole(self, own: torch.Tensor) -> Wait:
        return lambda: own

    def start_sum(self, partial: torch.Tensor) -> Wait:
        work = self.group.start_all_reduce(partial)

        def wait() -> torch.Tensor:
            work.wait()
            return partial

        return wait


class SequenceParts:
    """Every rank has a part of the positions; where the ranks do not divide them, the first ranks have one more, and what is sent is
    padded, with anything.
    """

    def __init__(self, group: Group, seq_len: int) -> None:
        self.group = group
        self.parts = [share(seq_len, 1, group.size, rank) for rank in range(group.size)]
        self.rows = self.parts[group.rank]
        self._lengths = [part.stop - part.start for part in self.parts]

    def start_whole(self, own: torch.Tensor) -> Wait:
        samples, rows, hidden = own.shape
        assert rows == self._lengths[self.group.rank], f"{rows} positions of a sequence; rank {self.group.rank} has {self.rows}"
        wire = own.new_empty(self.group.size, samples, self._lengths[0], hidden)
        sent = own.contiguous()
        if rows < self._lengths[0]:
            sent = wire[self.group.rank]
            sent[:, :rows] = own
        work = self.group.start_all_gather(wire, sent)

        def wait() -> torch.Tensor:
            work.wait()
            return torch.cat([part[:, :length] for part, length in zip(wire, self._lengths, strict=True)], dim=1)

        return wait

    def start_sum(self, partial: torch.Tensor) -> Wait:
        samples, length, hidden = partial.shape
        assert length == self.parts[-1].stop, f"a sequence of {length} positions; they were shared out for {self.parts[-1].stop}"
        wire = partial.new_empty(self.group.size, samples, self._lengths[0], hidden)
        for slot, part, rows in zip(wire, self.parts, self._lengths, strict=True):
            slot[:, :rows] = partial[:, part]
        own = partial.new_empty(samples, self._lengths[0], hidden)
        work = self.group.start_reduce_scatter(own, wire)

        def wait() -> torch.Tensor:
            work.wait()
            return own[:, : self._lengths[self.group.rank]].contiguous()

        return wait
