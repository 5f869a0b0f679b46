"""Results of cheap operations that are not kept, but made again when backward asks for them.

Norms and activation functions are wide and cheap: what they return is as large as what a product
returns, and takes a hundredth of its time. A *recipe* (the operation and its inputs) stands for
such a result among the tensors that autograd keeps, wherever it is asked to keep it, and for what
the operation's own backward wants. Its inputs are kept: results of products, and the residual
stream. Products and attention run once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hpczero.parallel.activations.recompute import Again, AsTheyAre, Call, Keeper

Operation = Callable[..., Tensor]


@dataclass(frozen=True)
class _View:
    """A view of a recipe's result, as autograd keeps it."""

    recipe: Again
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Recipes:
    """The recipes of the layer that runs."""

    def __init__(self) -> None:
        self._keeper: Keeper = AsTheyAre()
        self._known: dict[int, tuple[StorageWeakRef, Again]] | None = None  # by address

    def cheap(self, operation: Operation) -> Operation:
        """Return the operation so that its results are made again in backward."""

        def run(*arguments: Any) -> Tensor:
            if self._known is None or not torch.is_grad_enabled():
                return operation(*arguments)
            recipe = Again(operation, self._keeper, *arguments)
            result = recipe.first_run()
            storage = result.untyped_storage()
            self._known[storage.data_ptr()] = StorageWeakRef(storage), recipe
            return result

        return run

    def used_in(self, layer: Call, keeper: Keeper) -> Call:
        """Return the layer as a function that keeps recipes of cheap results.

        `keeper` has the rest.
        """

        def run(x: Tensor, batch: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return layer(x, batch)
            with self._open(keeper), saved_tensors_hooks(self._pack, self._unpack):
                return layer(x, batch)

        return run

    @contextmanager
    def _open(self, keeper: Keeper) -> Iterator[None]:
        self._keeper = keeper
        self._known = {}
        try:
            yield
        finally:
            self._known = None

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        assert self._known is not None
        reference, recipe = self._known.get(storage.data_ptr(), (None, None))
        if reference is None or recipe is None or reference.expired():
            return self._keeper, self._keeper.pack(tensor)
        recipe.asked += 1
        place = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return None, _View(recipe, *place)

    def _unpack(self, kept: Any) -> Tensor:
        keeper, value = kept
        if keeper is not None:
            tensor: Tensor = keeper.unpack(value)
            return tensor
        return value.recipe.result().as_strided(value.shape, value.stride, value.offset)
