"""AdamW (Loshchilov and Hutter 2019) on flat buffers: one read and one write of everything.

    g = gradient * gradient_scale                       (unscale and clip)
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr (m / correction1) / (sqrt(v / correction2) + eps)

master, first and second moment are fp32; the gradient may be half precision; `weights`, where given, is the half-precision copy that is written back.
"""

from dataclasses import dataclass

import torch

_CHUNK = 1 << 15  # elements whose five buffers stay in a core's cache over the dozen torch operations


@dataclass(frozen=True)
class Scalars:
    """What is the same for all elements in a step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float
    gradient_scale: float


@dataclass(frozen=True)
class State:
    """The flat buffers of a stretch of parameters; all of one length."""

    master: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor | None


def scalars_of_step(step: int, lr: float, betas: tuple[float, float], eps: float, gradient_scale: float) -> Scalars:
    """`step` counts the updates from 1."""
    return Scalars(lr, *betas, eps, 1.0 - betas[0] ** step, 1.0 - betas[1] ** step, gradient_scale)


def adamw_reference(state: State, decay: float, scalars: Scalars) -> None:
    for start in range(0, state.master.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        master, moment1, moment2 = state.master[part], state.moment1[part], state.moment2[part]
        gradient = state.gradient[part].float() * scalars.gradient_scale
        moment1.mul_(scalars.beta1).add_(gradient, alpha=1.0 - scalars.beta1)
        moment2.mul_(scalars.beta2).addcmul_(gradient, gradient, value=1.0 - scalars.beta2)
        denominator = (moment2 / scalars.correction2).sqrt_().add_(scalars.eps)
        master.mul_(1.0 - scalars.lr * decay).addcdiv_(moment1, denominator, value=-scalars.lr / scalars.correction1)
        if state.weights is not None:
            state.weights[part].copy_(master)
