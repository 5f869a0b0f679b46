"""Cut a user module into pipeline stages. The module must offer two methods:

    layers()                the modules that it consists of, in the order in which they run. The
                            first one is called with the micro-batch's tokens [samples, seq], every
                            other with the output of the one before it: one tensor
    loss(output, targets)   the sum of the losses of the micro-batch's targets [samples, seq], from
                            the output of the last layer

Shapes may change from layer to layer. A tensor that one stage sends to another has the dtype of
train.precision. The cost of a layer, for the cut, is the number of weights that it multiplies with.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hpczero.errors import InputError
from hpczero.model.batch import MicroBatch
from hpczero.parallel.pipeline.partition import cut_into_stages
from hpczero.parallel.step import Call
from hpczero.parallel.user_module import refuse_unfit, trained_parameters
from hpczero.parallel.zero.parameters import ShardedParameter
from hpczero.parallel.zero.state_dict import reset_of
from hpczero.spec.schema import Parallel
from hpczero.text import first_few

_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class UserStage:
    """The layers of the module that one stage holds, by chunk, and the calls that run them.

    `tied` maps each parameter that several stages hold to all these stages.
    """

    chunks: list[list[nn.Module]]
    calls: list[list[Call]]
    elsewhere: set[nn.Module]  # modules that other stages hold, and this one does not
    tied: dict[str, tuple[int, ...]]


def stage_of(module: nn.Module, parallel: Parallel, stage: int) -> UserStage:
    """Return a stage of the module; InputError, on every stage alike, if it cannot be cut so."""
    refuse_unfit(module)
    stages = parallel.pipeline
    layers = _offered(module, f"parallel.pipeline = {stages}")
    if stages * parallel.chunks > len(layers):
        raise InputError(_too_few(len(layers), stages, parallel.chunks))
    costs = [_cost(layer) for layer in layers]
    held = cut_into_stages(layers, costs, stages, parallel.chunks)
    modules = [_modules(layer for chunk in chunks for layer in chunk) for chunks in held]
    names = {parameter: name for name, parameter in trained_parameters(module).items()}
    holders: dict[str, list[int]] = {name: [] for name in names.values()}
    for number, chunks in enumerate(held):
        held_names = [names[one] for one in _parameters(modules[number]) if one in names]
        if not held_names:
            shown = ", ".join(type(layer).__name__ for chunk in chunks for layer in chunk)
            raise InputError(
                f"stage {number} of {stages} would have no parameters ({shown}): put such "
                "layers together with others, or use fewer stages"
            )
        for name in held_names:
            holders[name].append(number)
    tied = {name: tuple(numbers) for name, numbers in holders.items() if len(numbers) > 1}
    calls: list[list[Call]] = [
        [_Call(layer, _name(module, layer)) for layer in chunk] for chunk in held[stage]
    ]
    if stage + 1 == stages:
        calls[-1].append(_Loss(module))
    return UserStage(held[stage], calls, set().union(*modules) - modules[stage], tied)


def _modules(layers: Iterable[nn.Module]) -> set[nn.Module]:
    return {child for layer in layers for child in layer.modules()}


def _parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of the modules themselves, without those of their children."""
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _offered(module: nn.Module, wanted: str) -> list[nn.Module]:
    """Return the module's layers(), or raise InputError where it offers less than it must."""
    kind = type(module).__name__
    missing = [
        method
        for method in ("layers()", "loss(output, targets)")
        if not callable(getattr(module, method.partition("(")[0], None))
    ]
    if missing:
        raise InputError(
            f"{wanted}: {kind} has no {' and no '.join(missing)}; a module that is cut into stages "
            "offers layers(), the list of its modules in the order in which they run, and "
            "loss(output, targets), the summed loss (docs/any-model.md)"
        )
    offers: Any = module
    if isinstance(offers.layers, nn.Module):
        raise InputError(
            f"{wanted}: layers of {kind} is a {type(offers.layers).__name__}: it must be a method; "
            "give that module another name"
        )
    layers = list(offers.layers())
    modules = set(module.modules())
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module) or layer not in modules:
            raise InputError(
                f"{wanted}: number {number} of the layers() of {kind} is {_described(layer)}, "
                "and none of the module's own modules"
            )
    _refuse_left_over(module, layers, wanted)
    return layers


