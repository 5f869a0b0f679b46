"""Layers of a module that hpczero has not written: found in its structure, alike on every rank.

A module is cut where it is large and made of other modules: the parts of the model that run one
after the other. Parameters that a module holds beside its parts (a class token, a ParameterList)
are a layer of their own, in use as long as the module runs. Neighbours that are too small for
messages of their own go together.

The engine's collectives follow the order of a module's parameters. Ranks whose modules differ would
add up the gradients of different parameters, without any error: `refuse_modules_that_differ`.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.zero.gather import used_around_others
from hpczero.parallel.zero.state_dict import reset_of
from hpczero.parallel.zero.unit import taken
from hpczero.text import printable

_SMALL = 1 << 16  # elements: less is not worth a message
_SHARE = 16  # a group of small layers has at most 1/16 of the model
_LARGE = 8  # a module with less than 1/8 of the model is not cut
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (*_NOT_CALLED, nn.Sequential)
_OF_OTHERS = {"DTensor", "FlatParameter", "FullyShardedDataParallel"}
_CUT_IN_TORCH = (*_CONTAINERS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)

HeldLayer = tuple[nn.Module, Layer]  # a module, and the parameters that it holds and uses
Layers = list[HeldLayer]
Entry = list[Any]  # kind, name, facts: of a part of the module, in its order


@dataclass(frozen=True)
class Cut:
    """A module that becomes a layer."""

    module: nn.Module
    name: str
    names: tuple[str, ...]  # parameters that must be there while the module runs
    encloses_others: bool  # other cuts run inside


def layers_of(module: nn.Module) -> Layers:
    """Return the layers of a module, for the engine.

    Every floating-point parameter is in one layer. Others stay with the module as they are.
    """
    refuse_unfit(module)
    parameters = trained_parameters(module)
    if not parameters:
        raise InputError(
            f"{type(module).__name__} has no parameters of a floating-point type: there is nothing"
            " to train"
        )
    (layers,) = _layers(parameters, [_Structure(module, parameters).cuts({"": module})])
    around = used_around_others(layers)
    return [(part, replace(layer, around=layer.name in around)) for part, layer in layers]


def layers_of_chunks(module: nn.Module, chunks: Sequence[Sequence[nn.Module]]) -> list[Layers]:
    """Return the layers of the chunks that a pipeline stage has of a module.

    The modules of a chunk run one after the other. A parameter is in the first chunk that uses it.
    """
    held = {parameter for chunk in chunks for part in chunk for parameter in part.parameters()}
    named = trained_parameters(module).items()
    parameters = {name: parameter for name, parameter in named if parameter in held}
    names = {part: name for name, part in module.named_modules()}
    cuts = [
        _Structure(None, parameters).cuts({names[part]: part for part in chunk}) for chunk in chunks
    ]
    return _layers(parameters, cuts)


def refuse_unfit(module: nn.Module) -> None:
    """Raise InputError for modules that an engine would train wrongly, or not at all."""
    for name, part in module.named_modules():
        if problem := _problem(part):
            raise InputError(f"{name or type(part).__name__} {problem}")


def _problem(part: nn.Module) -> str:
    """Return why an engine cannot have this part of a module; "" if it can."""
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        return (
            f"has max_norm = {part.max_norm:g}, and changes its weight in every forward, on each"
            " rank as its own samples ask for: set max_norm to None; scale what is looked up"
            " instead"
        )
    if isinstance(part, torch.jit.ScriptModule):
        return (
            "is a module of TorchScript, which takes no hooks: hand over the module of which it was"
            " made"
        )
    if isinstance(part, nn.parallel.DistributedDataParallel):
        return (
            "is a DistributedDataParallel, which sums gradients itself: hand over what it wraps"
            " (.module)"
        )
    buffers = part._buffers.items()
    if name := next((name for name, own in buffers if own is not None and _is_odd(own)), ""):
        return (
            f"has the buffer {name}, which is sparse or quantized and cannot be sent or saved: hand"
            " it to the forward, or keep its indices and values as two buffers"
        )
    foreign = [type(own).__name__ for own in part.parameters(recurse=False)]
    other = next((kind for kind in foreign if kind in _OF_OTHERS), "")
    if other or type(part).__name__ in _OF_OTHERS:
        return (
            f"is cut into parts by PyTorch's own sharding ({other or type(part).__name__}): hand"
            " over the module as it is without that"
        )
    return ""


def _is_odd(buffer: Tensor) -> bool:
    return buffer.layout != torch.strided or buffer.is_quantized


def refuse_compiled(module: nn.Module, why: str) -> None:
    """Raise InputError for compiled modules, with the reason."""
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or hasattr(part, "_orig_mod"):
            raise InputError(f"{name or type(part).__name__} is compiled, and {why}")


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an engine takes, by name."""
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if _is_trained(name, parameter)}


