"""The one place that puts the parts together: model, grid and engine of a job."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn

from hpczero.comm.grid import Grid
from hpczero.comm.group import Group
from hpczero.comm.node_group import NodeGroup
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.model import build, shapes
from hpczero.model.batch import MicroBatch
from hpczero.parallel import user_module
from hpczero.parallel.pipeline import user_stages
from hpczero.parallel.pipeline.executor import Pipeline
from hpczero.parallel.pipeline.partition import Chunks, Tied, apart, chunks_of_stages, handed_on
from hpczero.parallel.states import Sharded, shares_nodes
from hpczero.parallel.step import PipelineStage, SingleStage, StepRunner
from hpczero.parallel.tensor.linear import residual_of
from hpczero.parallel.tensor.plan import PLANS, apply_plan
from hpczero.parallel.values import OwnValues, no_values
from hpczero.parallel.zero.data_axis import DataAxis, Messages
from hpczero.parallel.zero.engine import DTYPES, Engine, EngineSettings
from hpczero.spec.schema import Spec
from hpczero.text import printable


@dataclass(frozen=True)
class UserModel:
    """A module that hpczero has not written, and what this rank's pipeline stage, if there are several, has of it."""

    module: nn.Module
    stage: user_stages.Stage | None


def find(spec: Spec, world: World, grid: Grid) -> UserModel:
    """Collective: what model.family makes. InputError on all ranks where it cannot be trained so."""

    def make() -> UserModel:
        module = build.from_factory(spec.model, spec.seed)
        cut = spec.parallel.pipeline > 1
        return UserModel(
            module,
            user_stages.stage_of(module, spec.parallel, grid.coordinate(world.rank, "pipeline"))
            if cut
            else None,
        )

    found = world.run_on_all(make)
    refuse_modules_that_differ(found.module, world)
    return found


def assemble(
    spec: Spec,
    world: World,
    grid: Grid,
    accumulates: bool,
    threads: int = 1,
    found: UserModel | None = None,
    bare: bool = False,
) -> StepRunner:
    """The model of the spec on this rank, with its initial values, the engine that trains it, and how they run. `found`: if it is known already,
    what model.family has made. `bare`: hpczero's own models without values, to be loaded or made (`Engine.initial_values`).
    """
    if not shapes.known(spec.model):
        found = found or find(spec, world, grid)
        if found.stage is None:
            return SingleStage(build_engine(found.module, spec, world, grid, accumulates, threads))
        return _cut_up(found, spec, world, grid, accumulates, threads)
    module = build.on_meta(spec.model)
    layers = list(zip(module.layers(), shapes.layers(spec.model), strict=True))
    tensor, pipeline = (
        world.group(axis, grid.ranks(world.rank, axis)) if grid.size(axis) > 1 else None
        for axis in ("tensor", "pipeline")
    )
    if tensor:
        apply_plan(
            layers,
            PLANS[spec.model.family],
            residual_of(tensor, spec.parallel.sequence_parallel, spec.model.seq_len),
        )
    axis = data_axis(spec, world, _group(world, grid), grid.nodes_cut_data_alike)
    settings = settings_of(spec, accumulates, threads, own_model=True)
    values = no_values if bare else None
    if pipeline is None:
        return SingleStage(Engine(module, layers, axis, settings, values, tensor))
    described = [layer for _, layer in layers]
    modules = {layer.name: part for part, layer in layers}
    held = chunks_of_stages(spec, described)[pipeline.rank]
    chunks = _with_modules(held, modules)
    engine = Engine(
        module,
        [part for chunk in chunks for part in chunk],
        axis,
        settings,
        values,
        tensor,
        pipeline,
    )
    engine.reduction.names_backwards = [
        parameter.name for layer in described for parameter in layer.parameters
    ][::-1]
    _tie(
        engine,
        _tie_groups(
            dict.fromkeys((layer.name for layer in _tied(held)), (0, pipeline.size - 1)),
            world,
            pipeline,
        ),
    )
    shape = handed_on(spec, tensor.rank if tensor else 0)
    stages = _pipeline(spec, pipeline, lambda batch: (len(batch.samples), *shape))
    return PipelineStage(
        engine,
        stages,
        chunks,
        [[part for part, layer in chunk if not isinstance(layer, Tied)] for chunk in chunks],
    )


def _with_modules(held: Chunks, modules: Mapping[str, nn.Module]) -> list[user_module.Layers]:
    return [
        [
            (nn.Module() if isinstance(layer, Tied) else modules[layer.name], layer)
            for layer in chunk
        ]
        for chunk in held
    ]


def _tied(held: Chunks) -> list[Tied]:
    return [layer for chunk in held for layer in chunk if isinstance(layer, Tied)]


