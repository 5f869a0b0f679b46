"""Gradients of weights: written where they are summed, and refused if no engine asked for them.

Autograd makes the gradient of a weight in memory of its own, from where it would be copied into the
unit's buffer. That of an embedding is a whole tensor of zeros but for a few rows, to which that of
a tied head is added. Inside `DirectGradients.redirect_weight_grads()`, linear maps and embeddings
of the engine's parameters avoid this. The product that is a weight's gradient is written into the
buffer at once, and an embedding's gradient is its rows alone (summed in fp32, rounded once). To
autograd such a gradient is an empty sparse tensor: autograd adds it to those of the parameter's
other uses, and it tells the engine at the right time that the gradient is there.

hpczero's own models ask for these maps (`model.maps`). In other models every operation is looked
at, which takes some 10 microseconds each. Gradients that gather in another precision are made by
autograd, with the same arithmetic: results do not depend on which way they go.
"""

import warnings
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hpczero.errors import HpczeroError
from hpczero.model import maps
from hpczero.parallel.zero.parameters import ShardedParameter, leave_gradient, saved_as_it_is

_VIEWS = {
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "UnsqueezeBackward0",
    "SqueezeBackward1",
    "AliasBackward0",
}
_OWN = (
    "a step takes the gradients of engine.backward(loss), which names the engine that is to have"
    " them"
)


class Sums(Protocol):
    """Buffers in which gradients are added up."""

    def write(self, parameter: Tensor, into: Callable[[Tensor], None]) -> bool:
        """Let `into` write a gradient of the parameter; return False if autograd has to."""

    def add(self, parameter: Tensor, rows: Tensor) -> None:
        """Add a gradient of which some rows are there (sparse)."""


def no_torch_overrides() -> AbstractContextManager[None]:
    """Keep function modes and tensor subclasses from looking at operations inside.

    A look takes longer than a small tensor operation. Weights that are away are not fetched inside.
    """
    return torch._C.DisableTorchFunction()


def in_an_engine() -> bool:
    """Return True inside the forward or backward of some engine of a user's module."""
    return any(isinstance(mode, _RedirectedMaps) for mode in _get_current_function_mode_stack())