def _layers(
    parameters: Mapping[str, nn.Parameter], chunks: Iterable[Iterable[Cut]]
) -> list[Layers]:
    """Return the layers of each chunk; the first module of a group holds its parameters."""
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    layers: list[Layers] = []
    assigned: set[str] = set()
    for cuts in chunks:
        layers.append([])
        for group in _grouped(cuts, sizes):
            used = dict.fromkeys(name for cut in group for name in cut.names)
            new = [name for name in used if name not in assigned]
            assigned.update(new)
            held = tuple(Parameter(name, tuple(parameters[name].shape), ZEROS) for name in new)
            for number, cut in enumerate(group):
                layer = Layer(cut.name or "the model", held if number == 0 else ())
                uses = tuple(name for name in cut.names if name not in new or number)
                layers[-1].append((cut.module, replace(layer, uses=uses)))
    assert assigned == set(parameters), set(parameters) - assigned
    return layers


class _Structure:
    def __init__(self, module: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        """`module` is cut however small it is."""
        self.module = module
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self.total = sum(self.sizes.values())
        self._seen: set[nn.Module] = set()

    def cuts(self, parts: Mapping[str, nn.Module]) -> Iterator[Cut]:
        for name, part in parts.items():
            yield from self._cuts(part, name)

    def _cuts(self, module: nn.Module, name: str) -> Iterator[Cut]:
        """Yield the module as one cut, or those inside it.

        A module that is called takes on the parameters of containers in it, which never are.
        """
        if module in self._seen or not self._size(module):
            return
        self._seen.add(module)
        if not self._is_cut(module, name):
            yield Cut(module, name, tuple(self._names_in(module.parameters())), False)
            return
        beside = list(self._beside(module))
        if beside:
            yield Cut(module, name, tuple(self._names_in(beside)), True)
        for child_name, child in _called_children(module, name):
            yield from self._cuts(child, child_name)

    def _beside(self, module: nn.Module) -> Iterator[nn.Parameter]:
        yield from module.parameters(recurse=False)
        for child in module.children():
            if isinstance(child, _NOT_CALLED):
                yield from self._beside(child)

    def _is_cut(self, module: nn.Module, name: str) -> bool:
        if not any(self._size(child) for child in module.children()):
            return False
        from_torch = type(module).__module__.startswith("torch.nn.")
        if from_torch and not isinstance(module, _CUT_IN_TORCH):
            return False  # it may use the weights of its parts without calling them
        size = self._size(module)
        if (
            module is not self.module
            and 2 * size <= self.total
            and (_LARGE * size <= self.total or 2 * self._size_in_containers(module) <= size)
        ):
            return False
        if reset_of(module) and any(parameter.is_meta for parameter in module.parameters()):
            warnings.warn(
                f"{name or type(module).__name__} is one layer for hpczero: its reset_parameters"
                " is for all that it holds",
                stacklevel=2,
            )
            return False
        return True

    def _size(self, module: nn.Module) -> int:
        return sum(self.sizes[name] for name in self._names_in(module.parameters()))

    def _size_in_containers(self, module: nn.Module) -> int:
        containers = [inner for inner in module.modules() if isinstance(inner, _CONTAINERS)]
        inside = chain.from_iterable(container.parameters() for container in containers)
        return sum(self.sizes[name] for name in self._names_in(inside))

    def _names_in(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        names = {self.names[parameter] for parameter in parameters if parameter in self.names}
        return [name for name in self.sizes if name in names]


def _called_children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, _NOT_CALLED):
            yield from _called_children(child, path)
        else:
            yield path, child


def _grouped(cuts: Iterable[Cut], sizes: dict[str, int]) -> list[list[Cut]]:
    """Group neighbours, as long as they are small; a cut with others inside stays alone."""
    small = min(_SMALL, sum(sizes.values()) // _SHARE)
    groups: list[list[Cut]] = []
    room = -1
    for cut in cuts:
        size = sum(sizes[name] for name in cut.names)
        if cut.encloses_others or size > room:
            groups.append([])
            room = -1 if cut.encloses_others else small
        groups[-1].append(cut)
        room -= size
    return groups


def _is_trained(name: str, parameter: nn.Parameter) -> bool:
    """Return True for a floating-point parameter; InputError if an engine cannot take it."""
    if isinstance(parameter, nn.UninitializedParameter):
        raise InputError(
            f"{name} has no shape yet: run the module once on a batch before hpczero takes it"
        )
    if taken(parameter):
        raise InputError(
            f"{name} is trained by another engine already: close that one first, or give this one"
            " a module of its own"
        )
    if parameter.is_inference():
        raise InputError(
            f"{name} was made in torch.inference_mode and cannot be trained: build the module"
            " outside of it"
        )
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise InputError(
            f"{name} has a hook for p.grad, which hpczero's gradients do not pass: give it one for"
            " its gradient (register_hook)"
        )
    if parameter.requires_grad and not parameter.is_floating_point():
        raise InputError(
            f"{name} is {parameter.dtype}: hpczero trains real floating-point parameters"
        )
    return parameter.is_floating_point()


# -- comparison of the ranks' modules


def refuse_modules_that_differ(module: nn.Module, world: World) -> None:
    """Raise InputError on all ranks unless the ranks' modules are alike but for their values.

    Collective.
    """
    entries = list(_entries(module))
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    digests = world.all_gather_objects(digest)
    other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if other is None:
        return
    of_rank_0 = world.broadcast_object(entries)
    message = _difference(of_rank_0, entries, other) if world.rank == other else ""
    messages = world.gather_objects(message) or []
    raise InputError(world.broadcast_object(next(filter(None, messages), "")))


def _entries(module: nn.Module) -> Iterator[Entry]:
    """Yield what must be equal on all ranks; devices need not, as parameters may be on meta."""
    first_name: dict[Tensor | nn.Module, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        facts = {"class": type(part).__qualname__} | _shared(part, path, first_name)
        yield ["module", path or "(itself)", facts]
        for kind, tensors in (("parameter", part._parameters), ("buffer", part._buffers)):
            for tensor_name, tensor in tensors.items():
                name = f"{path}.{tensor_name}" if path else tensor_name
                yield [kind, name, _facts(tensor) | _shared(tensor, name, first_name)]


def _facts(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {"value": "None"}
    shape = "unknown" if isinstance(tensor, nn.UninitializedParameter) else list(tensor.shape)
    return {"shape": shape, "dtype": str(tensor.dtype), "requires_grad": tensor.requires_grad}


def _shared(
    what: Tensor | nn.Module | None, name: str, first_name: dict[Tensor | nn.Module, str]
) -> dict[str, str]:
    """Return the first name of a tensor or module that has several."""
    first = name if what is None else first_name.setdefault(what, name)
    return {} if first == name else {"the same as": first}


def _difference(of_rank_0: Sequence[Entry], entries: Sequence[Entry], rank: int) -> str:
    """Describe the first of this rank's entries that differs from that of rank 0."""
    pairs = zip_longest(of_rank_0, entries)
    theirs, ours = next((left, right) for left, right in pairs if left != right)
    if theirs and ours and theirs[:2] == ours[:2]:
        what = f"{' '.join(ours[:2])} has {_other_facts(theirs[2], ours[2], rank)}"
    else:
        what = f"rank 0 has {_shown(theirs)} where rank {rank} has {_shown(ours)}"
    way_out = "every rank must build the same module, but for its values"
    if ours and theirs and _names(of_rank_0) == _names(entries):
        way_out += (
            " (Python orders a set differently in every process: sort what you take from one)"
        )
    return f"the ranks' modules differ: {printable(what)}; {way_out}"


def _names(entries: Sequence[Entry]) -> set[tuple[str, str]]:
    return {(kind, name) for kind, name, _ in entries}


def _other_facts(theirs: Mapping[str, Any], ours: Mapping[str, Any], rank: int) -> str:
    keys = [key for key in dict.fromkeys(chain(theirs, ours)) if theirs.get(key) != ours.get(key)]
    return ", ".join(
        f"{key} = {theirs.get(key, 'nothing')} on rank 0"
        f" and {ours.get(key, 'nothing')} on rank {rank}"
        for key in keys
    )


def _shown(entry: Entry | None) -> str:
    return f"{entry[0]} {entry[1]}" if entry else "nothing more"
