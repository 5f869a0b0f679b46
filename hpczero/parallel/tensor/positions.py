"""Sequence parallelism of a user's module: each tensor rank has some positions between layers.

The first layer of the role "sequence" takes this rank's positions of its input, the last one gives
all of them again. In between norms, dropout and sums work on own positions. A module that has
columns gets its input whole, a row gives this rank's positions of the sum.

Legend: whole [samples, positions, hidden], own [samples, rows, hidden].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from hpczero.comm.group import Group
from hpczero.errors import HpczeroError
from hpczero.parallel.tensor.linear import SequenceParts
from hpczero.parallel.tensor.random_streams import RandomStreams


class NotCopied:
    """Hooks and forwards of a cut module: a copy or pickle of the module comes here."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HpczeroError(
            "the module is copied or pickled, but its parameters are cut among the tensor ranks"
            " (tensor_plan): take engine.full_state_dict()"
        )


class Positions(NotCopied):
    """How the ranks share the positions of layers; `off`: a moment in which they do not."""

    def __init__(self, group: Group, random: RandomStreams) -> None:
        self.off = False
        self._group = group
        self._random = random
        self._of_length: dict[int, SequenceParts] = {}

    def hooks(self, layers: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Cut the positions between these layers, which run in this order."""
        if not layers:
            return []
        return [
            layers[0].register_forward_pre_hook(self._begin, with_kwargs=True),
            layers[-1].register_forward_hook(self._end),
        ]

    def of(self, length: int) -> SequenceParts:
        """Return how so many positions are shared."""
        ranks = self._group.size
        if length % ranks:
            raise HpczeroError(
                f"{length} positions are no multiple of the {ranks} tensor ranks that share them"
                f" (parallel.sequence_parallel): pad the sequences to {-(-length // ranks) * ranks}"
            )
        if length not in self._of_length:
            self._of_length[length] = SequenceParts(self._group, length)
        return self._of_length[length]

    def of_own(self, own: torch.Tensor) -> SequenceParts:
        """Return how those positions are shared of which this rank has its own."""
        return self.of(own.shape[1] * self._group.size)

    def _begin(self, _: nn.Module, given: Any, named: Any) -> tuple[Any, Any] | None:
        if self.off:
            return None
        self._random.forget()
        self._random.enter()

        def take(x: torch.Tensor) -> torch.Tensor:
            own: torch.Tensor = TakeRows.apply(x, self.of(x.shape[1]))
            return own

        return replace_first_tensor(given, named, take)

    def _end(self, _: nn.Module, __: Any, out: Any) -> Any:
        if self.off:
            return None
        given = out if isinstance(out, tuple) else (out,)
        given, _named = replace_first_tensor(given, {}, self.gather)
        self._random.leave()
        return given if isinstance(out, tuple) else given[0]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = GatherRows.apply(own, self.of_own(own))
        return whole

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, positions are not cut."""
        self.off = True
        try:
            yield
        finally:
            self.off = False


def replace_first_tensor(
    given: Sequence[Any],
    named: Mapping[str, Any],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments whose first tensor [samples, positions, hidden] is changed."""
    given, named = list(given), dict(named)
    places: list[tuple[Any, Any]] = [(given, index) for index in range(len(given))]
    places += [(named, name) for name in named]
    for where, key in places:
        value = where[key]
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point():
            where[key] = change(value)
            return tuple(given), named
    raise HpczeroError(
        "a layer of sequence parallelism needs an input [samples, positions, hidden], and got none"
    )


class TakeRows(torch.autograd.Function):
    """This rank's positions of a stream that all ranks have."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor, layout: SequenceParts) -> torch.Tensor:
        context.layout = layout
        return whole[:, layout.rows].contiguous()

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return context.layout.start_gather(gradient)(), None


class GatherRows(torch.autograd.Function):
    """The whole stream, whose gradient is the same on all ranks."""

    @staticmethod
    def forward(context: Any, own: torch.Tensor, layout: SequenceParts) -> torch.Tensor:
        context.layout = layout
        return layout.start_gather(own)()

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient[:, context.layout.rows].contiguous(), None


class EnterRows(torch.autograd.Function):
    """The whole stream, gathered before, for columns: each rank has a summand of its gradient."""

    @staticmethod
    def forward(
        context: Any, own: torch.Tensor, whole: torch.Tensor, layout: SequenceParts
    ) -> torch.Tensor:
        context.layout = layout
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return context.layout.start_sum(gradient)(), None, None
