"""The layers of a module that hpczero has not written: found in its structure, the same on every rank.

A module is cut where it is large and made of other modules: the parts of the model that are run one after the other. What a module holds
beside its parts (a class token, parameters of a ParameterList) is a layer of its own, in use as long as the module runs; neighbours that are
too small for messages of their own go together.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn

from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.zero.gather import used_around_others
from hpczero.parallel.zero.state_dict import reset_of
from hpczero.parallel.zero.unit import taken
from hpczero.text import printable

_SMALL = 1 << 16  # elements: less is not worth a message
_SHARE = 16  # but a layer is this part of a small model, at most
_LARGE = 8  # parts of the model: what is smaller than one stays whole
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (*_NOT_CALLED, nn.Sequential)
_CUT_IN_TORCH = (*_CONTAINERS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)

Part = tuple[nn.Module, Layer]  # a layer of the model, and what it consists of
Layers = list[Part]


@dataclass(frozen=True)
class Cut:
    """`names` are the parameters that must be there while `module` runs; `open`: other cuts run inside."""

    module: nn.Module
    name: str
    names: tuple[str, ...]
    open: bool


def layers_of(module: nn.Module) -> Layers:
    """For the engine: every floating-point parameter is in one layer. Others stay with the module as they are."""
    refuse_changed_in_forward(module)
    parameters = trained(module)
    if not parameters:
        raise InputError(
            f"{type(module).__name__} has no parameters of a floating-point type: there is nothing to train"
        )
    (found,) = _layers(parameters, [_Structure(module, parameters).cuts({"": module})])
    around = used_around_others(found)
    return [(part, replace(layer, around=layer.name in around)) for part, layer in found]


def layers_of_chunks(module: nn.Module, chunks: Sequence[Sequence[nn.Module]]) -> list[Layers]:
    """The same of the modules that a pipeline stage has of it, and runs one after the other; a parameter is in the first chunk that uses it."""
    here = {own for chunk in chunks for part in chunk for own in part.parameters()}
    parameters = {name: own for name, own in trained(module).items() if own in here}
    names = {part: name for name, part in module.named_modules()}
    cuts = [
        _Structure(None, parameters).cuts({names[part]: part for part in chunk}) for chunk in chunks
    ]
    return _layers(parameters, cuts)


def refuse_changed_in_forward(module: nn.Module) -> None:
    """What a forward changes in a weight, each rank by the samples that it sees, the master weights would never know."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            what = f"{name or type(part).__name__} has max_norm = {part.max_norm:g}, and changes its weight in every forward, on each rank as its own"
            raise InputError(
                f"{what} samples ask for: set max_norm to None; scale what is looked up instead"
            )


