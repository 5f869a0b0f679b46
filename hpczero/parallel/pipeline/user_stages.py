"""What a module that hpczero has not written offers, so that a pipeline can run it:

    layers()                the modules that it consists of, in the order in which they run. The first one is called with the micro-batch's tokens
                            [samples, seq], every other with what the one before it gave: one tensor
    loss(output, targets)   the sum of the losses of the micro-batch's targets [samples, seq], from what the last layer gave

Shapes may change from layer to layer; what goes from one stage to another is of train.precision. Stages cost what their weights multiply.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hpczero.errors import InputError
from hpczero.model.batch import MicroBatch
from hpczero.parallel.pipeline.partition import layers_of, parts
from hpczero.parallel.step import Call
from hpczero.parallel.user_module import refuse_changed_in_forward, trained_parameters
from hpczero.parallel.zero.parameters import ShardedParameter
from hpczero.parallel.zero.state_dict import reset_of
from hpczero.spec.schema import Parallel
from hpczero.text import first_few

_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Stage:
    """What one of the stages has of the module; `tied` names the parameters that other stages have too, each with all stages that do."""

    chunks: list[list[nn.Module]]
    calls: list[list[Call]]
    elsewhere: set[nn.Module]  # modules that other stages have, and this one has not
    tied: dict[str, tuple[int, ...]]


def stage_of(module: nn.Module, parallel: Parallel, stage: int) -> Stage:
    """InputError, on every stage alike, where the module cannot be cut so."""
    refuse_changed_in_forward(module)
    layers = _offered(module, f"parallel.pipeline = {parallel.pipeline}")
    stages = parallel.pipeline
    if stages * parallel.chunks > len(layers):
        raise InputError(_too_few(len(layers), stages, parallel.chunks))
    cuts = parts([_cost(layer) for layer in layers], stages, parallel.chunks)
    held = [
        [[layers[index] for index in part] for part in layers_of(cuts, stages, number)]
        for number in range(stages)
    ]
    names = {own: name for name, own in trained_parameters(module).items()}
    of_stages = [
        {
            names[own]
            for chunk in chunks
            for layer in chunk
            for own in layer.parameters()
            if own in names
        }
        for chunks in held
    ]
    if not all(of_stages):
        number = next(number for number, own in enumerate(of_stages) if not own)
        shown = ", ".join(type(layer).__name__ for chunk in held[number] for layer in chunk)
        raise InputError(
            f"stage {number} of {stages} would have no parameters ({shown}): put such layers together with others, or use fewer stages"
        )
    holders = {
        name: tuple(number for number, own in enumerate(of_stages) if name in own)
        for name in names.values()
    }
    tied = {name: numbers for name, numbers in holders.items() if len(numbers) > 1}
    inside = [
        {part for chunk in chunks for layer in chunk for part in layer.modules()} for chunks in held
    ]
    calls: list[list[Call]] = [
        [_Call(layer, _name(module, layer)) for layer in chunk] for chunk in held[stage]
    ]
    if stage + 1 == stages:
        calls[-1].append(_Loss(module))
    return Stage(held[stage], calls, set().union(*inside) - inside[stage], tied)


def _offered(module: nn.Module, wanted: str) -> list[nn.Module]:
    kind = type(module).__name__
    missing = [
        what
        for what in ("layers()", "loss(output, targets)")
        if not callable(getattr(module, what.partition("(")[0], None))
    ]
    if missing:
        needs = "layers(), the list of its modules in the order in which they run, and loss(output, targets), the summed loss"
        raise InputError(
            f"{wanted}: {kind} has no {' and no '.join(missing)}; a module that is cut into stages offers {needs} (docs/any-model.md)"
        )
    offers: Any = module
    if isinstance(offers.layers, nn.Module):
        raise InputError(
            f"{wanted}: layers of {kind} is a {type(offers.layers).__name__}: it must be a method; give what is there another name"
        )
    layers = list(offers.layers())
    inside = set(module.modules())
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module) or layer not in inside:
            raise InputError(
                f"{wanted}: number {number} of the layers() of {kind} is {_described(layer)}, and none of the module's own modules"
            )
    used = {own for layer in layers for own in layer.parameters()}
    rest = [name for name, own in module.named_parameters() if own not in used]
    if rest:
        nowhere = (
            "a parameter is in none of the modules that layers() gives, so no stage would have it"
        )
        raise InputError(f"{wanted}: {first_few(rest)}: {nowhere}; move it into one of them")
    within = {part for layer in layers for part in layer.modules()}
    around = [
        part
        for part in inside - within
        if reset_of(part) and any(own.is_meta for own in part.parameters())
    ]
    if around:
        names = first_few(sorted(_name(module, part) for part in around))
        raise InputError(
            f"{wanted}: on meta, and the reset_parameters() of {names} is for several layers: give each layer its own"
        )
    return layers


def _too_few(layers: int, stages: int, chunks: int) -> str:
    """With the nearest layouts that work: the same stages, the same chunks."""
    wanted = f"parallel.pipeline = {stages}" + (
        f" with parallel.chunks = {chunks} makes {stages * chunks} parts" if chunks > 1 else ""
    )
    ways_out = [f"parallel.chunks = {layers // stages}"] if chunks > 1 and stages <= layers else []
    if layers >= chunks:
        ways_out.append(
            f"parallel.pipeline = {layers // chunks}"
            + (" or fewer" if layers // chunks > 1 else "")
        )
    elif layers:
        ways_out.append(f"parallel.pipeline = {min(stages, layers)} with parallel.chunks = 1")
    return f"{wanted}, but layers() gives {layers}: use {', or '.join([*ways_out, f'at least {stages * chunks} layers'])}"


def _cost(layer: nn.Module) -> int:
    """The numbers that every position is multiplied with: all weights but those of tables, of which it takes a row."""
    weights = {
        own
        for part in layer.modules()
        if not isinstance(part, _LOOKED_UP)
        for own in part.parameters(recurse=False)
    }
    return sum(own.numel() for own in weights)


def to_meta(module: nn.Module, elsewhere: Collection[nn.Module]) -> None:
    """What only these modules have takes no memory any more, and is of no use here."""
    names = {own: name for name, own in module.named_parameters()}
    kept = {
        own
        for part in module.modules()
        if part not in elsewhere
        for own in part.parameters(recurse=False)
    }
    gone = {own for part in elsewhere for own in part.parameters(recurse=False)} - kept
    on_meta = {own: _elsewhere(own, names[own]) for own in gone}
    for part in elsewhere:
        for name, own in list(part.named_parameters(recurse=False)):
            if own in on_meta:
                setattr(part, name, on_meta[own])
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to("meta"))


def _elsewhere(own: nn.Parameter, name: str) -> ShardedParameter:
    def refuse() -> None:
        raise InputError(
            f"{name} belongs to another stage of the pipeline: a layer, or a loss, that uses it must hold it (docs/any-model.md)"
        )

    away = ShardedParameter(own.detach().to("meta"), requires_grad=own.requires_grad)
    away.released_as, away.fetch = name, refuse
    return away


class _Call:
    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer, self.name = layer, name

    def __call__(self, x: Tensor, batch: MicroBatch) -> Tensor:
        out = self.layer(x)
        if not isinstance(out, Tensor):
            raise InputError(
                f"{self.name} of layers() gives {_described(out)}: in a pipeline a layer gives one tensor, which the next one gets"
            )
        return out


class _Loss:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor, batch: MicroBatch) -> Tensor:
        loss = self.module.loss(x, batch.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = (
                f"loss(output, targets) of {type(self.module).__name__} gives {_described(loss)}"
            )
            raise InputError(f"{given}: it is the sum over all targets, one number")
        return loss


def _described(value: object) -> str:
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )


def _name(module: nn.Module, part: nn.Module) -> str:
    name = next(name for name, own in module.named_modules() if own is part)
    return f"{name} ({type(part).__name__})" if name else type(part).__name__
