"""The plan of an update: which optimizer steps which parameters, with which options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from hpczero.errors import InputError
from hpczero.model.shapes import Parameter
from hpczero.optim.elementwise import Kept, Make, TorchOptimizer, torch_optimizer
from hpczero.optim.groups import first_matches, options_by_name
from hpczero.optim.matrices import is_matrix
from hpczero.parallel.states import ADAMW, UpdateMemory, memory_of
from hpczero.spec.rules_of_optimizers import without_parameters
from hpczero.spec.schema import Optimizer
from hpczero.text import join_words

EMPTY: Mapping[str, Any] = MappingProxyType({})

_OF_ADAMW = ("lr", "weight_decay", "betas", "eps")  # keys of a group
_OF_CLASS = ("betas", "eps", "weight_decay")  # keys of the spec that are its AdamW's


@dataclass(frozen=True)
class UpdateWanted:
    """The arguments of `hpczero.initialize` that are about the update."""

    optimizer: str | Make | None = None  # None: AdamW by hpczero's kernel
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    average: float | None = None

    def __post_init__(self) -> None:
        for argument in ("optimizer_options", "groups"):
            given = getattr(self, argument)
            if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
                raise InputError(f"{argument} = {given!r}: give a table with text for keys")
        for pattern, options in self.groups.items():
            if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
                example = '{"*.bias": {"weight_decay": 0.0}}'
                raise InputError(
                    f"groups: {pattern!r} has {options!r}, not options: write them as {example}"
                )
        if self.average is not None and not isinstance(self.average, int | float):
            raise InputError(f"average = {self.average!r}: give a number between 0 and 1")

    def described(self) -> dict[str, str]:
        """Return the arguments in words that are equal where ranks want the same."""
        name = repr(self.optimizer)
        if callable(self.optimizer):
            name = getattr(self.optimizer, "__qualname__", type(self.optimizer).__qualname__)
        groups = [(pattern, sorted(options.items())) for pattern, options in self.groups.items()]
        return {
            "optimizer": name,
            "optimizer_options": repr(sorted(self.optimizer_options.items())),
            "groups": repr(groups),
            "average": repr(self.average),
        }


@dataclass(frozen=True)
class UpdatePlan:
    """The update that is wanted, for the parameters that there are.

    `options`: parameter -> those of its group. `optimizer`: one of PyTorch's, else the kernel's
    AdamW; `kept`: what it keeps of each parameter.
    """

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    average: float | None = None
    optimizer: TorchOptimizer | None = None
    kept: Mapping[str, Kept] = field(default_factory=dict)
    own: UpdateMemory = ADAMW  # the memory of hpczero's update

    @property
    def tensors(self) -> list[str]:
        """Names of what PyTorch's optimizer keeps of each element."""
        return sorted({name for kept in self.kept.values() for name in kept.tensors})

    @property
    def known(self) -> list[str]:
        """Names of all that PyTorch's optimizer keeps."""
        kept = self.kept.values()
        numbers = {name for one in kept for name in (*one.numbers, *one.of_group)}
        return sorted(numbers.union(self.tensors))

    @property
    def memory(self) -> UpdateMemory:
        averages = self.average is not None
        if self.optimizer is None:
            return replace(self.own, average=averages)
        return UpdateMemory(len(self.tensors), averages, by_torch=True)


PLAIN_ADAMW = UpdatePlan()


def own_update(spec: Optimizer) -> UpdatePlan:
    """Return the plan of hpczero's own update of all parameters alike."""
    return UpdatePlan(own=memory_of(spec))


def plan_update(
    wanted: UpdateWanted, spec: Optimizer, parameters: Sequence[Parameter], device: torch.device
) -> UpdatePlan:
    """Plan the update of these parameters; InputError where it cannot be carried out.

    `spec`: the spec's table. An optimizer of PyTorch is tried out on the device.
    """
    _refuse_other_updates(wanted, spec)
    average = wanted.average
    if average is not None and not 0 < average < 1:
        raise InputError(f"average = {average}: give a number between 0 and 1, such as 0.999")
    names = [parameter.name for parameter in parameters]
    if missing := without_parameters(spec, names):
        raise InputError("; ".join(missing))
    options = options_by_name(wanted.groups, names)
    for pattern, of_group in wanted.groups.items():
        _check_numbers(pattern, of_group)
    if wanted.optimizer is None:
        _refuse_unknown(wanted)
        _refuse_unread(wanted, spec, parameters)
        return UpdatePlan(options, average, own=memory_of(spec))
    _refuse_ignored(spec)
    optimizer = torch_optimizer(wanted.optimizer, wanted.optimizer_options)
    probed = {id(one): optimizer.probed(one, device) for one in options.values()}
    others = optimizer.probed({}, device)
    kept = {name: probed[id(options[name])] if name in options else others for name in names}
    return UpdatePlan(options, average, optimizer, kept)


