"""Keys and values of the tokens that a model has seen, for the tokens that follow.

The first forward brings whole prompts, filled up at their ends to one length: what lies behind a
sample's own length is overwritten before a query sees it. Each later one brings one token a sample.

Legend: query [samples, heads, seq, head_dim], key and value [samples, kv_heads, seq, head_dim].
"""

from collections.abc import Callable
from math import inf, sqrt

import torch
from torch import Tensor


class KeyValueCache:
    """Room for `capacity` tokens of each sample, of all layers that ask for it.

    `lengths`: the tokens of each sample that are there. The caller moves them on by `advance`.
    """

    def __init__(self, prompts: list[int], capacity: int, device: torch.device) -> None:
        """`prompts`: the length of each sample's prompt."""
        self.capacity = capacity
        self.lengths = [0] * len(prompts)
        self._prompts = prompts
        self._device = device
        self._stored: dict[str, tuple[Tensor, Tensor]] = {}

    def advance(self) -> None:
        """Take note that all layers have seen the tokens of a forward."""
        is_first = not any(self.lengths)
        self.lengths = self._prompts if is_first else [length + 1 for length in self.lengths]

    def keep(self, samples: list[int]) -> None:
        """Forget all samples but these."""
        self.lengths = [self.lengths[sample] for sample in samples]
        self._prompts = [self._prompts[sample] for sample in samples]
        for layer, (keys, values) in self._stored.items():
            self._stored[layer] = keys[samples], values[samples]

    @property
    def positions(self) -> Tensor:
        """The positions [samples, 1] of the tokens that come next."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self._device)[:, None]

    def attend(
        self,
        layer: str,
        attention: Callable[..., Tensor],
        heads: tuple[Tensor, Tensor, Tensor],
        window: int = 0,
        cap: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Keep a layer's keys and values; return what its queries see of them and those before."""
        query, key, value = heads
        if layer not in self._stored:
            stored = tuple(self._room(tensor) for tensor in (key, value))
            self._stored[layer] = stored[0], stored[1]
            return attention(query, key, value, None, window, cap, scale)
        keys, values = self._stored[layer]
        self._append(keys, key)
        self._append(values, value)
        first = max(0, min(self.lengths) + 1 - window) if window else 0
        seen = slice(first, max(self.lengths) + 1)
        hidden = self._hidden(seen, window)
        return _last(query, keys[:, :, seen], values[:, :, seen], hidden, cap, scale)

    def _room(self, first: Tensor) -> Tensor:
        # nothing is hidden from the product with the values but by a weight of zero
        room = first.new_zeros(*first.shape[:2], self.capacity, first.shape[3])
        room[:, :, : first.shape[2]] = first
        return room

    def _append(self, stored: Tensor, new: Tensor) -> None:
        if len(set(self.lengths)) == 1:
            stored[:, :, self.lengths[0]] = new[:, :, 0]
        else:
            samples = torch.arange(len(stored), dtype=torch.int64, device=self._device)
            stored[samples, :, self.positions[:, 0]] = new[:, :, 0]

    def _hidden(self, seen: slice, window: int) -> Tensor | None:
        """Return which of the keys [samples, 1, 1, keys] a sample does not see; None: all seen."""
        if len(set(self.lengths)) == 1:
            return None
        at = torch.arange(seen.start, seen.stop, dtype=torch.int64, device=self._device)
        own = self.positions
        hidden = at > own
        if window:
            hidden |= own - at >= window
        return hidden[:, None, None]


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
        logits = logits.masked_fill(hidden, -inf)
    mixed = logits.softmax(-1).to(values.dtype) @ values
    return mixed.flatten(1, 2).unsqueeze(2)
