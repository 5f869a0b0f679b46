"""Things that a program may do to an engine's module between steps."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    parametrizations,
    vector_to_parameters,
)

from tests.support.ways import REFUSED, RIGHT, WIDTH, Block, Net


def _each(act: Callable[[nn.Parameter], object]) -> Callable[[Any], None]:
    def on(engine: Any) -> None:
        with torch.no_grad():
            for own in engine.module.parameters():
                act(own)

    return on


def _set(own: nn.Parameter) -> None:
    own.data = own.data * 0.5


def _other_state() -> dict[str, Tensor]:
    return {name: tensor / 2 for name, tensor in Net().state_dict().items()}


def _replace(engine: Any) -> None:
    engine.module.first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def _replace_module(engine: Any) -> None:
    engine.module.blocks[3] = Block()


def _add(engine: Any) -> None:
    engine.module.extra = nn.Parameter(torch.zeros(3))


def _foreach(engine: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(engine.module.parameters()), 0.5)


def _vector(engine: Any) -> None:
    count = sum(own.numel() for own in engine.module.parameters())
    vector_to_parameters(torch.zeros(count), engine.module.parameters())


def _without_modify(engine: Any) -> None:
    with engine.gathered(engine.module.parameters()), torch.no_grad():
        engine.module.first.weight.mul_(0.5)


def _swap(engine: Any) -> None:
    torch.utils.swap_tensors(engine.module.first.weight, nn.Parameter(torch.zeros(WIDTH, WIDTH)))


def _sgd(engine: Any) -> None:
    torch.optim.SGD(engine.module.parameters(), lr=0.1).step()


WRITES: dict[str, Callable[[Any], object]] = {
    "p.mul_": _each(lambda own: own.mul_(0.5)),
    "p.data.mul_": _each(lambda own: own.data.mul_(0.5)),
    "p.data =": _each(_set),
    "p.detach().mul_": _each(lambda own: own.detach().mul_(0.5)),
    "p[0] =": _each(lambda own: own.__setitem__(0, 0.0)),
    "a view of it": _each(lambda own: own.view(-1)[:2].zero_()),
    "nn.init": _each(lambda own: nn.init.ones_(own)),
    "reset_parameters": lambda engine: engine.module.first.reset_parameters(),
    "foreach": _foreach,
    "vector_to_parameters": _vector,
    "load_state_dict of the module": lambda engine: engine.module.load_state_dict(_other_state()),
    "load_state_dict, assign": lambda engine: engine.module.load_state_dict(
        _other_state(), assign=True
    ),
    "load_state_dict of a part": lambda engine: engine.module.first.load_state_dict(
        Net().first.state_dict()
    ),
    "module.double()": lambda engine: engine.module.double(),
    "module.bfloat16()": lambda engine: engine.module.bfloat16(),
    "module.to_empty": lambda engine: engine.module.to_empty(device="cpu"),
    "p.set_": _each(lambda own: own.set_(torch.zeros_like(own))),
    "swap_tensors": _swap,
    "share_memory": lambda engine: engine.module.share_memory(),
    "another parameter in its place": _replace,
    "another module in its place": _replace_module,
    "one more parameter": _add,
    "weight_norm": lambda engine: parametrizations.weight_norm(engine.module.first),
    "gathered without modify": _without_modify,
    "p.grad =": _each(lambda own: setattr(own, "grad", torch.ones(own.shape))),
}
BY_PYTORCH = {"weight_norm"}  # which refuses it in its own words
OF_GRADIENTS: dict[str, Callable[[Any], object]] = {  # between backward and step
    "clip_grad_norm_": lambda engine: clip_grad_norm_(engine.module.parameters(), 0.1),
    "clip_grad_value_": lambda engine: clip_grad_value_(engine.module.parameters(), 0.1),
    "another optimizer": _sgd,
    "p.grad": lambda engine: engine.module.first.weight.grad,
    "p.grad = None": lambda engine: setattr(engine.module.first.weight, "grad", None),
    "module.zero_grad()": lambda engine: engine.module.zero_grad(),
    "p.mul_ before the step": _each(lambda own: own.mul_(0.5)),
}


def _read(engine: Any) -> Iterator[object]:
    for own in engine.module.parameters():
        yield own.shape, own.dtype, own.device, own.numel(), own.requires_grad, own.is_leaf
        yield own.dim(), len(own), own.grad, hash(own), repr(own), own.is_floating_point()


READS: dict[str, tuple[Callable[[Any], object], str]] = {
    "shapes and types": (lambda engine: list(_read(engine)), RIGHT),
    "repr of the module": (lambda engine: repr(engine.module), RIGHT),
    "requires_grad_": (lambda engine: engine.module.requires_grad_(True), RIGHT),
    "zero_grad before backward": (lambda engine: engine.module.zero_grad(), RIGHT),
    "eval and train": (lambda engine: engine.module.eval().train(), RIGHT),
    "state_dict": (lambda engine: engine.module.state_dict(), REFUSED),
    "torch.save": (lambda engine: torch.save(engine.module.first.weight, io.BytesIO()), REFUSED),
    "the norm": (lambda engine: engine.module.first.weight.norm().item(), REFUSED),
    "tolist": (lambda engine: engine.module.first.weight.tolist(), REFUSED),
    "data_ptr": (lambda engine: engine.module.first.weight.data_ptr(), REFUSED),
    "numpy": (lambda engine: engine.module.first.weight.detach().numpy().sum(), REFUSED),
    "a deep copy": (lambda engine: copy.deepcopy(engine.module.first), REFUSED),
    "averages": (lambda engine: torch.optim.swa_utils.AveragedModel(engine.module), REFUSED),
    "the same type again": (lambda engine: engine.module.float(), REFUSED),
}
