"""Models with the initial values of their records."""

from typing import Any

import torch

from hpczero.model import build, families
from hpczero.spec.model import Model


def real(model: Model) -> Any:
    """Return the module, in fp64."""
    module = build.on_meta(model)
    parameters = {}
    for layer in families.layers(model):
        for parameter in layer.parameters:
            values = torch.empty(parameter.shape, dtype=torch.float64)
            build.initial_values(parameter, 1, 0, values)
            parameters[parameter.name] = torch.nn.Parameter(values)
    build.install_parameters(module, parameters)
    return module
