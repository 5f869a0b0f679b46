"""Attention between its maps: the keys that a layer's queries see, and the operation for them."""

from functools import lru_cache
from math import inf, sqrt

import torch
from torch import Tensor, nn

from hpczero.model import shapes
from hpczero.model.attention_layouts import LayoutRule, layout_of, rule_of
from hpczero.model.batch import MicroBatch
from hpczero.model.key_value_cache import KeyValueCache
from hpczero.spec.schema import Model
from hpczero_kernels.block_layout import BlockLayout
from hpczero_kernels.operations import OPERATIONS


class AttentionCore(nn.Module):
    """Mix the values of the keys that each query sees: all before it, a window, or some blocks.

    `heads`: those of this rank, among all heads of queries.
    """

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        operations = OPERATIONS[model.kernels]
        self.name = f"blocks.{layer}.attention"
        self.heads = range(model.heads)
        self.all_heads, self.kv_heads = model.heads, shapes.kv_heads(model)
        self.window = shapes.window(model, layer)
        self.cap = model.attention_cap
        self.scale = model.query_scale or None
        self.rule = rule_of(model, layer)
        self.causal = shapes.is_causal(model, layer)
        self._dense = operations.attention
        self._in_blocks = operations.block_sparse_attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: MicroBatch) -> Tensor:
        """Return what [samples, heads, seq, head_dim] see of [samples, kv_heads, seq, head_dim]."""
        if batch.cache:
            kept = batch.cache.extend(self.name, key, value)
            if kept:
                return self._of_next(query, *kept, batch.cache)
        if self.rule:
            layout = self._layout(self.rule, query.shape[2])
            given = layout, batch.documents, self.cap, self.scale
            return self._in_blocks(query, key, value, *given)
        reach = batch.documents, self.window, self.cap, self.scale, self.causal
        return self._dense(query, key, value, *reach)

    def _of_next(self, query: Tensor, keys: Tensor, values: Tensor, cache: KeyValueCache) -> Tensor:
        """Return what the queries of the tokens that come next see of those before, and of them."""
        lengths = cache.lengths
        first = max(0, min(lengths) + 1 - self.window) if self.window else 0
        seen = slice(first, max(lengths) + 1)
        hidden = self._hidden(lengths, seen, cache.capacity)
        if hidden is not None:
            hidden = hidden.to(query.device)
        return _last(query, keys[:, :, seen], values[:, :, seen], hidden, self.cap, self.scale)

    def _hidden(self, lengths: list[int], seen: slice, capacity: int) -> Tensor | None:
        """Return which of the keys `seen` the queries at these positions do not see.

        [samples, heads or 1, keys]; None: each sees all of them. `capacity`: a number that all
        positions are below.
        """
        if not self.rule and len(set(lengths)) == 1:
            return None
        own = torch.tensor(lengths, dtype=torch.int64)[:, None]
        at = torch.arange(seen.start, seen.stop, dtype=torch.int64)
        hidden = at > own
        if self.rule:
            layout = self._layout(self.rule, capacity)
            return _in_no_block(layout, lengths, at) | hidden[:, None]
        if self.window:
            hidden |= own - at >= self.window
        return hidden[:, None]

    def _layout(self, rule: LayoutRule, positions: int) -> BlockLayout:
        return _layout(rule, positions, self.heads, self.all_heads)


@lru_cache(maxsize=512)  # of a few lengths, of all layers: layers with one rule share a layout
def _layout(rule: LayoutRule, positions: int, heads: range, all_heads: int) -> BlockLayout:
    of_heads = layout_of(rule, positions, heads, all_heads)
    return BlockLayout(of_heads.block, of_heads.causal, of_heads.patterns, of_heads.of_head)


def _in_no_block(layout: BlockLayout, positions: list[int], keys: Tensor) -> Tensor:
    """Return which keys a query at each position has in no block: [samples, heads, keys]."""
    blocks = len(layout.patterns[0])
    seen = torch.zeros((len(positions), len(layout.patterns), blocks), dtype=torch.bool)
    for sample, position in enumerate(positions):
        for number, pattern in enumerate(layout.patterns):
            seen[sample, number, list(pattern[position // layout.block])] = True
    return ~seen[:, list(layout.of_head)][:, :, keys // layout.block]


def _last(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None,
    cap: float, scale: float | None,
) -> Tensor:  # fmt: skip
    """Return attention of one query a sample and head, in fp32 between the products."""
    groups = query.shape[1] // keys.shape[1]
    grouped = query.unflatten(1, (-1, groups)).squeeze(3)  # [samples, kv_heads, groups, head_dim]
    logits = (grouped @ keys.transpose(2, 3)).float()
    logits *= 1.0 / sqrt(query.shape[-1]) if scale is None else scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    if hidden is not None:
        groups = groups if hidden.shape[1] > 1 else 1
        logits = logits.masked_fill(hidden.unflatten(1, (-1, groups)), -inf)
    mixed = logits.softmax(-1).to(values.dtype) @ values
    return mixed.flatten(1, 2).unsqueeze(2)
