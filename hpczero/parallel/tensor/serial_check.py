"""The proof of a tensor plan: each region computes, cut, what it computes whole.

A module may count with sizes of its own that nobody can see from outside (a fixed number of heads,
a slope for each head), and give wrong numbers without an error. So when a region of the plan runs
for the first time, it runs twice more, in evaluation mode and without gradients: once cut, and once
with whole parameters, which are gathered for this alone. Results that differ are an error on all
ranks.

The cut forward may fail on some ranks only, and the others wait for its sums: so before each of
them, and at the end, all ranks say that they have come so far.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hpczero.errors import HpczeroError
from hpczero.parallel.layout import ParameterSlot
from hpczero.parallel.tensor.cut_modules import CutModules
from hpczero.parallel.tensor.positions import replace_first_tensor
from hpczero.parallel.zero.outside import undisturbed

# of the largest numbers, what differently rounded sums may differ by
_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "kv_cache")
_MAY = (
    "it may count with a number of heads or a width that is fixed, or have parameters or buffers of"
    " single heads that the plan does not name, or compute something else in each call: such a"
    " module cannot be cut as this plan says"
)


class _OthersFailed(BaseException):
    """The cut forward failed on other ranks. No Exception, which a forward may catch."""


class SerialCheck:
    """Compares each region of a plan with itself as a whole, before its first run."""

    def __init__(self, module: nn.Module, cut: CutModules, slots: Sequence[ParameterSlot]) -> None:
        self._cut = cut
        self._slots = {slot.parameter.name: slot for slot in slots if slot.is_split}
        named = module.named_parameters()
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
        self._busy = False
        self._hooks: dict[str, RemovableHandle] = {}
        for name in cut.cuts.regions:
            region = module.get_submodule(name)

            def before(part: nn.Module, given: Any, named: Any, name: str = name) -> None:
                if not self._busy and not torch.jit.is_tracing():
                    self._compare(name, part, given, named)
                    self._cut.unproven.discard(name)
                    self._hooks.pop(name).remove()

            self._hooks[name] = region.register_forward_pre_hook(before, with_kwargs=True)

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    @undisturbed
    def _compare(self, name: str, region: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        named = {key: None if key in _CACHES else value for key, value in named.items()}
        if self._cut.cuts.has_own_positions(name):
            given, named = replace_first_tensor(given, named, self._cut.positions.gather)
        self._compare_inputs(name, tree_leaves((given, named)))
        self._busy = True
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(),
                _evaluating(region),
                self._cut.positions.whole(),
            ):
                ours, problem = self._cut_forward(region, given, named)
                with self._cut.as_whole(), self._whole_parameters(region):
                    given, named = _copies((given, named))
                    whole = region.forward(*given, **named)
            problem = problem or _difference(tree_leaves(ours), tree_leaves(whole))
        finally:
            self._busy = False
        differs = torch.tensor([bool(problem)], dtype=torch.uint8)
        if self._cut.group.stack(differs).any():
            kind = type(region).__name__
            raise HpczeroError(
                f"tensor_plan: {name or 'the module'} ({kind}), cut as the plan says, does not"
                f" compute what it computes whole: {problem or 'other ranks say how'}; {_MAY}"
            )

    def _cut_forward(
        self, region: nn.Module, given: Any, named: Mapping[str, Any]
    ) -> tuple[Any, str]:
        """Return the result of the cut region, and how it failed; it does on all ranks or none."""
        self._cut.before_message = self._meet
        try:
            given, named = _copies((given, named))
            result = region.forward(*given, **named)
            self._meet()
        except _OthersFailed:
            return None, "it fails on other ranks"
        except Exception as error:
            with suppress(_OthersFailed):
                self._meet(failed=True)
            return None, f"it fails: {error}"
        finally:
            self._cut.before_message = lambda: None
        return result, ""

    def _meet(self, failed: bool = False) -> None:
        """Go on when all ranks have come so far; _OthersFailed where one has not."""
        own = torch.tensor([failed], dtype=torch.uint8)
        if self._cut.group.stack(own).any():
            raise _OthersFailed

    def _compare_inputs(self, name: str, inputs: Sequence[Any]) -> None:
        """Raise HpczeroError on all ranks unless they come here with the same numbers."""
        tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
        total = sum(float(one.detach().double().nan_to_num(0, 0, 0).sum()) for one in tensors)
        own = torch.tensor([total], dtype=torch.float64)
        if len(set(self._cut.group.stack(own).flatten().tolist())) > 1:
            raise HpczeroError(
                f"the ranks of a tensor group have different inputs of {name or 'the module'}: they"
                " must get the same samples (those of engine.rank, not of the rank in MPI's world),"
                " and draw the same random numbers before"
            )

    @contextmanager
    def _whole_parameters(self, region: nn.Module) -> Iterator[None]:
        """Give the region's modules whole parameters inside, gathered from all ranks."""
        places = [
            (part, own, parameter)
            for part in region.modules()
            for own, parameter in part._parameters.items()
            if parameter is not None and self._names.get(parameter) in self._slots
        ]
        whole: dict[torch.Tensor, torch.Tensor] = {}
        for _, _, parameter in places:
            if parameter not in whole:
                whole[parameter] = self._gathered(parameter)
        for part, own, parameter in places:
            part._parameters[own] = nn.Parameter(whole[parameter], requires_grad=False)
        try:
            yield
        finally:
            for part, own, parameter in places:
                part._parameters[own] = parameter

    def _gathered(self, parameter: torch.Tensor) -> torch.Tensor:
        slot = self._slots[self._names[parameter]]
        whole = torch.zeros(slot.parameter.divided, dtype=parameter.dtype, device=parameter.device)
        whole[slot.held] = parameter.detach().reshape(whole[slot.held].shape)
        self._cut.group.all_reduce(whole)
        return whole.view(slot.parameter.shape)


def _copies(arguments: Any) -> Any:
    """Return the same arguments; a forward may write to its input."""
    return tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, arguments)


@contextmanager
def _evaluating(region: nn.Module) -> Iterator[None]:
    training = {part: part.training for part in region.modules()}
    region.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


def _difference(ours: Sequence[Any], whole: Sequence[Any]) -> str:
    """Return how results differ; "" if they do not. Those of single heads are left out."""
    compared = 0
    for mine, theirs in zip(ours, whole, strict=False):
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            continue
        if mine.shape != theirs.shape or not mine.is_floating_point():
            continue
        compared += 1
        both_nan = mine.isnan() & theirs.isnan()
        gap = (mine - theirs).masked_fill(both_nan, 0.0).float().norm()
        size = theirs.nan_to_num(0.0).float().norm()
        allowed = _ALLOWED.get(mine.dtype, 1e-4) * size + 1e-6
        if not gap <= allowed:
            return f"its output differs by {gap / size:.2g} of its norm"
    return "" if compared else "its output has another shape"
