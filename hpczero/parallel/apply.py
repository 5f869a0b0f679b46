"""The one place that puts the parts together: model, grid and engine of a job."""

from collections import Counter

from hpczero.comm.grid import Grid
from hpczero.comm.group import Group
from hpczero.comm.node import NodeGroup
from hpczero.comm.world import World
from hpczero.model import build, shapes
from hpczero.parallel.axis import DataAxis, Messages
from hpczero.parallel.states import shares_nodes
from hpczero.parallel.zero import Engine, Settings
from hpczero.spec.schema import Spec


def assemble(spec: Spec, world: World, grid: Grid, accumulates: bool, threads: int = 1) -> Engine:
    """The model of the spec on this rank, with its initial values, and the engine that trains it."""
    module = build.on_meta(spec.model)
    settings = Settings(spec.train, spec.optimizer, spec.zero, spec.seed, accumulates, threads)
    group = world.group("data", grid.ranks(world.rank, "data"))
    layers = list(zip(module.layers(), shapes.layers(spec.model), strict=True))
    return Engine(module, layers, data_axis(spec, world, group), settings)


def data_axis(spec: Spec, world: World, group: Group) -> DataAxis:
    ranks_on_nodes = Counter(world.node_of_rank[rank] for rank in group.ranks).values()
    return NodeGroup(world, group) if shares_nodes(spec.zero, ranks_on_nodes) else Messages(group)
