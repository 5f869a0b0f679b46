"""Building a model without memory (on torch's meta device), and its parameters' initial values."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpczero.errors import InputError
from hpczero.model import shapes
from hpczero.model.families import FAMILIES
from hpczero.model.shapes import Family
from hpczero.spec.schema import Model
from hpczero_kernels.cpu import INLINE, Pool
from hpczero_kernels.random import fill_normal, key_of


def _class_of(family: Family) -> Callable[[Model], Any]:
    module, _, name = family.model.partition(":")
    made: Callable[[Model], Any] = getattr(importlib.import_module(module), name)
    return made


# Imported at once: what compiles kernels beforehand imports this module.
_CLASSES = {name: _class_of(family) for name, family in FAMILIES.items()}


def on_meta(model: Model) -> Any:
    """Return the model on the meta device; its parameters are those of families.layers(model)."""
    with torch.device("meta"):
        return _CLASSES[model.family](model)


def factory_of(model: Model) -> Callable[[Model], object]:
    """Import the function that model.family = "package.module:factory" names."""
    package, _, name = model.family.partition(":")
    try:
        factory = getattr(importlib.import_module(package), name, None)
    except ImportError as error:
        raise InputError(
            f'model.family = "{model.family}": {package} cannot be imported ({error}); '
            "is it installed, or in PYTHONPATH?"
        ) from error
    if not callable(factory):
        raise InputError(f'model.family = "{model.family}": {package} has no function {name}')
    return factory


def from_factory(model: Model, seed: int) -> nn.Module:
    """Call the factory of model.family; the module's random values follow from the seed."""
    factory = factory_of(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = factory(model)
    if not isinstance(module, nn.Module):
        raise InputError(
            f'model.family = "{model.family}" gives a {type(module).__name__}: '
            "it must return a torch.nn.Module"
        )
    return module


def install_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Replace the module's parameters of these names, each in all places where it is used."""
    names = {old: name for name, old in module.named_parameters()}
    assert set(names.values()) >= set(parameters), set(parameters) - set(names.values())
    for submodule in module.modules():
        for name, old in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
            new = parameters.get(names[old], old)
            if new is not old:
                # Assigning also updates the list of weights that a recurrent layer keeps.
                setattr(submodule, name, new)


def move_unmanaged(module: nn.Module, device: torch.device) -> None:
    """Move the module's buffers and the parameters that are not trained to a device."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # submodules may share a buffer
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            if not parameter.is_meta and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in submodule.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                submodule._buffers[name] = moved.setdefault(buffer, buffer.to(device))


def initial_values(
    parameter: shapes.Parameter, seed: int, first: int, out: torch.Tensor, pool: Pool = INLINE
) -> None:
    """Write elements first .. first + out.numel() - 1 of the flattened initial value into `out`.

    `out` is contiguous, of any float type. An element depends on (seed, parameter name, element
    index) only, so each rank fills just what it holds.
    """
    if parameter.initial.kind == "normal":
        values = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        key = key_of(seed, "initial", parameter.name)
        fill_normal(values, key, first, parameter.initial.std, pool)
        if values is not out:
            out.copy_(values)
    else:
        out.fill_({"zeros": 0.0, "ones": 1.0}[parameter.initial.kind])