def _refuse_other_updates(wanted: UpdateWanted, spec: Optimizer) -> None:
    """Raise InputError for arguments that replicas which send less cannot follow."""
    setting = ""
    if spec.outer.every:
        setting = f"optimizer.outer.every = {spec.outer.every}"
    elif spec.name == "one_bit_adam":
        setting = 'optimizer.name = "one_bit_adam"'
    given = {
        "optimizer": wanted.optimizer is not None,
        "average": wanted.average is not None,
        "groups": bool(wanted.groups),
    }
    arguments = [f"`{name}`" for name, is_given in given.items() if is_given]
    if setting and arguments:
        raise InputError(
            f"{setting} is for hpczero's own update of all parameters alike, and "
            f"{join_words(arguments)} of hpczero.initialize would change it: leave that out, or "
            "the key of the spec"
        )


def _check_numbers(pattern: str, options: Mapping[str, Any]) -> None:
    for key in ("lr", "weight_decay"):
        value = options.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise InputError(f"groups: {key} = {value!r} of {pattern!r} must be a number >= 0")


def _refuse_unknown(wanted: UpdateWanted) -> None:
    """Raise InputError for what hpczero's AdamW has no use for."""
    if wanted.optimizer_options:
        raise InputError(
            "optimizer_options are for an `optimizer` of PyTorch; those of hpczero's AdamW are "
            "optimizer.betas, eps and weight_decay of the spec"
        )
    for pattern, options in wanted.groups.items():
        for key in options:
            if key not in _OF_ADAMW:
                known = join_words(list(_OF_ADAMW))
                raise InputError(f"groups: {key!r} of {pattern!r} is no option; there are {known}")
        betas = options.get("betas", (0.0, 0.0))
        is_pair = isinstance(betas, tuple | list) and len(betas) == 2
        if not is_pair or not all(0 <= beta < 1 for beta in betas):
            raise InputError(
                f"groups: betas = {betas!r} of {pattern!r} must be two numbers, each >= 0 and < 1"
            )
        if not options.get("eps", 1.0) > 0:
            raise InputError(f"groups: eps = {options['eps']!r} of {pattern!r} must be > 0")


def _refuse_unread(wanted: UpdateWanted, spec: Optimizer, parameters: Sequence[Parameter]) -> None:
    """Raise InputError for options of groups that the step of their parameters does not read."""
    matches = first_matches(wanted.groups, [parameter.name for parameter in parameters], "groups")
    for parameter in parameters if spec.name in ("lion", "muon") else ():
        pattern = matches.get(parameter.name, "")
        of_group = wanted.groups.get(pattern, EMPTY)
        if spec.name == "lion" and "eps" in of_group:
            raise InputError(
                f"groups: 'eps' of {pattern!r} is not read by lion, whose steps are signs: leave "
                "it out"
            )
        unread = [key for key in ("betas", "eps") if key in of_group]
        if spec.name == "muon" and unread and is_matrix(parameter, spec):
            raise InputError(
                f"groups: {unread[0]!r} of {pattern!r} is not read by muon's step of matrices such "
                f"as {parameter.name}, which has optimizer.momentum alone: give it to a pattern "
                "without matrices, or name this one in optimizer.not_muon, and AdamW steps it"
            )


def _refuse_ignored(spec: Optimizer) -> None:
    """Raise InputError for keys of the spec that an optimizer of PyTorch would not follow."""
    defaults = Optimizer()
    if spec.name != defaults.name:
        raise InputError(
            f'optimizer.name = "{spec.name}" is an update of hpczero, and `optimizer` is another: '
            "leave one of the two out"
        )
    for key in _OF_CLASS:
        value = getattr(spec, key)
        if value != getattr(defaults, key):
            raise InputError(
                f"optimizer.{key} = {value} is for hpczero's AdamW, and `optimizer` is another: "
                f'leave it out, and give optimizer_options={{"{key}": ...}} if that has such an '
                "option"
            )
