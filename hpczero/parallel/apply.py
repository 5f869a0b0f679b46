"""The one place that puts the parts together: model, grid and engine of a job."""

from collections import Counter
from collections.abc import Sequence

from torch import nn

from hpczero.comm.grid import Grid
from hpczero.comm.group import Group
from hpczero.comm.node import NodeGroup
from hpczero.comm.world import World
from hpczero.model import build, shapes
from hpczero.parallel import foreign
from hpczero.parallel.axis import DataAxis, Messages
from hpczero.parallel.held import Tied, chunks_of_stages, handed_on
from hpczero.parallel.pipeline import Pipeline
from hpczero.parallel.plan import PLANS, apply_plan
from hpczero.parallel.running import Alone, Staged, Way
from hpczero.parallel.sequence import residual_of
from hpczero.parallel.states import shares_nodes
from hpczero.parallel.unit import Unit
from hpczero.parallel.values import OwnValues
from hpczero.parallel.zero import DTYPES, Engine, Settings
from hpczero.spec.schema import Spec


def assemble(spec: Spec, world: World, grid: Grid, accumulates: bool, threads: int = 1) -> Way:
    """The model of the spec on this rank, with its initial values, the engine that trains it, and how they run."""
    if not shapes.known(spec.model):
        return Alone(adopt(world.together(lambda: build.from_factory(spec.model, spec.seed)), spec, world, grid, accumulates, threads))
    module = build.on_meta(spec.model)
    layers = list(zip(module.layers(), shapes.layers(spec.model), strict=True))
    tensor, pipeline = (world.group(axis, grid.ranks(world.rank, axis)) if grid.size(axis) > 1 else None for axis in ("tensor", "pipeline"))
    if tensor:
        apply_plan(layers, PLANS[spec.model.family], residual_of(tensor, spec.parallel.sequence_parallel, spec.model.seq_len))
    axis, settings = data_axis(spec, world, _group(world, grid)), settings_of(spec, accumulates, threads, in_layers=True)
    if pipeline is None:
        return Alone(Engine(module, layers, axis, settings, tensor=tensor))
    described = [layer for _, layer in layers]
    modules = {layer.name: part for part, layer in layers}
    held = chunks_of_stages(spec, described)[pipeline.rank]
    chunks = [[(nn.Module() if isinstance(layer, Tied) else modules[layer.name], layer) for layer in chunk] for chunk in held]
    engine = Engine(module, [part for chunk in chunks for part in chunk], axis, settings, None, tensor, pipeline)
    engine.reduction.names_backwards = [parameter.name for layer in described for parameter in layer.parameters][::-1]
    _tie(engine, engine.units_named({layer.name for chunk in held for layer in chunk if isinstance(layer, Tied)}), world, pipeline)
    shape = handed_on(spec, tensor.rank if tensor else 0)
    kind = spec.parallel.schedule if spec.parallel.chunks > 1 or spec.parallel.schedule != "interleaved" else "1f1b"
    stages = Pipeline(pipeline, kind, len(chunks), lambda batch: (len(batch.samples), *shape), DTYPES[spec.train.precision])
    return Staged(engine, stages, chunks)


def _tie(engine: Engine, tied: Sequence[Unit], world: World, pipeline: Group) -> None:
    """Parameters of the first stage that the last one works with too: both have them, and add up their gradients."""
    for unit in tied:
        engine.reduction.tied[unit] = world.group("pipeline", (pipeline.ranks[0], pipeline.ranks[-1]))
        if pipeline.rank:
            engine.copies.add(unit)


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
    if shares_nodes(spec.zero, ranks_on_nodes):
        return NodeGroup(world, group)
    return Messages(group, world.group("data", group.ranks, "gathers"))


def _group(world: World, grid: Grid) -> Group:
    return world.group("data", grid.ranks(world.rank, "data"))
