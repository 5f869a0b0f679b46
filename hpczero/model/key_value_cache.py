"""Keys and values of the tokens that a model has seen, for the tokens that follow.

The first forward brings whole prompts, filled up at their ends to one length: what lies behind a
sample's own length is overwritten before a query sees it. Each later one brings one token a sample.

Legend: key and value [samples, kv_heads, seq, head_dim].
"""

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

    def extend(self, layer: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keep a layer's keys and values; return all that are kept, or None for the prompts."""
        if layer not in self._stored:
            self._stored[layer] = self._room(key), self._room(value)
            return None
        keys, values = self._stored[layer]
        self._append(keys, key)
        self._append(values, value)
        return keys, values

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
