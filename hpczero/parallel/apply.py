"""The one place that puts the parts together: model, grid and engine of a job."""

from collections import Counter

from torch import nn

from hpczero.comm.grid import Grid
from hpczero.comm.group import Group
from hpczero.comm.node import NodeGroup
from hpczero.comm.world import World
from hpczero.model import build, shapes
from hpczero.parallel import foreign
from hpczero.parallel.axis import DataAxis, Messages
from hpczero.parallel.plan import PLANS, apply_plan
from hpczero.parallel.sequence import residual_of
from hpczero.parallel.states import shares_nodes
from hpczero.parallel.values import OwnValues
from hpczero.parallel.zero import DTYPES, Engine, Settings
from hpczero.spec.schema import Spec


def assemble(spec: Spec, world: World, grid: Grid, accumulates: bool, threads: int = 1) -> Engine:
    """The model of the spec on this rank, with its initial values, and the engine that trains it."""
    if not shapes.known(spec.model):
        return adopt(world.together(lambda: build.from_factory(spec.model, spec.seed)), spec, world, grid, accumulates, threads)
    module = build.on_meta(spec.model)
    layers = list(zip(module.layers(), shapes.layers(spec.model), strict=True))
    tensor = world.group("tensor", grid.ranks(world.rank, "tensor")) if grid.size("tensor") > 1 else None
    if tensor:
        apply_plan(layers, PLANS[spec.model.family], residual_of(tensor, spec.parallel.sequence_parallel, spec.model.seq_len))
    axis, settings = data_axis(spec, world, _group(world, grid)), settings_of(spec, accumulates, threads, in_layers=True)
    return Engine(module, layers, axis, settings, tensor=tensor)


def adopt(module: nn.Module, spec: Spec, world: World, grid: Grid, accumulates: bool, threads: int = 1) -> Engine:
    """The engine that trains a module which hpczero has not written; on every rank the same but for its values, which become rank 0's."""
    layers = world.together(lambda: foreign.layers_of(module))
    group = _group(world, grid)
    values = OwnValues(module, spec.seed, group)
    engine = Engine(module, layers, data_axis(spec, world, group), settings_of(spec, accumulates, threads), values)
    values.share_rest({parameter.name for _, layer in layers for parameter in layer.parameters}, DTYPES[spec.train.precision])
    return engine


def settings_of(spec: Spec, accumulates: bool, threads: int, in_layers: bool = False) -> Settings:
    return Settings(spec.train, spec.optimizer, spec.zero, spec.seed, accumulates, threads, in_layers)


def data_axis(spec: Spec, world: World, group: Group) -> DataAxis:
    ranks_on_nodes = Counter(world.node_of_rank[rank] for rank in group.ranks).values()
    return NodeGroup(world, group) if shares_nodes(spec.zero, ranks_on_nodes) else Messages(group)


def _group(world: World, grid: Grid) -> Group:
    return world.group("data", grid.ranks(world.rank, "data"))
