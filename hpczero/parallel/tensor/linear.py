"""Tensor parallelism (Shoeybi et al. 2019): tensor ranks share the products of each layer.

A plan (`parallelize.apply_plan`) replaces modules of a model by ones that work with this rank's
part of their parameters:

    column  y_part = x W_part^T     x is whole; the parts of y lie side by side: heads, columns of
                                    the feed-forward layer, logits
    row     y = sum of x_part W_part^T + bias        the input is such a part

A column, then modules that work on each column (or head) alone, then a row need one sum over the
ranks in forward (after the row) and one in backward (of the gradient of the column's input).
Values that ranks hold in common are bitwise equal on them, gradients of replicated parameters
included: nobody has to make them equal afterwards.

Parameters keep their names. The engine gives the modules their parts (`layout.tensor_part`), and
needs to know nothing else.

The residual stream, the activation that layers hand on and add to, is either whole on every rank or
(sequence parallelism, Korthikanti et al. 2022) cut along the positions. Then norms, dropout and
sums are shared as well, and so are the activations that they keep for backward. An all-reduce is a
reduce-scatter and an all-gather; sequence parallelism gathers once more, in the backward of each
column-parallel layer: five all-reduces a block in place of four.

Legend: whole [samples, seq, hidden], own part [samples, rows, hidden], messages
[ranks, samples, longest part, hidden].
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional

from hpczero.comm.group import Group
from hpczero.model import maps
from hpczero.parallel.layout import shard_range
from hpczero_kernels.dropout import ActivationWindow

Wait = Callable[[], torch.Tensor]  # waits for a collective and returns its result


class StreamLayout(Protocol):
    """The layout of the residual stream: two collectives, each of which is the other's backward."""

    group: Group

    @property
    def rows(self) -> slice:
        """The positions that this rank has."""

    def start_gather(self, own: torch.Tensor) -> Wait:
        """Start to gather the whole stream from the parts of all ranks."""

    def start_sum(self, partial: torch.Tensor) -> Wait:
        """Start to sum whole streams over the ranks; the result is this rank's part of the sum.

        `partial` may be overwritten.
        """


class Residual:
    """The layout of the residual stream of the micro-batch that runs: its length may change."""

    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.layout: StreamLayout = Replicated(group)
        self.streams: Sequence[Residual] = ()  # that lie side by side in it
        self._of_length: dict[int, StreamLayout] = {}

    def follow(self, seq_len: int) -> None:
        """Lay out what comes next as streams of sequences of this length."""
        if not self.sequence_parallel:
            return
        layout = self._of_length.get(seq_len)
        if layout is None:
            layout = self._of_length.setdefault(seq_len, SequenceParts(self.group, seq_len))
        self.layout = layout


class Replicated:
    """Every rank has all positions."""

    rows = slice(None)

    def __init__(self, group: Group) -> None:
        self.group = group

    def start_gather(self, own: torch.Tensor) -> Wait:
        return lambda: own

    def start_sum(self, partial: torch.Tensor) -> Wait:
        work = self.group.start_all_reduce(partial)

        def wait() -> torch.Tensor:
            work.wait()
            return partial

        return wait


class SequenceParts:
    """Every rank has a part of the positions.

    Where the ranks do not divide them, the first ranks have one more, and messages are padded with
    arbitrary values.
    """

    def __init__(self, group: Group, seq_len: int) -> None:
        self.group = group
        self.parts = [shard_range(seq_len, 1, group.size, rank) for rank in range(group.size)]
        self.rows = self.parts[group.rank]
        self._lengths = [part.stop - part.start for part in self.parts]

    def start_gather(self, own: torch.Tensor) -> Wait:
        samples, rows, hidden = own.shape
        assert rows == self._lengths[self.group.rank], (
            f"{rows} positions of a sequence; rank {self.group.rank} has {self.rows}"
        )
        gathered = own.new_empty(self.group.size, samples, self._lengths[0], hidden)
        sent = own.contiguous()
        if rows < self._lengths[0]:
            sent = gathered[self.group.rank]
            sent[:, :rows] = own
        work = self.group.start_all_gather(gathered, sent)

        def wait() -> torch.Tensor:
            work.wait()
            pairs = zip(gathered, self._lengths, strict=True)
            return torch.cat([part[:, :length] for part, length in pairs], dim=1)

        return wait

    def start_sum(self, partial: torch.Tensor) -> Wait:
        samples, length, hidden = partial.shape
        assert length == self.parts[-1].stop, (
            f"a sequence of {length} positions; the ranks share {self.parts[-1].stop}"
        )
        padded = partial.new_empty(self.group.size, samples, self._lengths[0], hidden)
        for slot, part, rows in zip(padded, self.parts, self._lengths, strict=True):
            slot[:, :rows] = partial[:, part]
        own = partial.new_empty(samples, self._lengths[0], hidden)
        work = self.group.start_reduce_scatter(own, padded)

        def wait() -> torch.Tensor:
            work.wait()
            return own[:, : self._lengths[self.group.rank]].contiguous()

        return wait


class _PartOfLinear(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, serial: Any, residual: Residual) -> None:
        super().__init__()
        self.weight = serial.weight
        self.bias = serial.bias
        self._residual = residual


