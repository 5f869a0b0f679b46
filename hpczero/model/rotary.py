"""Angles of rotary positions (Su et al. 2021), stretched for longer sequences.

A pair of a head's elements turns by position x frequency. Stretching divides frequencies:

    linear   all by the factor
    llama3   those that turn less than rope_low times within rope_original positions by the factor,
             those that turn more than rope_high times not at all, others in between (Llama 3.1)
    yarn     likewise, along a ramp over the pairs; queries and keys grow by rope_attention
             (Peng et al. 2023)

Legend: frequencies [pairs], tables [seq, pairs] or [samples, seq, pairs].
"""

from math import ceil, floor, log, pi

import torch

from hpczero.model.shapes import head_dim
from hpczero.spec.schema import Model


def pairs(model: Model) -> int:
    """Return how many pairs of a head are rotated; of an odd head one element stays as it is."""
    return min(ceil(_width(model) / 2), head_dim(model) // 2)


def _width(model: Model) -> int:
    """Return the elements that the frequencies are spread over."""
    return int(head_dim(model) * model.rope_fraction)


def frequencies(model: Model, local: bool, device: torch.device) -> torch.Tensor:
    """Return the angle of each pair for one position, in fp32; `local`: in layers with a window."""
    width = _width(model)
    even = 2.0 * torch.arange(pairs(model), dtype=torch.float32, device=device)
    if local and model.rope_local_base:
        return 1.0 / model.rope_local_base ** (even / width)
    powers = model.rope_base ** (even / width)
    plain = 1.0 / powers
    factor = model.rope_factor
    if model.rope_scaling == "linear":
        return plain / factor
    if model.rope_scaling == "llama3":
        return _by_turns(model, plain)
    if model.rope_scaling == "yarn":
        stretched = 1.0 / (factor * powers)
        ramp = _ramp(model, device)
        return stretched * ramp + plain * (1 - ramp)
    return plain


def _by_turns(model: Model, plain: torch.Tensor) -> torch.Tensor:
    turns = model.rope_original / (2 * pi / plain)
    share = (turns - model.rope_low) / (model.rope_high - model.rope_low)
    between = (1 - share) * plain / model.rope_factor + share * plain
    inside = torch.where(turns < model.rope_low, plain / model.rope_factor, between)
    return torch.where(turns > model.rope_high, plain, inside)


def _ramp(model: Model, device: torch.device) -> torch.Tensor:
    """Return how much of each pair's frequency is stretched, from 0 to 1."""
    width = _width(model)

    def pair(turns: float) -> float:
        """Return the pair that turns so often within rope_original positions."""
        return width * log(model.rope_original / (turns * 2 * pi)) / (2 * log(model.rope_base))

    low = max(floor(pair(model.rope_fast)), 0)
    high = min(ceil(pair(model.rope_slow)), width - 1)
    at = torch.arange(pairs(model), dtype=torch.float32, device=device)
    return ((at - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def growth(model: Model) -> float:
    """Return the factor of rotated queries and keys."""
    if model.rope_scaling != "yarn":
        return 1.0
    return model.rope_attention or 0.1 * log(model.rope_factor) + 1.0


class Angles:
    """Cosines and sines of a model's positions, made once for each length and device."""

    def __init__(self, model: Model, local: bool) -> None:
        self._model = model
        self._local = local
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, seq_len: int, positions: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of these positions, all below seq_len, or of 0 .. seq_len - 1."""
        cosines, sines = self._known(seq_len, device)
        if positions is None:
            return cosines[:seq_len], sines[:seq_len]
        return cosines[positions], sines[positions]

    def _known(self, seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._tables.get(device)
        if tables is None or len(tables[0]) < seq_len:
            at = torch.arange(seq_len, dtype=torch.float32, device=device)
            angles = at[:, None] * frequencies(self._model, self._local, device)
            is_plain = self._local and self._model.rope_local_base
            factor = 1.0 if is_plain else growth(self._model)
            tables = (angles.cos() * factor, angles.sin() * factor)
            self._tables[device] = tables
        return tables
