"""Computations that are done again in backward: their inputs alone are kept.

In forward, autograd gets a number for each tensor that it asks to keep of a computation. When
backward asks for the first of them, the computation runs once more with the same inputs, and what
it asks to keep then is what the numbers stand for (Chen et al. 2016). There is one graph and one
backward: gradients come in the same order, and are the same to the bit, as long as all is computed
the same both times (dropout is a function of seed, step, sample and site).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpczero.errors import HpczeroError

Call = Callable[[Tensor, Any], Tensor]  # a layer's forward: its input, the micro-batch


class Keeper(Protocol):
    """The way in which tensors are kept for backward."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, kept: Any) -> Tensor: ...


class AsTheyAre:
    """Tensors are kept as they are."""

    def pack(self, tensor: Tensor) -> Tensor:
        return tensor

    def unpack(self, kept: Tensor) -> Tensor:
        return kept


def recomputed(layer: Call, keeper: Keeper) -> Call:
    """Return the layer as a function that is computed again in backward.

    `keeper` has its input.
    """

    def run(x: Tensor, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return layer(x, batch)
        return Again(layer, keeper, x, batch).first_run()

    return run


class Again:
    """A computation that runs in forward, and once more in backward."""

    def __init__(self, function: Callable[..., Tensor], keeper: Keeper, *arguments: Any) -> None:
        self._function = function
        self._keeper = keeper
        self._given: tuple[Any, ...] | None = arguments  # until the first run
        self._kept = [_Argument.of(one, keeper) for one in arguments]
        self._count = 0  # of tensors that autograd asked to keep
        self._made: dict[int, Tensor] = {}  # again, and not asked for yet
        self._result: Tensor | None = None  # made again, while somebody has still to ask
        self.asked = 0  # how often the result will be asked for

    def first_run(self) -> Tensor:
        arguments, self._given = self._given, None
        assert arguments is not None
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._function(*arguments)

    def result(self) -> Tensor:
        """Return the result, which is asked for `asked` times."""
        if self._result is None:
            self._run_again()
        result = self._result
        assert result is not None
        self.asked -= 1
        self._result = result if self.asked else None
        return result

    def _pack(self, _: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _unpack(self, number: int) -> Tensor:
        if number not in self._made:
            self._run_again()
        return self._made.pop(number)

    def _run_again(self) -> None:
        made: list[Tensor] = []

        def take(tensor: Tensor) -> None:
            made.append(tensor.detach())

        arguments = [one.value(self._keeper) for one in self._kept]
        with torch.enable_grad(), saved_tensors_hooks(take, _never):
            result = self._function(*arguments)
        if len(made) != self._count:
            raise HpczeroError(
                f"what is computed again in backward asked to keep {len(made)} tensors, and"
                f" {self._count} in forward: it must be the same both times"
            )
        self._made = dict(enumerate(made))
        self._result = result.detach() if self.asked else None


class _Argument:
    """An argument of a computation, as it is kept."""

    def __init__(self, kept: Any, is_tensor: bool, needs_gradient: bool) -> None:
        self._kept = kept
        self._is_tensor = is_tensor
        self._needs_gradient = needs_gradient

    @classmethod
    def of(cls, value: Any, keeper: Keeper) -> "_Argument":
        if not isinstance(value, Tensor):
            return cls(value, False, False)
        return cls(keeper.pack(value.detach()), True, value.requires_grad)

    def value(self, keeper: Keeper) -> Any:
        if not self._is_tensor:
            return self._kept
        return keeper.unpack(self._kept).detach().requires_grad_(self._needs_gradient)


def _never(_: None) -> Tensor:
    raise AssertionError("the graph of a computation in backward has no backward of its own")
