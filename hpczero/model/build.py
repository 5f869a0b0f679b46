"""A model without memory (on torch's meta device), and the values that its parameters begin with."""

import torch
from torch import nn

from hpczero.model import shapes
from hpczero.model.gpt import GPT
from hpczero.spec.schema import Model
from hpczero_kernels.normal import fill_normal
from hpczero_kernels.philox import key_of


def on_meta(model: Model) -> GPT:
    """The model with the parameters of shapes.layers(model), holding no memory yet."""
    with torch.device("meta"):
        return {"gpt": GPT}[model.family](model)


def adopt(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Gives the module these parameters in place of its own of the same names; a parameter that it uses twice is replaced in both places."""
    names = {own: name for name, own in module.named_parameters()}
    assert set(names.values()) == set(parameters), set(names.values()) ^ set(parameters)
    for part in module.modules():
        for name, own in part.named_parameters(recurse=False, remove_duplicate=False):
            part.register_parameter(name, parameters[names[own]])


def initial_values(parameter: shapes.Parameter, seed: int, first: int, out: torch.Tensor) -> None:
    """Writes elements first .. first + out.numel() - 1 of the parameter's flattened initial value into out (contiguous, any float type).

    An element depends on (seed, parameter name, element index) only, so each rank fills just what it holds.
    """
    if parameter.initial.kind == "normal":
        values = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        fill_normal(values, key_of(seed, "initial", parameter.name), first, parameter.initial.std)
        out.copy_(values)
    else:
        out.fill_({"zeros": 0.0, "ones": 1.0}[parameter.initial.kind])
