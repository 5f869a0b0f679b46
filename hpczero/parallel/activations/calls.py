"""A chunk's layers as functions, which keep for backward what the spec says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hpczero.comm.group import Group
from hpczero.model.shapes import role_of
from hpczero.parallel.activations import choice
from hpczero.parallel.activations.away import Away, Bundles, HostCopies, Shards, Way, kept_by
from hpczero.parallel.activations.recipes import Recipes
from hpczero.parallel.activations.recompute import AsTheyAre, Call, Keeper, recomputed
from hpczero.parallel.pipeline.partition import Tied
from hpczero.parallel.user_module import Layers
from hpczero.parallel.zero.buffers import Stock
from hpczero.parallel.zero.engine import Engine
from hpczero.spec.schema import Spec


def use_recipes(module: nn.Module, cheap: Mapping[str, str], recipes: Recipes) -> None:
    """Let the cheap operations of the model's modules leave recipes."""
    for name, part in module.named_modules():
        operation = role_of(cheap, name)
        if operation and not isinstance(part, nn.Identity):  # a norm that this model lacks
            setattr(part, operation, recipes.cheap(getattr(part, operation)))


@dataclass(frozen=True)
class Ways:
    """The ways in which blocks keep what they keep for backward; None: where it is.

    `inputs`: of blocks that are computed again; `rest`: all else.
    """

    inner: Keeper
    inputs: Way | None
    rest: Way | None

    @classmethod
    def of(cls, spec: Spec, engine: Engine, tensor: Group | None) -> "Ways":
        host = None
        if spec.memory.offload_activations == "cpu" and engine.device.has_queues:
            buffers = [buffer for buffer in engine.module.buffers() if buffer.numel()]
            host = HostCopies(engine.device, [*(unit.weights for unit in engine.units), *buffers])
            engine.stocks["activations on the host"] = host.pinned
        shards = None
        if tensor and choice.partitions(spec):
            memory = partial(torch.empty, dtype=torch.uint8, device=engine.device.torch)
            engine.stocks["activations"] = Stock(memory)
            shards = Shards(tensor, engine.stocks["activations"], host)
        return cls(engine.gatherer or AsTheyAre(), shards or host, host)


def calls_of(spec: Spec, chunk: Layers, recipes: Recipes, ways: Ways) -> list[Call]:
    """Return the layers of a chunk as functions, which keep what the spec says for backward."""
    bundles = Bundles()
    inputs, rest = (
        Away(bundles, way, ways.inner) if way else ways.inner for way in (ways.inputs, ways.rest)
    )
    how: dict[str, Callable[[Call], Call]] = {
        "none": (lambda layer: kept_by(rest, layer)) if ways.rest else lambda layer: layer,
        "selective": lambda layer: recipes.used_in(layer, rest),
        "block": lambda layer: recomputed(layer, inputs),
    }
    calls: list[Call] = []
    is_first = True  # of the chunk's blocks
    for module, layer in chunk:
        if isinstance(layer, Tied):
            continue
        call: Call = module
        if layer.is_block:
            call = how[choice.recomputed(spec.memory, layer)](module)
            call = bundles.begun_by(call, is_first) if ways.inputs else call
            is_first = False
        calls.append(call)
    return calls