class ColumnLinear(_PartOfLinear):
    """This rank's outputs of a linear map, or of several stacked ones.

    The input is the residual stream as this rank has it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        (y,) = columns(x, self._residual.layout, self.weight.flatten(0, -2), bias)
        return y.unflatten(-1, self.weight.shape[:-1])


class ColumnOfWhole(ColumnLinear):
    """The same of an input that is whole on every rank, whatever the residual stream is."""

    def __init__(self, serial: Any, residual: Residual) -> None:
        super().__init__(serial, Residual(residual.group, sequence_parallel=False))


class PickedFromRows(nn.Module):
    """The vectors at some positions of each sample, whole on every rank, of a stream in parts.

    Each rank has those in its rows, and zeros for the others. The gradient of their sum is the same
    on all ranks, and each takes what belongs to its rows.
    """

    def __init__(self, serial: nn.Module, residual: Residual) -> None:
        super().__init__()
        self._serial = serial
        self._residual = residual

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = self._residual.layout.rows
        here = (positions >= rows.start) & (positions < rows.stop)
        if not x.shape[1]:  # fewer positions than ranks
            own = x.new_zeros(*positions.shape, x.shape[-1]) + x.sum()
        else:
            own = self._serial(x, (positions - rows.start).where(here, 0))
            own = own.masked_fill(~here.unsqueeze(-1), 0.0)
        return sum_of_parts(own, None, Replicated(self._residual.group))


class RowLinear(_PartOfLinear):
    """A linear map with this rank's inputs only.

    The output is the residual stream as this rank has it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum_of_parts(maps.linear(x, self.weight), self.bias, self._residual.layout)


class OnOwnRows(nn.Module):
    """A module that works on each position alone (a norm), on this rank's positions.

    Its parameters' gradients are summed over the ranks.
    """

    def __init__(self, serial: nn.Module, residual: Residual) -> None:
        super().__init__()
        self._parameters = serial._parameters  # the same dict: both see a replaced parameter
        self._serial = (serial,)  # in a tuple: not a submodule, so parameters keep their names
        self._group = residual.group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = sum_gradients(self._group, *self._parameters.values())
        parameters = dict(zip(self._parameters, summed, strict=True))
        return functional_call(self._serial[0], parameters, (x,))


class DropoutOnOwnRows(nn.Module):
    """Dropout on this rank's positions; it drops the same elements as on one rank."""

    def __init__(self, serial: nn.Module, residual: Residual) -> None:
        super().__init__()
        self.serial = serial
        self._residual = residual

    def forward(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        first_row = self._residual.layout.rows.start
        window = ActivationWindow(all_columns=x.shape[-1], first_row=first_row)
        return self.serial(x, *arguments, place=window)


def columns(
    x: torch.Tensor, layout: StreamLayout, *maps: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return the products of the residual stream with `maps`: weight, bias, weight, bias, ...

    A bias may be None.
    """
    products: tuple[torch.Tensor, ...] = _Columns.apply(x, layout, *maps)
    return products


def sum_gradients(group: Group, *parameters: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the parameters, whose gradients will be summed over the ranks."""
    same: tuple[torch.Tensor, ...] = _SumGradients.apply(group, *parameters)
    return same


def sum_of_parts(
    partial: torch.Tensor, addend: torch.Tensor | None, layout: StreamLayout
) -> torch.Tensor:
    """Return the residual stream: the sum over ranks of `partial`, plus `addend` once.

    `addend` is [hidden], [seq, hidden] or [samples, seq, hidden], the same on all ranks; its
    gradient is whole on every rank. `partial` may be overwritten.
    """
    return _SumOfParts.apply(partial, addend, layout)


class _Columns(torch.autograd.Function):
    """Products of one gathered input, which keep only this rank's part of it for backward.

    Backward gathers the input again while it computes the input's gradient, and sums that gradient
    while it computes the weights'.
    """

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, layout: StreamLayout, *maps: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = maps[::2], maps[1::2]
        context.save_for_backward(x, *weights)
        context.layout = layout
        whole = layout.start_gather(x)()
        pairs = zip(weights, biases, strict=True)
        return tuple(functional.linear(whole, weight, bias) for weight, bias in pairs)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = context.saved_tensors
        for_x, _, *for_maps = context.needs_input_grad
        whole_x = context.layout.start_gather(x) if any(for_maps[::2]) else None
        all_rows = [gradient.flatten(0, -2) for gradient in gradients]
        x_gradient = None
        if for_x:
            partial = all_rows[0] @ weights[0]
            for rows, weight in zip(all_rows[1:], weights[1:], strict=True):
                partial.addmm_(rows, weight)
            shape = gradients[0].shape[:-1]
            x_gradient = context.layout.start_sum(partial.unflatten(0, shape))
        whole = whole_x().flatten(0, -2) if whole_x else None
        of_maps: list[torch.Tensor | None] = []
        needed = zip(all_rows, for_maps[::2], for_maps[1::2], strict=True)
        for rows, for_weight, for_bias in needed:
            of_maps.append(rows.t() @ whole if for_weight and whole is not None else None)
            of_maps.append(rows.sum(0) if for_bias else None)
        return x_gradient() if x_gradient else None, None, *of_maps


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, partial: torch.Tensor, addend: torch.Tensor | None, layout: StreamLayout
    ) -> torch.Tensor:
        own = layout.start_sum(partial)()
        if own is partial:
            context.mark_dirty(partial)
        context.layout = layout
        if addend is not None:
            context.addend_shape = addend.shape
            own += addend if addend.dim() == 1 else addend[..., layout.rows, :]
        return own

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = context.layout.start_gather(gradient)()
        for_addend = context.needs_input_grad[1]
        return whole, whole.sum_to_size(context.addend_shape) if for_addend else None, None


class _SumGradients(torch.autograd.Function):
    """The identity of parameters; one sum over the ranks takes all their gradients together."""

    @staticmethod
    def forward(context: Any, group: Group, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        together = torch.cat([gradient.flatten() for gradient in gradients])
        context.group.all_reduce(together)
        parts = together.split([gradient.numel() for gradient in gradients])
        pairs = zip(parts, gradients, strict=True)
        return None, *(part.view(gradient.shape) for part, gradient in pairs)
