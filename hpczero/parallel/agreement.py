"""Compare the ranks' modules before an engine takes them.

The engine's collectives follow the order of a module's parameters. Ranks whose modules differ would
add up the gradients of different parameters, without any error.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn

from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.text import printable

Entry = list[Any]  # kind, name, facts: of a part of the module, in its order


def refuse_modules_that_differ(module: nn.Module, world: World) -> None:
    """Collective. InputError on all ranks unless all modules are alike but for their values."""
    own = list(_entries(module))
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    digests = world.share(world.collect(digest))
    other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if other is None:
        return
    of_rank_0 = world.share(own)
    message = _difference(of_rank_0, own, other) if world.rank == other else ""
    messages = world.collect(message) or []
    raise InputError(world.share(next(filter(None, messages), "")))


def _entries(module: nn.Module) -> Iterator[Entry]:
    """Yield what must be equal on all ranks.

    The device need not be: a rank's parameters may be on meta.
    """
    first_name: dict[Tensor | nn.Module, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        yield ["module", path or "(itself)", {"class": type(part).__qualname__} | _shared(part, path, first_name)]
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
        way_out += " (Python gives a set another order in every process: sort what you take from one)"
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
