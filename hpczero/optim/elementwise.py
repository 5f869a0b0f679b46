"""Optimizers of PyTorch on parts of parameters: which can, and what they keep, found by trying.

An update is elementwise if every element's new value and states depend on this element's own
history alone, and on numbers that are the same for all elements. Only such an update can be
done on shards. Nobody can see that from a class, so a few random steps are done with a small
matrix, with its elements in a row, and with the row cut in two: the results must be the same.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.errors import InputError

Group = dict[str, Any]
Make = Callable[..., torch.optim.Optimizer]

_SHAPE = (8, 16)
_IN_A_ROW = slice(0, prod(_SHAPE))
_PARTS = (slice(0, 37), slice(37, prod(_SHAPE)))
_STEPS = 8
_LR = 0.01
_TOLERANCE = 1e-6  # a vector unit may round otherwise than the code for what is left over
_TAKEN = ("master", "model", "average")  # names of what is kept besides
_CAN = "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD"
_CANNOT = "LBFGS, LAMB, Muon, Adafactor, SparseAdam"


@dataclass(frozen=True)
class Kept:
    """The state that an optimizer keeps of a parameter.

    `tensors`: names of fp32 tensors of its shape; `numbers`: name -> an example of what is one for
    all elements; `of_group`: numbers that it keeps in the parameter's group.
    """

    tensors: tuple[str, ...]
    numbers: Mapping[str, Any]
    of_group: tuple[str, ...]


@dataclass(frozen=True)
class TorchOptimizer:
    """A class of optimizers, or a function that makes one, with options for all parameters."""

    make: Make
    name: str  # in messages and checkpoints
    options: Mapping[str, Any]

    def __call__(self, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        return self.make(groups, lr=lr, **self.options)

    def probed(self, group: Mapping[str, Any], device: torch.device) -> Kept:
        """Return what it keeps, for parameters with these options of their group.

        InputError unless its update is elementwise.
        """
        return _Probe(self, group, device).result()


def torch_optimizer(optimizer: str | Make, options: Mapping[str, Any]) -> TorchOptimizer:
    """Return the optimizer of this name in torch.optim, or of this class or function."""
    if isinstance(optimizer, str):
        found = getattr(torch.optim, optimizer, None)
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
            raise InputError(
                f"optimizer = {optimizer!r}: no optimizer of torch.optim has this name; these can "
                f"be used: {_CAN}, or a class, or a function (groups, lr=...) that makes one"
            )
        optimizer = found
    if not callable(optimizer):
        raise InputError(f"optimizer = {optimizer!r}: give a name, a class or a function")
    known = _parameters(optimizer)
    for key in options:
        if key == "lr":
            raise InputError("optimizer_options: 'lr' is the spec's: set optimizer.lr there")
        if known and key not in known:
            taken = ", ".join(known[1:])
            raise InputError(f"optimizer_options: {key!r} is no option; there are {taken}")
    name = f"{optimizer.__module__}.{getattr(optimizer, '__qualname__', type(optimizer).__name__)}"
    one_by_one = {"foreach": False} if "foreach" in known and "fused" not in options else {}
    return TorchOptimizer(optimizer, name, {**one_by_one, **options})


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    """Return the names of its parameters; none where it takes any, or does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function that is not written in Python
        return []
    takes_any = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return [] if takes_any else [parameter.name for parameter in parameters]


class _Probe:
    """Steps with the same values as a matrix, as a row, and as two parts of the row."""

    def __init__(
        self, optimizer: TorchOptimizer, group: Mapping[str, Any], device: torch.device
    ) -> None:
        self.optimizer = optimizer
        self.group = {key: value for key, value in group.items() if key != "lr"}
        self.device = device
        random = torch.Generator().manual_seed(0)
        numbers = torch.randn((_STEPS + 1, prod(_SHAPE)), generator=random, dtype=torch.float32)
        numbers[1:, _PARTS[1]] *= 10  # what depends on a norm differs between the parts
        self.values, *self.gradients = numbers.to(device)
        self.trials = 0

    def result(self) -> Kept:
        whole = self._trial([_IN_A_ROW], _SHAPE)
        again = self._trial([_IN_A_ROW], _SHAPE)
        in_a_row = self._trial([_IN_A_ROW])
        in_parts = self._trial(_PARTS)
        self._compare(whole, again, "a tensor twice in the same way: random numbers?")
        self._compare(whole, in_a_row, "the elements of a matrix in a row as the matrix")
        self._compare(in_a_row, in_parts, "parts of a tensor as the whole")
        return in_parts.kept

    def _trial(self, parts: Sequence[slice], shape: Sequence[int] = (-1,)) -> "_Trial":
        """Do the steps, each time with other random numbers."""
        devices = [self.device] if self.device.type == "cuda" else []
        self.trials += 1
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.trials)
            try:
                return _Trial(self, parts, shape)
            except InputError:
                raise
            except Exception as error:
                reason = str(error).rstrip(".")
                raise self.refusal(f"{type(error).__name__}: {reason}") from error

    def _compare(self, one: "_Trial", other: "_Trial", what: str) -> None:
        for name in one.found:
            if name not in other.found or not _same(one.found[name], other.found[name]):
                of = f"{name!r}, which it keeps, differs" if name else "their values differ"
                raise self.refusal(f"it does not update {what} ({of})")

    def refusal(self, why: str) -> InputError:
        return InputError(
            f"{self.optimizer.name} cannot be used: {why}. hpczero updates shards of parameters, "
            f"which takes an optimizer that treats each element by itself: {_CAN} of torch.optim "
            f"do, {_CANNOT} do not"
        )