def _pipeline(
    spec: Spec, group: Group, shape_of: Callable[[MicroBatch], Sequence[int]] | None
) -> Pipeline:
    return Pipeline(
        group, spec.parallel.schedule, spec.parallel.chunks, shape_of, DTYPES[spec.train.precision]
    )


def _tie(engine: Engine, ties: Mapping[str, Group]) -> None:
    """Parameters that several stages work with: all of these have them, and add up their gradients."""
    for name, group in ties.items():
        (unit,) = engine.units_named([name])
        engine.reduction.tied[unit] = group
        if group.rank:
            engine.copies.add(unit)


def _tie_groups(
    tied: Mapping[str, Sequence[int]], world: World, pipeline: Group
) -> dict[str, Group]:
    """Of the parameters that several stages have (`tied`: name -> which), those that this stage has; in one order on all stages, as are
    the operations that follow from it.
    """
    here = {
        name: [pipeline.ranks[stage] for stage in stages]
        for name, stages in tied.items()
        if pipeline.rank in stages
    }
    return {name: world.group("pipeline", ranks) for name, ranks in here.items()}


def _cut_up(
    found: UserModel, spec: Spec, world: World, grid: Grid, accumulates: bool, threads: int
) -> StepRunner:
    """One of the stages of a pipeline."""
    module, own = found.module, found.stage
    assert own is not None
    pipeline, group = (
        world.group("pipeline", grid.ranks(world.rank, "pipeline")),
        _group(world, grid),
    )
    names = list(user_module.trained(module))
    layers = user_module.layers_of_chunks(module, own.chunks)
    user_stages.to_meta(module, own.elsewhere)
    modules = {layer.name: part for chunk in layers for part, layer in chunk}
    tied = {
        parameter.name: parameter
        for chunk in layers
        for _, layer in chunk
        for parameter in layer.parameters
        if parameter.name in own.tied
    }
    chunks = _with_modules(
        apart([[layer for _, layer in chunk] for chunk in layers], tied), modules
    )
    ties = _tie_groups(own.tied, world, pipeline)
    axis = _axis_of_foreign(module, spec, world, group)
    values = OwnValues(module, spec.seed, group, own.elsewhere, ties)
    settings = settings_of(spec, accumulates, threads)
    engine = Engine(
        module, [part for chunk in chunks for part in chunk], axis, settings, values, None, pipeline
    )
    values.share_rest(set(names), DTYPES[spec.train.precision])
    engine.reduction.names_backwards = names[::-1]
    _tie(engine, ties)
    return PipelineStage(engine, _pipeline(spec, pipeline, None), chunks, own.calls)


def build_engine(
    module: nn.Module, spec: Spec, world: World, grid: Grid, accumulates: bool, threads: int = 1
) -> Engine:
    """The engine that trains a module which hpczero has not written; on every rank the same but for its values, which become rank 0's."""
    layers = world.run_on_all(lambda: user_module.layers_of(module))
    group = _group(world, grid)
    axis = _axis_of_foreign(module, spec, world, group)
    values = OwnValues(module, spec.seed, group)
    engine = Engine(module, layers, axis, settings_of(spec, accumulates, threads), values)
    values.share_rest(
        {parameter.name for _, layer in layers for parameter in layer.parameters},
        DTYPES[spec.train.precision],
    )
    return engine


def _axis_of_foreign(module: nn.Module, spec: Spec, world: World, group: Group) -> DataAxis:
    axis = data_axis(spec, world, group)
    if Sharded.at_stage(spec.zero.stage, axis.shared).parameters:
        world.run_on_all(lambda: user_module.refuse_compiled(module))
    return axis


def settings_of(
    spec: Spec, accumulates: bool, threads: int, own_model: bool = False
) -> EngineSettings:
    return EngineSettings(
        spec.train, spec.optimizer, spec.zero, spec.seed, accumulates, threads, own_model
    )


def data_axis(spec: Spec, world: World, group: Group, cut_alike: bool = True) -> DataAxis:
    ranks_on_nodes = Counter(world.node_of_rank[rank] for rank in group.ranks).values()
    if shares_nodes(spec.zero, ranks_on_nodes, cut_alike):
        return NodeGroup(world, group)
    gathers_in_passes = Sharded.at_stage(spec.zero.stage, False).parameters
    if world.backend != "mpi" and not gathers_in_passes:
        return Messages(group, group)  # what starts in one order anyway needs no agreement on one
    return Messages(group, world.group("data", group.ranks, "gathers"))


def _group(world: World, grid: Grid) -> Group:
    return world.group("data", grid.ranks(world.rank, "data"))


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