class DirectGradients:
    """Linear maps and embeddings whose gradients go to `sums`, without a copy."""

    def __init__(self, parameters: Container[Tensor], sums: Sums, watches: bool = True) -> None:
        """`watches`: replace the operations of modules that do not ask for these maps."""
        self.sums = sums
        self._parameters = parameters
        self._watches = watches
        self._task = -1  # autograd's id of the engine's own backward

    def redirect_weight_grads(self) -> AbstractContextManager[object]:
        """Use these maps inside."""
        return _RedirectedMaps(self) if self._watches else maps.redirect_linear_maps(self)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _left_to_autograd():
            return functional.linear(input, weight, bias)
        own_weight = self._parameter(weight)
        own_bias = None if bias is None else self._parameter(bias)
        known = own_weight is not None and (bias is None) == (own_bias is None)
        plain = (
            type(input) is Tensor
            and input.layout is torch.strided
            and input.dim() >= 2
            and input.dtype == weight.dtype
            and weight.numel() > 0
        )
        fits = (
            plain
            and weight.dim() == 2
            and input.shape[-1] == weight.shape[1]
            and (bias is None or bias.shape == weight.shape[:1])
        )
        if isinstance(weight, ShardedParameter) and saved_as_it_is():
            fits = False
        if not (known and fits):
            return functional.linear(input, weight, bias)
        return _Linear.apply(input, own_weight, own_bias, self)

    def embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        options = padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse
        plain = type(input) is Tensor and input.device.type == "cpu"  # a device: rows are unknown
        if options or not plain or _left_to_autograd() or self._parameter(weight) is not weight:
            return functional.embedding(
                input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
            )
        return _Embedding.apply(input, weight, self)

    def gradient_of(self, weight: Tensor, into: Callable[[Tensor], None]) -> Tensor | None:
        """Let `into` write a weight's gradient in backward; return what autograd gets of it."""
        own = self._parameter(weight)
        if own is None or not self.is_own():
            return None
        return _gradient(own, into, self.sums)

    def backward(self, output: Tensor, gradient: Tensor) -> None:
        """Run output.backward(gradient) without leaving modes, which that would do.

        So what is recomputed in backward uses the maps that forward used.
        """

        def note_task(*_: object) -> None:
            self._task = torch._C._current_graph_task_id()

        hook = output.grad_fn.register_prehook(note_task) if output.grad_fn else None
        try:
            torch.autograd.Variable._execution_engine.run_backward(
                (output,),
                (gradient,),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        finally:
            self._task = -1
            if hook:
                hook.remove()

    def is_own(self) -> bool:
        """Return True inside the engine's own backward pass.

        A backward inside that one, or one that somebody else asks for, is another.
        """
        return self._task >= 0 and torch._C._current_graph_task_id() == self._task

    def _parameter(self, tensor: Tensor) -> Tensor | None:
        """Return the parameter that the tensor is, or is a view of all elements of.

        None for others, for frozen ones, and where a hook would see the gradient.
        """
        base = tensor if tensor._base is None else tensor._base
        if (
            base not in self._parameters
            or not base.requires_grad
            or base._backward_hooks
            or not tensor.requires_grad
        ):
            return None
        if tensor is base:
            return base
        node = tensor.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        only_views = node is not None and node.name() == "torch::autograd::AccumulateGrad"
        if (
            only_views
            and tensor.is_contiguous()
            and tensor.numel() == base.numel()
            and not tensor._backward_hooks
        ):
            return base
        return None


class _RedirectedMaps(TorchFunctionMode):
    def __init__(self, direct: DirectGradients) -> None:
        super().__init__()
        self._replaced: dict[Any, Callable[..., Tensor]] = {
            functional.linear: direct.linear,
            functional.embedding: direct.embedding,
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._replaced.get(function, function)(*args, **(kwargs or {}))


def _left_to_autograd() -> bool:
    """Return True where PyTorch's own maps are used.

    That is without gradients, and inside autocast, compilation, forward-mode differentiation and
    function transforms.
    """
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    forward_mode = forward_ad._current_level >= 0
    special = autocast or forward_mode or torch._C._are_functorch_transforms_active()
    return not torch.is_grad_enabled() or special or torch.compiler.is_compiling()


class _Linear(torch.autograd.Function):
    """Linear map of x [..., inputs] to [..., outputs].

    The weight is [outputs, inputs] and the bias [outputs]; as parameters they may have other
    shapes.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, direct: DirectGradients
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.parameters = weight, bias
        context.direct = direct
        rows = x.reshape(-1, x.shape[-1])
        matrix = weight.view(-1, x.shape[-1])
        # `out` is no view of anything: what follows may work in place.
        out = x.new_empty(*x.shape[:-1], len(matrix))
        if bias is None:
            torch.mm(rows, matrix.t(), out=out.view(len(rows), len(matrix)))
        else:
            torch.addmm(bias.view(-1), rows, matrix.t(), out=out.view(len(rows), len(matrix)))
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors  # hooks may recompute them here, by the same maps
        in_own_backward = context.direct.is_own() and not torch.is_grad_enabled()
        plain = in_own_backward and type(weight) in (Tensor, nn.Parameter)
        with no_torch_overrides() if plain else nullcontext():
            return _Linear._gradients(context, gradient, x, weight, in_own_backward)

    @staticmethod
    def _gradients(
        context: Any, gradient: Tensor, x: Tensor, weight: Tensor, in_own_backward: bool
    ) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, _ = context.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        own_weight, own_bias = context.parameters
        needs_weight &= own_weight.requires_grad  # it may have been frozen since the forward
        needs_bias = needs_bias and own_bias.requires_grad
        matrix = weight.view(rows.shape[1], inputs.shape[1]) if needs_x else None
        of_x = None if matrix is None else (rows @ matrix).view(x.shape)
        # Hooks may have been put on since the forward.
        has_hooks = own_weight._backward_hooks or (needs_bias and own_bias._backward_hooks)
        # A hook sees the gradient, or it may be differentiated again, or is somebody else's.
        if not in_own_backward or has_hooks:
            of_weight = (rows.t() @ inputs).view(own_weight.shape) if needs_weight else None
            of_bias = rows.sum(0).view(own_bias.shape) if needs_bias else None
            return of_x, of_weight, of_bias, None

        def write_weight(out: Tensor) -> None:
            torch.mm(rows.t(), inputs, out=out.view(rows.shape[1], inputs.shape[1]))

        def write_bias(out: Tensor) -> None:
            torch.sum(rows, 0, out=out.view(-1))

        sums = context.direct.sums
        of_weight = _gradient(own_weight, write_weight, sums) if needs_weight else None
        of_bias = _gradient(own_bias, write_bias, sums) if needs_bias else None
        return of_x, of_weight, of_bias, None


def _gradient(parameter: Tensor, into: Callable[[Tensor], None], sums: Sums) -> Tensor:
    """Return what autograd gets of a gradient that `into` writes."""
    if sums.write(parameter, into):
        return _empty_sparse(parameter)
    gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    into(gradient)
    return gradient


def _empty_sparse(parameter: Tensor) -> Tensor:
    return torch.zeros(
        parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo
    )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tokens: Tensor, weight: Tensor, direct: DirectGradients) -> Tensor:
        context.save_for_backward(tokens)
        context.parameter = weight
        context.direct = direct
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,) = context.saved_tensors
        if not context.parameter.requires_grad:  # it has been frozen since the forward
            return None, None, None
        shape = context.parameter.shape
        has_hooks = context.parameter._backward_hooks  # put on since the forward
        if torch.is_grad_enabled() or not context.direct.is_own() or has_hooks:
            zeros = gradient.new_zeros(shape)
            return None, zeros.index_add(0, tokens.flatten(), gradient.reshape(-1, shape[1])), None
        rows, row_of_token = tokens.flatten().unique(return_inverse=True)
        sums = torch.zeros(rows.numel(), shape[1], dtype=torch.float32, device=gradient.device)
        sums.index_add_(0, row_of_token, gradient.reshape(-1, shape[1]).float())
        of_weight = torch.sparse_coo_tensor(
            rows[None],
            sums.to(gradient.dtype),
            shape,
            dtype=gradient.dtype,
            is_coalesced=True,
            check_invariants=False,
        )
        context.direct.sums.add(context.parameter, of_weight)
        return None, _empty_sparse(context.parameter), None


class StrayGradients:
    """Gradients that no backward of the engine has made.

    They are dropped, so that none stays for the next step. Another engine's backward, which passes
    through this one's module (a GAN), is no mistake: one warning tells. All others are errors.
    """

    def __init__(self, name_of: Callable[[torch.Tensor], str], says: bool) -> None:
        """`says`: this rank is the one that warns."""
        self._name_of = name_of
        self._says = says

    def drop(self, parameter: torch.Tensor) -> None:
        leave_gradient(parameter, None)
        name = self._name_of(parameter)
        if not in_an_engine():
            raise HpczeroError(f"a gradient of {name} came outside of engine.backward: {_OWN}")
        if self._says:
            came = "came in another engine's backward and are dropped"
            saves = "requires_grad_(False) on this module meanwhile saves their computation"
            warnings.warn(
                f"gradients of {name} and others {came}: {_OWN}; {saves} (docs/any-model.md)",
                stacklevel=2,
            )
        self._says = False
