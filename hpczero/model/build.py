"""A model without memory (on torch's meta device), and the values that its parameters begin with."""

import importlib
from collections.abc import Callable

import torch
from torch import nn

from hpczero.errors import InputError
from hpczero.model import shapes
from hpczero.model.gpt import GPT
from hpczero.spec.schema import Model
from hpczero_kernels.cpu import INLINE, Pool
from hpczero_kernels.random import fill_normal, key_of


def on_meta(model: Model) -> GPT:
    """The model with the parameters of shapes.layers(model), holding no memory yet."""
    with torch.device("meta"):
        return {"gpt": GPT}[model.family](model)


def factory_of(model: Model) -> Callable[[Model], object]:
    """What model.family = "package.module:factory" names."""
    package, _, name = model.family.partition(":")
    try:
        factory = getattr(importlib.import_module(package), name, None)
    except ImportError as error:
        raise InputError(
            f'model.family = "{model.family}": {package} cannot be imported ({error}); is it installed, or in PYTHONPATH?'
        ) from error
    if not callable(factory):
        raise InputError(f'model.family = "{model.family}": {package} has no function {name}')
    return factory


def from_factory(model: Model, seed: int) -> nn.Module:
    """The module that model.family = "package.module:factory" makes; its random values follow from the seed."""
    factory = factory_of(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = factory(model)
    if not isinstance(module, nn.Module):
        raise InputError(
            f'model.family = "{model.family}" gives a {type(module).__name__}: it must return a torch.nn.Module'
        )
    return module


def install_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Gives the module these parameters in place of its own of the same names; a parameter that it uses twice is replaced in both places."""
    names = {own: name for name, own in module.named_parameters()}
    assert set(names.values()) >= set(parameters), set(parameters) - set(names.values())
    for part in module.modules():
        for name, own in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            new = parameters.get(names[own], own)
            if new is not own:
                setattr(
                    part, name, new
                )  # a recurrent layer has its own list of them, which follows


def move_rest(module: nn.Module, place: torch.device) -> None:
    """What the module has beside the parameters that it was given, buffers and parameters that are not trained, goes to the device of this name."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a buffer may be in several places
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if not parameter.is_meta and parameter.device != place:
                parameter.data = parameter.data.to(place)
        for name, buffer in part.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != place:
                part._buffers[name] = moved.setdefault(buffer, buffer.to(place))


def initial_values(
    parameter: shapes.Parameter, seed: int, first: int, out: torch.Tensor, pool: Pool = INLINE
) -> None:
    """Write elements first .. first + out.numel() - 1 of the parameter's flattened initial value into out (contiguous, any float type).

    An element depends on (seed, parameter name, element index) only, so each rank fills just what it holds.
    """
    if parameter.initial.kind == "normal":
        values = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        fill_normal(
            values, key_of(seed, "initial", parameter.name), first, parameter.initial.std, pool
        )
        if values is not out:
            out.copy_(values)
    else:
        out.fill_({"zeros": 0.0, "ones": 1.0}[parameter.initial.kind])
