"""LAMB, Lion and Muon as optimizers of plain PyTorch, by their papers, in fp64; modules with the
parameters that they treat in different ways.

Each group has one parameter, and its name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.updates import WIDTH, Chain


class _Plain(torch.optim.Optimizer):
    """`decay`: of what has two dimensions or more; vectors have none."""

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
        way = _adam(grad, state, group["betas"], group["eps"]) + _decay(own, group) * own
        ratio = 1.0
        adapts = own.dim() > 1 and not group["name"].endswith(".bias")
        if adapts and own.norm() > 0 and way.norm() > 0:
            ratio = float(own.norm() / way.norm())
        return own - group["lr"] * ratio * way


class Lion(_Plain):
    def rule(self, own: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        beta1, beta2 = group["betas"]
        way = (beta1 * state["m"] + (1 - beta1) * grad).sign()
        state["m"] = beta2 * state["m"] + (1 - beta2) * grad
        return own * (1 - group["lr"] * _decay(own, group)) - group["lr"] * way


class Muon(_Plain):
    """`stacks`: names of parameters that are several matrices; `by_adamw`: of what is none."""

    def rule(self, own: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        lr, momentum = group["lr"], group["momentum"]
        kept = own * (1 - lr * _decay(own, group))
        name, is_stack = group["name"], group["name"] in group.get("stacks", ())
        is_other = name.endswith(".bias") or name in group.get("by_adamw", ())
        if is_other or own.dim() != 2 + is_stack:
            return kept - lr * _adam(grad, state, group["betas"], group["eps"])
        state["m"] = momentum * state["m"] + (1 - momentum) * grad
        way = momentum * state["m"] + (1 - momentum) * grad
        matrices = map(newton_schulz, way) if is_stack else [newton_schulz(way)]
        length = 0.2 * max(own.shape[-2:]) ** 0.5
        return kept - lr * length * torch.stack(list(matrices)).view_as(own)


def _decay(own: Tensor, group: Any) -> float:
    return group["decay"] if own.dim() > 1 else 0.0


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five steps of the quintic iteration, on the matrix as it is."""
    x = matrix / (matrix.norm() + 1e-7)
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


class Maps(nn.Module):
    """Three maps in one weight, as convolutions and fused maps have it, and their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(3, WIDTH, WIDTH, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(3, WIDTH, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("mij,bj->bmi", self.weight, x) + self.bias).sum(1)


class Odd(Chain):
    """Behind fused maps, and a matrix that is 0 to begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = Maps()
        self.late = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.late.weight)

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        x = self.maps(x)
        return super().forward(x + self.late(x), used)


class Idle(Odd):
    """Beside a matrix whose gradient is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        return super().forward(x + 0.0 * self.idle(x), used)
