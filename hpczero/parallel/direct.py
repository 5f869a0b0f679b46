"""Gradients that are written where they are summed.

Autograd makes the gradient of a weight in memory of its own, from where it would be copied into the unit's buffer; that of an embedding is a whole
tensor of zeros but for a few rows, to which that of a tied head is added. Inside `DirectGradients` linear maps and embeddings of the engine's
parameters, whatever module calls them, go another way: the product that is a weight's gradient is written into the buffer at once, and an
embedding's gradient is its rows alone (summed in fp32, rounded once). To autograd the former is an empty sparse tensor, which it adds up with
what else the parameter is used for, and which tells the engine at the right time that the gradient is there.

Where there is no place for a gradient yet, it is made as ever, by the same arithmetic: the results do not depend on it.
"""

from collections.abc import Callable, Container
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Sums(Protocol):
    """Where gradients are added up; False: there is no place, autograd is to do it."""

    def write(self, parameter: Tensor, into: Callable[[Tensor], None]) -> bool: ...

    def add(self, parameter: Tensor, gradient: Tensor) -> bool: ...


class DirectGradients(TorchFunctionMode):
    def __init__(self, parameters: Container[Tensor], sums: Sums) -> None:
        super().__init__()
        self._parameters, self._sums = parameters, sums

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        other = _REPLACED.get(function)
        if other is None or not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        return other(self, *args, **(kwargs or {}))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        own_weight, own_bias = self._parameter(weight), None if bias is None else self._parameter(bias)
        if own_weight is None or (own_bias is None) != (bias is None) or input.dim() < 2 or input.dtype != weight.dtype or weight.dim() != 2:
            return functional.linear(input, weight, bias)
        return _Linear.apply(input, own_weight, own_bias, self._sums)

    def embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if self._parameter(weight) is not weight or padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
            return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return _Embedding.apply(input, weight, self._sums)

    def backward(self, output: Tensor, gradient: Tensor) -> None:
        """As output.backward(gradient), which would leave every mode while it runs: what is recomputed in backward goes the way that forward went."""
        torch.autograd.Variable._execution_engine.run_backward(
            (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def _parameter(self, tensor: Tensor) -> Tensor | None:
        """The parameter that the tensor is, or is all of in another shape."""
        base = tensor if tensor._base is None else tensor._base
        whole = base in self._parameters and base.requires_grad and tensor.is_contiguous() and tensor.numel() == base.numel()
        return base if whole else None


_REPLACED: dict[Any, Callable[..., Tensor]] = {functional.linear: DirectGradients.linear, functional.embedding: DirectGradients.embedding}


class _Linear(torch.autograd.Function):
    """x [..., inputs] -> [..., outputs]; the weight is [outputs, inputs] and the bias [outputs], in whatever shape they have as parameters."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: Sums) -> Tensor:
        context.save_for_backward(x, weight)
        context.parameters, context.sums = (weight, bias), sums
        return functional.linear(x, weight.view(-1, x.shape[-1]), None if bias is None else bias.view(-1))

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        needs_x, needs_weight, needs_bias, _ = context.needs_input_grad
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        own_weight, own_bias = context.parameters

        def of_weight(out: Tensor) -> None:
            torch.mm(rows.t(), inputs, out=out.view(rows.shape[1], inputs.shape[1]))

        def of_bias(out: Tensor) -> None:
            torch.sum(rows, 0, out=out.view(-1))

        return (
            (rows @ weight.view(rows.shape[1], inputs.shape[1])).view(x.shape) if needs_x else None,
            _gradient(own_weight, of_weight, context.sums) if needs_weight else None,
            _gradient(own_bias, of_bias, context.sums) if needs_bias else None,
            None,
        )


def _gradient(parameter: Tensor, into: Callable[[Tensor], None], sums: Sums) -> Tensor:
    if sums.write(parameter, into):
        return _nothing(parameter)
    made = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    into(made)
    return made


def _nothing(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tokens: Tensor, weight: Tensor, sums: Sums) -> Tensor:
        context.save_for_backward(tokens)
        context.parameter, context.sums = weight, sums
        return functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = context.saved_tensors
        shape = context.parameter.shape
        rows, row_of_token = tokens.flatten().unique(return_inverse=True)
        sums = torch.zeros(rows.numel(), shape[1], device=gradient.device)
        sums.index_add_(0, row_of_token, gradient.reshape(-1, shape[1]).float())
        made = torch.sparse_coo_tensor(rows[None], sums.to(gradient.dtype), shape, is_coalesced=True, check_invariants=False)
        return None, _nothing(context.parameter) if context.sums.add(context.parameter, made) else made, None