def _refuse_left_over(module: nn.Module, layers: Sequence[nn.Module], wanted: str) -> None:
    """Raise InputError for parameters, and values on meta, that no layer would bring along."""
    within = _modules(layers)
    used = _parameters(within)
    unused = [name for name, parameter in module.named_parameters() if parameter not in used]
    if unused:
        raise InputError(
            f"{wanted}: {first_few(unused)}: a parameter is in none of the modules that layers() "
            "gives, so no stage would have it; move it into one of them"
        )
    around = [
        child
        for child in set(module.modules()) - within
        if reset_of(child) and any(parameter.is_meta for parameter in child.parameters())
    ]
    if around:
        names = first_few(sorted(_name(module, child) for child in around))
        raise InputError(
            f"{wanted}: on meta, and the reset_parameters() of {names} is for several layers: "
            "give each layer its own"
        )


def _too_few(layers: int, stages: int, chunks: int) -> str:
    """Say that layers are too few, with the nearest layouts that work.

    These have the same stages, or the same chunks.
    """
    wanted = f"parallel.pipeline = {stages}"
    if chunks > 1:
        wanted += f" with parallel.chunks = {chunks} makes {stages * chunks} parts"
    fixes = []
    if chunks > 1 and stages <= layers:
        fixes.append(f"parallel.chunks = {layers // stages}")
    most = layers // chunks
    if most:
        fixes.append(f"parallel.pipeline = {most}" + (" or fewer" if most > 1 else ""))
    elif layers:
        fixes.append(f"parallel.pipeline = {min(stages, layers)} with parallel.chunks = 1")
    fixes.append(f"at least {stages * chunks} layers")
    return f"{wanted}, but layers() gives {layers}: use {', or '.join(fixes)}"


def _cost(layer: nn.Module) -> int:
    """Return the number of weights that every position is multiplied with.

    Embeddings do not count: a position takes one row of them.
    """
    weights = _parameters(one for one in layer.modules() if not isinstance(one, _LOOKED_UP))
    return sum(parameter.numel() for parameter in weights)


def to_meta(module: nn.Module, elsewhere: Collection[nn.Module]) -> None:
    """Free the memory of tensors that only these modules have; a use of them is an error."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    kept = _parameters(child for child in module.modules() if child not in elsewhere)
    on_meta = {one: _elsewhere(one, names[one]) for one in _parameters(elsewhere) - kept}
    for child in elsewhere:
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter in on_meta:
                setattr(child, name, on_meta[parameter])
        for name, buffer in list(child.named_buffers(recurse=False)):
            setattr(child, name, buffer.to("meta"))


def _elsewhere(parameter: nn.Parameter, name: str) -> ShardedParameter:
    """Return a stand-in on meta for a parameter of another stage."""

    def refuse() -> None:
        raise InputError(
            f"{name} belongs to another stage of the pipeline: a layer, or a loss, that uses it "
            "must hold it (docs/any-model.md)"
        )

    stand_in = ShardedParameter(
        parameter.detach().to("meta"), requires_grad=parameter.requires_grad
    )
    stand_in.released_as = name
    stand_in.fetch = refuse
    return stand_in


class _Call:
    """A layer as a step of a chunk."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer = layer
        self.name = name

    def __call__(self, x: Tensor, batch: MicroBatch) -> Tensor:
        output = self.layer(x)
        if not isinstance(output, Tensor):
            raise InputError(
                f"{self.name} of layers() gives {_described(output)}: in a pipeline a layer gives "
                "one tensor, the input of the next one"
            )
        return output


class _Loss:
    """The module's loss as the last step of the last chunk."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor, batch: MicroBatch) -> Tensor:
        loss = self.module.loss(x, batch.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = type(self.module).__name__
            raise InputError(
                f"loss(output, targets) of {kind} gives {_described(loss)}: "
                "it is the sum over all targets, one number"
            )
        return loss


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _name(module: nn.Module, wanted: nn.Module) -> str:
    name = next(name for name, child in module.named_modules() if child is wanted)
    return f"{name} ({type(wanted).__name__})" if name else type(wanted).__name__
