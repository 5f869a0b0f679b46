"""Optimizers for tests of the update: PyTorch's with options, and some that nobody else has."""

from collections.abc import Callable
from typing import Any

import torch

# name -> class or its name, options, learning rate
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "SGD": ("SGD", {}, 0.1),
    "SGD, momentum and dampening": ("SGD", {"momentum": 0.9, "dampening": 0.4}, 0.05),
    "SGD, nesterov and decay": (
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        0.05,
    ),
    "Adam": ("Adam", {"eps": 1e-6}, 1e-2),
    "Adam, decay of L2": (torch.optim.Adam, {"eps": 1e-6, "weight_decay": 0.1}, 1e-2),
    "AdamW, amsgrad": ("AdamW", {"eps": 1e-6, "amsgrad": True}, 1e-2),
    "NAdam": ("NAdam", {"eps": 1e-6}, 1e-2),
    "RAdam": ("RAdam", {"eps": 1e-6}, 1e-2),
    "Adagrad": ("Adagrad", {"eps": 1e-6, "initial_accumulator_value": 0.1}, 0.05),
    "RMSprop, centered, momentum": (
        "RMSprop",
        {"centered": True, "momentum": 0.5, "eps": 1e-4},
        1e-3,
    ),
    "Rprop": ("Rprop", {}, 1e-3),
    "Adadelta": ("Adadelta", {"eps": 1e-4}, 1.0),
    "Adamax": ("Adamax", {"eps": 1e-6}, 1e-2),
    "ASGD": ("ASGD", {"t0": 5, "lambd": 1e-2}, 0.1),
}


class Wandering(torch.optim.Optimizer):
    """A class of a user's own: a velocity that is replaced at each step, a count in the group, and
    a Python number for each parameter.
    """

    def __init__(self, params: Any, lr: float, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                velocity = state.get("velocity", torch.zeros_like(parameter, dtype=torch.float32))
                state["velocity"] = group["decay"] * velocity + parameter.grad
                state["own_steps"] = state.get("own_steps", 0) + 1
                rate = group["lr"] / (1 + 0.1 * state["own_steps"] + 0.01 * group["calls"])
                parameter.sub_(rate * state["velocity"])


class Anchored(torch.optim.Optimizer):
    """Pulls the weights to those that it was made with."""

    def __init__(self, params: Any, lr: float, pull: float) -> None:
        super().__init__(params, {"lr": lr, "pull": pull})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["anchor"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    away = parameter - self.state[parameter]["anchor"]
                    parameter.sub_(group["lr"] * (parameter.grad + group["pull"] * away))


OPTIMIZERS["one that knows where it began"] = (Anchored, {"pull": 0.5}, 0.1)
OPTIMIZERS["a user's own"] = (Wandering, {"decay": 0.8}, 0.05)


class Lamb(torch.optim.Optimizer):
    """The essence of LAMB (You et al. 2020): a step as long as the parameter's norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / parameter.grad.norm()
                    parameter.sub_(group["lr"] * trust * parameter.grad)
