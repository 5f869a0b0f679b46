"""Gradients that none of an engine's own backwards has made.

They are dropped, so that none stays for the next step. Another engine's backward, which passes
through this one's module (a GAN), is no mistake and is said once; anything else is an error.
"""

import warnings
from collections.abc import Callable

import torch

from hpczero.errors import HpczeroError
from hpczero.parallel.zero.parameters import leave_gradient
from hpczero.parallel.zero.weight_gradients import in_an_engine

_OWN = "a step takes the gradients of engine.backward(loss), which names the engine that is to have them"


class StrayGradients:
    def __init__(self, name_of: Callable[[torch.Tensor], str], says: bool) -> None:
        """`says`: this rank is the one that warns."""
        self._name_of, self._says = name_of, says

    def drop(self, parameter: torch.Tensor) -> None:
        leave_gradient(parameter, None)
        name = self._name_of(parameter)
        if not in_an_engine():
            raise HpczeroError(f"a gradient of {name} came outside of engine.backward: {_OWN}")
        if self._says:
            what = f"gradients of {name} and others came in another engine's backward and are dropped"
            saves = "requires_grad_(False) on this module meanwhile saves their computation"
            warnings.warn(f"{what}: {_OWN}; {saves} (docs/any-model.md)", stacklevel=2)
        self._says = False
