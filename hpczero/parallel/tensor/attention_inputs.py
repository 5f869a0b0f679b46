"""Queries, keys and values among tensor ranks, each with some heads.

Where there are at least as many heads of keys as ranks, a rank has some of them with the queries
that see them. Else it holds the maps of all keys and values, uses those that its queries see, and
the gradients of these maps are summed over the ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpczero.comm.group import Group
from hpczero.model.attention import AttentionCore
from hpczero.model.modules import Linear
from hpczero.parallel.layout import shard_range
from hpczero.parallel.tensor.linear import Residual, columns, sum_gradients


class HeadsOfRank(nn.Module):
    """The attention inputs of this rank's heads, from the residual stream as this rank has it."""

    query: Linear
    key: Linear
    value: Linear

    def __init__(self, serial: Any, residual: Residual) -> None:
        super().__init__()
        self.query, self.key, self.value = serial.query, serial.key, serial.value
        self._residual = residual
        self._head_dim = serial.head_dim
        self._seen: list[int] | None = None  # of each of the rank's queries: its head of keys
        group = residual.group
        if group.size > serial.kv_heads:
            each = serial.heads // serial.kv_heads
            own = heads_of_rank(serial.heads, serial.kv_heads, group)
            self._seen = [head // each for head in own]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layout = self._residual.layout
        own = self.query.weight, self.query.bias
        of_keys = self.key.weight, self.key.bias, self.value.weight, self.value.bias
        if self._seen is None:
            return columns(x, layout, *own, *of_keys)
        query, key, value = columns(x, layout, *own, *self._maps_of_seen(self._seen, of_keys))
        return query, *(self._for_each_query(part, self._seen) for part in (key, value))

    def _maps_of_seen(
        self, seen: list[int], whole: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the part of each whole map that makes the heads from seen[0] to seen[-1]."""
        present = [tensor for tensor in whole if tensor is not None]
        summed = iter(sum_gradients(self._residual.group, *present))
        part = slice(seen[0] * self._head_dim, (seen[-1] + 1) * self._head_dim)
        return [None if tensor is None else next(summed)[part] for tensor in whole]

    def _for_each_query(self, part: torch.Tensor, seen: list[int]) -> torch.Tensor:
        """Repeat heads of keys where not all of them have as many of this rank's queries."""
        heads = [head - seen[0] for head in seen]
        group = len(heads) // (heads[-1] + 1)
        if heads == [number // group for number in range(len(heads))]:
            return part
        of_heads = part.unflatten(-1, (-1, self._head_dim))
        return of_heads[:, :, heads].flatten(2)


def core_of_rank(serial: Any, residual: Residual) -> AttentionCore:
    """Tell attention which heads of queries this rank has: layouts of blocks may differ by head."""
    core: AttentionCore = serial
    core.heads = heads_of_rank(core.all_heads, core.kv_heads, residual.group)
    return core


def heads_of_rank(heads: int, kv_heads: int, group: Group) -> range:
    """Return the heads of queries of this rank, those that share keys together if they can be."""
    together = heads // kv_heads if group.size <= kv_heads else 1
    own = shard_range(heads, together, group.size, group.rank)
    return range(own.start, own.stop)
