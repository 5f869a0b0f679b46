"""Rotary embedding (Su et al. 2021): pairs of a head's elements, half a head apart, turned by an angle that grows with the position.

    y = [a cos - b sin, b cos + a sin] for x = [a, b]        x [samples, positions, heads, head_dim]; cosines, sines fp32 [positions, head_dim / 2]
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpczero_kernels.dispatch import CUDA, choose
from hpczero_kernels.operators import empty, operator, wide


def angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for these positions (int64)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    turned = positions.double()[:, None] * frequencies
    return turned.cos().float(), turned.sin().float()


def turn_reference(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """`back`: by the opposite angle, which is forward's backward."""
    low, high = wide(x).chunk(2, -1)
    cosines, sines = cosines[:, None], (-sines if back else sines)[:, None]
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1).to(x.dtype)


_turn = operator(
    "rotary(Tensor x, Tensor cosines, Tensor sines, bool back) -> Tensor",
    turn_reference, "rotary:rotary", lambda x, cosines, sines, back: empty(x),
)  # fmt: skip


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        context.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines, False)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _turn(gradient, *context.saved_tensors, True), None, None


def rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    shape = (x.shape[1], x.shape[-1] // 2)
    fits = x.dim() == 4 and x.shape[-1] % 2 == 0 and all(_is_table(each, shape, x.device) for each in (cosines, sines))
    if choose("rotary", x, fits) == CUDA:
        return Rotary.apply(x, cosines, sines)
    return rotary_reference(x, cosines, sines)


def _is_table(table: Tensor, shape: tuple[int, int], device: torch.device) -> bool:
    return table.shape == shape and table.dtype == torch.float32 and table.device == device


def rotary_reference(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return turn_reference(x, cosines, sines, False)