def refuse_compiled(module: nn.Module) -> None:
    """Where parameters come and go between layers, which a compiler does not see."""
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or hasattr(part, "_orig_mod"):
            way_out = "leave it as it is there, or take zero.stage = 2 (or zero.node_shared = true, with all ranks on one node)"
            what = f"{name or type(part).__name__} is compiled, and zero.stage = 3 gathers parameters layer by layer, as Python runs"
            raise InputError(f"{what}: {way_out}")


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an engine takes."""
    return {name: own for name, own in module.named_parameters() if _is_ours(name, own)}


def _layers(
    parameters: Mapping[str, nn.Parameter], chunks: Iterable[Iterable[Cut]]
) -> list[Layers]:
    sizes = {name: own.numel() for name, own in parameters.items()}
    found: list[Layers] = []
    taken: set[str] = set()
    for cuts in chunks:
        found.append([])
        for group in _together(cuts, sizes):
            own = [
                name
                for name in dict.fromkeys(name for cut in group for name in cut.names)
                if name not in taken
            ]
            taken |= set(own)
            held = tuple(Parameter(name, tuple(parameters[name].shape), ZEROS) for name in own)
            for number, cut in enumerate(group):
                layer = Layer(cut.name or "the model", held if number == 0 else ())
                uses = tuple(name for name in cut.names if name not in own or number)
                found[-1].append((cut.module, replace(layer, uses=uses)))
    assert taken == set(parameters), set(parameters) - taken
    return found


class _Structure:
    def __init__(self, module: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        """`module` is cut however small it is."""
        self.module = module
        self.names = {own: name for name, own in parameters.items()}
        self.sizes = {name: own.numel() for name, own in parameters.items()}
        self.total = sum(self.sizes.values())
        self._seen: set[nn.Module] = set()

    def cuts(self, parts: Mapping[str, nn.Module]) -> Iterator[Cut]:
        for name, part in parts.items():
            yield from self._cuts(part, name)

    def _cuts(self, module: nn.Module, name: str) -> Iterator[Cut]:
        """A module that is called takes on what its parts cannot: parameters of containers that are never called."""
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
        if type(module).__module__.startswith("torch.nn.") and not isinstance(
            module, _CUT_IN_TORCH
        ):
            return False  # it may use the weights of its parts without calling them
        size = self._size(module)
        containers = {
            own
            for inner in module.modules()
            if isinstance(inner, _CONTAINERS)
            for own in inner.parameters()
        }
        in_containers = sum(self.sizes[inner] for inner in self._names_in(containers))
        wanted = (
            module is self.module
            or 2 * size > self.total
            or (_LARGE * size > self.total and 2 * in_containers > size)
        )
        if wanted and reset_of(module) and any(own.is_meta for own in module.parameters()):
            warnings.warn(
                f"{name or type(module).__name__} is one layer for hpczero: its reset_parameters is for all that it holds",
                stacklevel=2,
            )
            return False
        return wanted

    def _size(self, module: nn.Module) -> int:
        return sum(self.sizes[name] for name in self._names_in(module.parameters()))

    def _names_in(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        found = {self.names[own] for own in parameters if own in self.names}
        return [name for name in self.sizes if name in found]


def _called_children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for own_name, child in module.named_children():
        child_name = f"{name}.{own_name}" if name else own_name
        if isinstance(child, _NOT_CALLED):
            yield from _called_children(child, child_name)
        else:
            yield child_name, child


def _together(cuts: Iterable[Cut], sizes: dict[str, int]) -> list[list[Cut]]:
    """Neighbours, as long as they are small; what others run inside stays alone."""
    small = min(_SMALL, sum(sizes.values()) // _SHARE)
    groups: list[list[Cut]] = []
    room = -1
    for cut in cuts:
        size = sum(sizes[name] for name in cut.names)
        if cut.open or size > room:
            groups.append([])
            room = -1 if cut.open else small
        groups[-1].append(cut)
        room -= size
    return groups


def _is_ours(name: str, parameter: nn.Parameter) -> bool:
    if isinstance(parameter, nn.UninitializedParameter):
        raise InputError(
            f"{name} has no shape yet: run the module once on a batch before hpczero takes it"
        )
    if taken(parameter):
        ways = "close that one first, or give this one a module of its own"
        raise InputError(f"{name} is trained by another engine already: {ways}")
    if parameter.is_inference():
        way = "build the module outside of it"
        raise InputError(f"{name} was made in torch.inference_mode and cannot be trained: {way}")
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        what = "has a hook for p.grad, which hpczero's gradients do not pass"
        raise InputError(f"{name} {what}: give it one for its gradient (register_hook)")
    if parameter.requires_grad and not parameter.is_floating_point():
        raise InputError(
            f"{name} is {parameter.dtype}: hpczero trains real floating-point parameters"
        )
    return parameter.is_floating_point()


# Compare the ranks' modules before an engine takes them.
#
# The engine's collectives follow the order of a module's parameters. Ranks whose modules differ would
# add up the gradients of different parameters, without any error.
Entry = list[Any]  # kind, name, facts: of a part of the module, in its order


def refuse_modules_that_differ(module: nn.Module, world: World) -> None:
    """Collective. InputError on all ranks unless all modules are alike but for their values."""
    own = list(_entries(module))
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    digests = world.broadcast_object(world.gather_objects(digest))
    other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if other is None:
        return
    of_rank_0 = world.broadcast_object(own)
    message = _difference(of_rank_0, own, other) if world.rank == other else ""
    messages = world.gather_objects(message) or []
    raise InputError(world.broadcast_object(next(filter(None, messages), "")))


def _entries(module: nn.Module) -> Iterator[Entry]:
    """Yield what must be equal on all ranks.

    The device need not be: a rank's parameters may be on meta.
    """
    first_name: dict[Tensor | nn.Module, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        yield [
            "module",
            path or "(itself)",
            {"class": type(part).__qualname__} | _shared(part, path, first_name),
        ]
        for kind, tensors in (("parameter", part._parameters), ("buffer", part._buffers)):
            for own_name, tensor in tensors.items():
                name = f"{path}.{own_name}" if path else own_name
                yield [kind, name, _facts(tensor) | _shared(tensor, name, first_name)]


def _facts(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {"value": "None"}
    shape = "unknown" if isinstance(tensor, nn.UninitializedParameter) else list(tensor.shape)
    return {"shape": shape, "dtype": str(tensor.dtype), "requires_grad": tensor.requires_grad}


def _shared(
    what: Tensor | nn.Module | None, name: str, first_name: dict[Tensor | nn.Module, str]
) -> dict[str, str]:
    """Name the earlier place of what the module has in several places."""
    first = name if what is None else first_name.setdefault(what, name)
    return {} if first == name else {"the same as": first}


def _difference(of_rank_0: Sequence[Entry], own: Sequence[Entry], rank: int) -> str:
    """Describe the first entry of this rank that rank 0 has not at the same place."""
    pairs = zip_longest(of_rank_0, own)
    theirs, ours = next((left, right) for left, right in pairs if left != right)
    if theirs and ours and theirs[:2] == ours[:2]:
        what = f"{' '.join(ours[:2])} has {_other_facts(theirs[2], ours[2], rank)}"
    else:
        what = f"rank 0 has {_shown(theirs)} where rank {rank} has {_shown(ours)}"
    way_out = "every rank must build the same module, but for its values"
    if ours and theirs and _names(of_rank_0) == _names(own):
        way_out += (
            " (Python gives a set another order in every process: sort what you take from one)"
        )
    return f"the ranks' modules differ: {printable(what)}; {way_out}"


def _names(entries: Sequence[Entry]) -> set[tuple[str, str]]:
    return {(kind, name) for kind, name, _ in entries}


def _other_facts(theirs: Mapping[str, Any], ours: Mapping[str, Any], rank: int) -> str:
    keys = [key for key in dict.fromkeys(chain(theirs, ours)) if theirs.get(key) != ours.get(key)]
    return ", ".join(
        f"{key} = {theirs.get(key, 'nothing')} on rank 0 and {ours.get(key, 'nothing')} on rank {rank}"
        for key in keys
    )


def _shown(entry: Entry | None) -> str:
    return f"{entry[0]} {entry[1]}" if entry else "nothing more"