class _Trial:
    """The parts of a tensor after the steps, and a parameter that has a gradient later.

    `found`: the values ("") and the states, by name, each in a row; `kept`: of a part.
    """

    def __init__(self, probe: _Probe, parts: Sequence[slice], shape: Sequence[int]) -> None:
        self.probe = probe
        self.own = [nn.Parameter(probe.values[part].clone().view(shape)) for part in parts]
        self.late = nn.Parameter(probe.values[:5].clone())
        groups = [{"params": [one], **probe.group} for one in (*self.own, self.late)]
        self.optimizer = optimizer = probe.optimizer(groups, _LR)
        self._refuse_other_groups()
        groups_before = [_numbers(group) for group in optimizer.param_groups]
        before_steps = _attributes(optimizer)
        self._steps(parts, shape)
        for name, value in _attributes(optimizer).items():
            if before_steps.get(name) != value:
                raise probe.refusal(f"it changes an attribute ({name!r}), which nobody saves")
        now, before = optimizer.param_groups[0], groups_before[0]
        changed = [name for name, value in before.items() if now[name] != value]
        self.kept = self._kept(tuple(changed))
        self.found = {"": torch.cat([one.detach().flatten() for one in self.own])}
        for name in self.kept.tensors:
            states = [optimizer.state[one][name].flatten() for one in self.own]
            self.found[name] = torch.cat(states)
        for name in self.kept.numbers:
            values = [optimizer.state[one][name] for one in self.own]
            if any(value != values[0] for value in values):
                raise probe.refusal(f"it keeps another {name!r} for each part of a tensor")
            if values[0] is not None:
                self.found[name] = torch.tensor([float(values[0])], dtype=torch.float64)

    def _refuse_other_groups(self) -> None:
        optimizer, probe = self.optimizer, self.probe
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise probe.refusal(f"it makes a {type(optimizer).__name__}")
        made = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if made != [[id(one)] for one in (*self.own, self.late)]:
            raise probe.refusal("it makes other groups than it is given")
        if "lr" not in optimizer.param_groups[0]:
            raise probe.refusal("its groups have no 'lr', which the schedule sets")
        for key in probe.group:
            if key not in optimizer.defaults:
                known = ", ".join(map(str, optimizer.defaults))
                raise InputError(f"groups: {key!r} is no option of a group; there are {known}")

    def _steps(self, parts: Sequence[slice], shape: Sequence[int]) -> None:
        late, first = self.late, self.probe.values[:5]
        for gradient in self.probe.gradients:
            for one, part in zip(self.own, parts, strict=True):
                one.grad = gradient[part].clone().view(shape)
            self.optimizer.step()
            if late.grad is None and not torch.equal(late, first):
                raise self.probe.refusal("it updates a parameter that has no gradient")
            late.grad = gradient[:5].clone()

    def _kept(self, of_group: tuple[str, ...]) -> Kept:
        parameter = self.own[0]
        refusal = self.probe.refusal
        tensors: list[str] = []
        numbers: dict[str, Any] = {}
        for name, value in self.optimizer.state.get(parameter, {}).items():
            if not isinstance(name, str):
                raise refusal(f"it keeps a state under {name!r}, which is no name")
            if value is None or isinstance(value, int | float):
                numbers[name] = value
            elif not isinstance(value, Tensor):
                raise refusal(f"it keeps {name!r}, a {type(value).__name__}")
            elif value.numel() == 1:
                numbers[name] = value
            elif value.shape != parameter.shape:
                shapes = f"{list(value.shape)} for a parameter of shape {list(parameter.shape)}"
                raise refusal(f"it keeps {name!r} of shape {shapes}")
            elif value.dtype != torch.float32:
                raise refusal(f"it keeps {name!r} in {value.dtype}; only torch.float32 can be")
            elif not name.isidentifier() or name in _TAKEN:
                raise refusal(f"it keeps a tensor under the name {name!r}, which no checkpoint has")
            else:
                tensors.append(name)
        return Kept(tuple(tensors), numbers, of_group)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values, but for the learning rate."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and name != "lr"
    }


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what tells whether its attributes change, but for those that hold its state.

    A flag may: PyTorch has some for what is done once.
    """
    found: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups"):
            continue
        found[name] = type(value)
        if isinstance(value, Tensor):
            found[name] = value.flatten().tolist()
        elif isinstance(value, Sized):
            found[name] = len(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    largest = one.abs().max()
    return torch.equal(one, other) or bool(((one - other).abs() <= _TOLERANCE * largest).all())
