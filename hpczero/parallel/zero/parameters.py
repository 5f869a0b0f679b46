"""Parameters of an engine's module: the one place where others touch them.

They stay the objects that the module had. Their memory and their gradients are the engine's, so
what others do with them is seen here. `.data` shares the count of writes (`zero.outside` compares
it), and cannot be set; a gradient in the engine's buffers cannot be mistaken for none. Where
values are away (stage 3 of ZeRO), every use of them comes through `ShardedParameter`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpczero.errors import HpczeroError

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad

_METHODS_WITHOUT_VALUES = {
    "size",
    "dim",
    "numel",
    "stride",
    "element_size",
    "is_floating_point",
    "register_hook",
    "__hash__",
    "requires_grad_",
    "is_contiguous",
    "is_complex",
    "__len__",
    "ndimension",
    "nelement",
    "get_device",
    "is_signed",
    "retain_grad",
    "register_post_accumulate_grad_hook",
    "is_inference",
}
_PROPERTIES_WITHOUT_VALUES = {
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "ndim",
    "itemsize",
    "nbytes",
    "names",
    "name",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "is_xpu",
    "is_mps",
    "is_mtia",
    "is_xla",
    "is_ipu",
    "is_vulkan",
    "is_maia",
    "retains_grad",
    "output_nr",
    "volatile",
    "grad_dtype",
    "_version",
    "_base",
    "_grad",
    "_grad_fn",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_has_symbolic_sizes_strides",
    "_python_dispatch",
}
# Modules whose hooks for saved tensors give back the values that a parameter had.
_KEEP_VALUES = {
    "hpczero.parallel.zero.gather",
    "hpczero.parallel.activations.away",
    "hpczero.parallel.activations.recipes",
    "hpczero.parallel.activations.recompute",
    "torch.utils.checkpoint",
}


class Owner:
    """The state of an engine that its parameters ask for."""

    def __init__(self) -> None:
        self.lent: set[Tensor] = set()  # writable now: inside gathered(..., modify=True)
        self.keeps_gradients = False  # a backward of this step has put them in its buffers


class OwnedParameter(nn.Parameter):
    """A parameter in an engine's memory."""

    known_as: str  # its name in the module
    owner: Owner | None = None

    @property
    def data(self) -> Tensor:
        """The values. Unlike with other tensors, a write to them is counted."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if self.owner is None:
            give_values(self, values)
        elif self in self.owner.lent and values.shape == self.shape:
            with torch.no_grad():
                self.copy_(values)
        elif not _is_same_memory(self, values):
            raise HpczeroError(
                f"the values of {self.known_as} are replaced from outside (.data = ..., .to(),"
                f" .float()), but they lie in hpczero's memory: {_to_write()}; precision and device"
                " are the spec's"
            )

    @property
    def grad(self) -> Tensor | None:
        """The gradient that autograd has left here, seldom any: the engine takes them."""
        gradient: Tensor | None = _GRAD.__get__(self)
        if gradient is None and self.owner and self.owner.keeps_gradients and self.requires_grad:
            raise HpczeroError(_refusal_of_gradient(self.known_as))
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.owner and (gradient is not None or self.owner.keeps_gradients):
            raise HpczeroError(_refusal_of_gradient(self.known_as))
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter in memory of its own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class ShardedParameter(OwnedParameter):
    """A parameter whose values may be away; its shape and dtype are always there.

    A computation with it fetches the values where that is possible, and is an error elsewhere.
    """

    released_as: str | None = None  # the parameter's name, while its values are away
    fetch: Callable[[], None]  # brings the values, or raises

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        if self.released_as is None:
            return str(super().__repr__(**how))
        return f"Parameter {self.released_as} of shape {list(self.shape)}, not gathered"

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not (_needs_no_values(function) or _is_autograd(function)):
                for parameter in _sharded_in((args, kwargs)):
                    if parameter.released_as:
                        parameter.fetch()
                if saved_as_it_is() and not _is_autograd(function):
                    args, kwargs = _as_views((args, kwargs))
            return function(*args, **kwargs)


def saved_as_it_is() -> bool:
    """Return True where autograd would keep the parameter, not the values that it has now.

    That is where there are no hooks for saved tensors, or hooks of others, which may hand back what
    they got.
    """
    if not torch.is_grad_enabled():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or getattr(hooks[0], "__module__", None) not in _KEEP_VALUES


def give_values(parameter: Tensor, values: Tensor) -> None:
    """Set where a parameter's values lie, for the engine."""
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(parameter, values)


def gradient_left(parameter: Tensor) -> Tensor | None:
    """Return the gradient that autograd has left in a parameter, not that in the buffers."""
    gradient: Tensor | None = _GRAD.__get__(parameter)
    return gradient


def leave_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Set `parameter.grad`, for the engine."""
    _GRAD.__set__(parameter, gradient)


def when_ready(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call the hook after each gradient; a frozen parameter gets it too, to be trained later."""
    trained = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trained)
    return handle


def give_up_parameter(parameter: Tensor, name: str) -> None:
    """Make it an error, from now on, to ask for the parameter's values."""
    nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)

    def refuse() -> None:
        raise HpczeroError(
            f"the values of {name} went when hpczero's engine was closed: keep them before that by"
            " engine.full_state_dict(), or copy them inside engine.gathered(...)"
        )

    parameter.__class__ = ShardedParameter
    assert isinstance(parameter, ShardedParameter)
    give_values(parameter, nothing.expand(parameter.shape))
    parameter.owner = None
    parameter.released_as = name
    parameter.fetch = refuse


def hand_back_parameter(parameter: Tensor, values: Tensor) -> None:
    """Make the parameter an ordinary one again, with these values."""
    give_values(parameter, values)
    parameter.__class__ = nn.Parameter
    for name in ("owner", "known_as", "released_as", "fetch"):
        parameter.__dict__.pop(name, None)


def _to_write() -> str:
    inside = "write to it inside `with engine.gathered([parameter], modify=True)`"
    return f"{inside}, or call engine.load_state_dict"


def _refusal_of_gradient(name: str) -> str:
    return (
        f"the gradient of {name} is asked for, or set, from outside, but it is in hpczero's"
        " buffers, where it is summed over the ranks: train.grad_clip in the spec clips it,"
        " engine.step() returns the norm and steps; gradients come by engine.backward alone"
    )


def _is_same_memory(parameter: Tensor, values: Tensor) -> bool:
    present = parameter.detach()
    other = values.detach()
    same_kind = present.dtype == other.dtype and present.device == other.device
    return same_kind and present.is_set_to(other)


def _needs_no_values(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(function.__self__, "__name__", "") in _PROPERTIES_WITHOUT_VALUES
    return name in _METHODS_WITHOUT_VALUES


def _is_autograd(function: Any) -> bool:
    """Return True for functions that take the parameter itself, as a leaf of the graph."""
    return function in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _sharded_in(value: Any) -> Iterator[ShardedParameter]:
    if isinstance(value, ShardedParameter):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sharded_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded_in(item)


def _as_views(value: Any) -> Any:
    """Put a view in place of each parameter: it keeps the values when the parameter's go."""
    if isinstance(value, ShardedParameter):
        return value.view_as(value)
    if isinstance(value, list | tuple):
        views = [_as_views(item) for item in value]
        return views if isinstance(value, list) else tuple(views)
    if isinstance(value, dict):
        return {name: _as_views(item) for name, item in value.items()}
    return value
