"""LAMB, Lion and Muon as optimizers of plain PyTorch, by their papers, in fp64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Plain(torch.optim.Optimizer):
    """`decay`: of matrices; vectors have none."""

    def __init__(self, params: Any, lr: float, decay: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, **options})

    def rule(self, own: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter, dtype=torch.float64)
                    state |= {"step": 0, "m": zeros, "v": zeros.clone()}
                state["step"] += 1
                own, grad = parameter.double(), parameter.grad.double()
                parameter.copy_(self.rule(own, grad, state, group))


def _adam(grad: Tensor, state: dict[str, Any], betas: tuple[float, float], eps: float) -> Tensor:
    beta1, beta2 = betas
    state["m"] = beta1 * state["m"] + (1 - beta1) * grad
    state["v"] = beta2 * state["v"] + (1 - beta2) * grad**2
    mean = state["m"] / (1 - beta1 ** state["step"])
    root = (state["v"] / (1 - beta2 ** state["step"])).sqrt()
    return mean / (root + eps)


class Lamb(_Plain):
    def rule(self, own: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        way = _adam(grad, state, group["betas"], group["eps"])
        if own.dim() < 2:
            return own - group["lr"] * way
        way = way + group["decay"] * own
        ratio = 1.0
        if own.norm() > 0 and way.norm() > 0:
            ratio = float(own.norm() / way.norm())
        return own - group["lr"] * ratio * way


class Lion(_Plain):
    def rule(self, own: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        beta1, beta2 = group["betas"]
        way = (beta1 * state["m"] + (1 - beta1) * grad).sign()
        state["m"] = beta2 * state["m"] + (1 - beta2) * grad
        decay = group["decay"] if own.dim() > 1 else 0.0
        return own * (1 - group["lr"] * decay) - group["lr"] * way


class Muon(_Plain):
    def rule(self, own: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        lr, momentum = group["lr"], group["momentum"]
        if own.dim() < 2:
            return own - lr * _adam(grad, state, group["betas"], group["eps"])
        state["m"] = momentum * state["m"] + (1 - momentum) * grad
        way = newton_schulz(momentum * state["m"] + (1 - momentum) * grad)
        length = 0.2 * max(own.shape) ** 0.5
        return own * (1 - lr * group["decay"]) - lr * length * way


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five steps of the quintic iteration, on the matrix as it is."""
    x = matrix / matrix.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x


_BETAS = (0.9, 0.95)
# name -> the twin, its options, and those of the spec
OTHERS: dict[str, tuple[type[_Plain], dict[str, Any], dict[str, Any]]] = {
    "lamb": (Lamb, {"betas": _BETAS, "eps": 1e-6}, {"eps": 1e-6}),
    "lion": (Lion, {"betas": (0.9, 0.99)}, {"betas": (0.9, 0.99)}),
    "muon": (
        Muon,
        {"betas": _BETAS, "eps": 1e-6, "momentum": 0.9},
        {"eps": 1e-6, "momentum": 0.9},
    ),
}
