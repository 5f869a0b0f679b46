"""Dropout by address: the key, the sample and the index in the sample decide what is dropped.

The result is therefore the same on every layout, and backward computes the mask again instead of
keeping it.

x is [samples, rows, columns]: a window of the logical activation [samples, all rows, all columns]
that begins at (first_row, first_column). An element's index in its sample is
row * all_columns + column; it is dropped where its Philox word is below p * 2^32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import uint32, uint64
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpczero_kernels.cpu import kernel
from hpczero_kernels.dispatch import (
    CUDA,
    NUMBA,
    TORCH,
    choose,
    empty_contiguous,
    is_like,
    is_per_column,
    operator,
    upcast_half,
)
from hpczero_kernels.random import block_of_words, words_at


@dataclass(frozen=True)
class ActivationWindow:
    """Position of a piece in the logical activation."""

    all_columns: int
    first_row: int = 0
    first_column: int = 0


def keep_mask_reference(
    key: int,
    probability: float,
    samples: torch.Tensor,
    shape: Sequence[int],
    place: ActivationWindow,
) -> torch.Tensor:
    """Return the mask of the elements that stay: bool [samples, rows, columns]."""
    _, rows, columns = shape
    row = place.first_row + torch.arange(rows, dtype=torch.int64, device=samples.device)
    column = place.first_column + torch.arange(columns, dtype=torch.int64, device=samples.device)
    index = row[:, None] * place.all_columns + column
    return words_at(key, samples[:, None, None], index) >= threshold(probability)


def threshold(probability: float) -> int:
    """Return the smallest Philox word whose element stays."""
    return int(probability * 2**32)


@dataclass(frozen=True)
class DropoutParameters:
    """Parameters that decide what is dropped, and the implementation that makes the mask."""

    probability: float
    key: int
    samples: Tensor
    place: ActivationWindow
    implementation: str = TORCH

    @property
    def scale(self) -> float:
        return 1.0 / (1.0 - self.probability)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the parameters as the operators take them: a schema's int is signed."""
        signed = self.key - (self.key >> 63 << 64)
        return (
            self.probability,
            signed,
            self.samples,
            self.place.all_columns,
            self.place.first_row,
            self.place.first_column,
        )

    def mask(self, shape: Sequence[int]) -> Tensor:
        make_mask = keep_mask if self.implementation == NUMBA else keep_mask_reference
        return make_mask(self.key, self.probability, self.samples, shape, self.place)


def forward_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, *chosen: Any
) -> Tensor:
    """Return residual + dropout(x + bias), rounded once."""
    values = upcast_half(x) if bias is None else upcast_half(x) + upcast_half(bias)
    choice = dropout_parameters(*chosen)
    values = values * choice.mask(x.shape) * choice.scale
    return (values if residual is None else values + upcast_half(residual)).to(x.dtype)


def backward_reference(gradient: Tensor, has_bias: bool, *chosen: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the bias (empty without one); the residual's is `gradient`."""
    choice = dropout_parameters(*chosen)
    grad_x = upcast_half(gradient) * choice.mask(gradient.shape) * choice.scale
    grad_bias = grad_x.flatten(0, -2).sum(0) if has_bias else grad_x.new_empty(0)
    return grad_x.to(gradient.dtype), grad_bias.to(gradient.dtype)


def dropout_parameters(
    probability: float,
    signed_key: int,
    samples: Tensor,
    all_columns: int,
    first_row: int,
    first_column: int,
) -> DropoutParameters:
    """Return the parameters that an operator was given."""
    window = ActivationWindow(all_columns, first_row, first_column)
    return DropoutParameters(probability, signed_key % 2**64, samples, window)


def _fake_backward(gradient: Tensor, has_bias: bool, *chosen: Any) -> tuple[Tensor, Tensor]:
    return empty_contiguous(gradient), gradient.new_empty(gradient.shape[-1] if has_bias else 0)


_CHOSEN = (
    "float probability, int key, Tensor samples, int all_columns, int first_row, int first_column"
)
_forward = operator(
    f"dropout_forward(Tensor x, Tensor? bias, Tensor? residual, {_CHOSEN}) -> Tensor",
    forward_reference, "dropout:dropout_forward", lambda x, *_: empty_contiguous(x),
)  # fmt: skip
_backward = operator(
    f"dropout_backward(Tensor gradient, bool has_bias, {_CHOSEN}) -> (Tensor, Tensor)",
    backward_reference, "dropout:dropout_backward", _fake_backward,
)  # fmt: skip


@kernel("void(uint64, uint32, int64[::1], uint64, uint64, uint64, uint8[:,:,::1])")
def _fill_keep(key, limit, samples, all_columns, first_row, first_column, out):
    for number in range(out.shape[0]):
        stream = uint64(samples[number])
        for row in range(out.shape[1]):
            start = (first_row + uint64(row)) * all_columns + first_column
            column = 0
            while column < out.shape[2]:
                position = start + uint64(column)
                words = block_of_words(key, stream, position >> uint64(2))
                lane = position & uint64(3)
                while lane < uint64(4) and column < out.shape[2]:
                    out[number, row, column] = words[lane] >= limit
                    lane += uint64(1)
                    column += 1


def keep_mask(
    key: int,
    probability: float,
    samples: torch.Tensor,
    shape: Sequence[int],
    place: ActivationWindow,
) -> torch.Tensor:
    """Compute keep_mask_reference by the numba kernel."""
    out = np.empty(shape, np.uint8)
    _fill_keep(
        np.uint64(key),
        uint32(threshold(probability)),
        samples.numpy(),
        np.uint64(place.all_columns),
        np.uint64(place.first_row),
        np.uint64(place.first_column),
        out,
    )
    return torch.from_numpy(out).view(torch.bool)


class _Dropout(torch.autograd.Function):
    """Dropout by a mask, which backward makes again."""

    @staticmethod
    def forward(context: Any, x: Tensor, chosen: DropoutParameters) -> Tensor:
        context.chosen = chosen
        context.shape = x.shape
        return x * chosen.mask(x.shape) * chosen.scale

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * context.chosen.mask(context.shape) * context.chosen.scale, None


class FusedDropout(torch.autograd.Function):
    """Dropout with bias and residual, by one kernel in each direction."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        chosen: DropoutParameters,
    ) -> Tensor:
        context.chosen = chosen
        context.has = (bias is not None, residual is not None)
        return _forward(x, bias, residual, *chosen.arguments)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        has_bias, has_residual = context.has
        grad_x, grad_bias = _backward(gradient, has_bias, *context.chosen.arguments)
        return grad_x, grad_bias if has_bias else None, gradient if has_residual else None, None


def dropout(
    x: Tensor,
    probability: float,
    key: int,
    samples: Tensor,
    place: ActivationWindow | None = None,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return residual + dropout(x + bias): elements are dropped with this probability or scaled up.

    x [samples, rows, columns]; `samples` int64 [samples]. Dropped elements have no gradient; the
    residual has all of it. `implementation` replaces the one that would be chosen.
    """
    if not implementation:
        fits = is_like(x, residual) and is_per_column(x, bias)
        implementation = choose("dropout", x, fits)
    samples = samples.to(x.device, torch.int64).contiguous()
    place = place or ActivationWindow(all_columns=x.shape[-1])
    chosen = DropoutParameters(probability, key, samples, place, implementation)
    if implementation == CUDA:
        return FusedDropout.apply(x, bias, residual, chosen)
    dropped = _Dropout.apply(x if bias is None else x + bias, chosen)
    return dropped if residual is None else residual + dropped
