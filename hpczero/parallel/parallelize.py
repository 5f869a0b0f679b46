"""Assemble model, grid and engine: everything that trains a spec on this rank.

Three kinds of models come to the same `ModelParts`: a family of hpczero's own, a module of
somebody else, and one stage of such a module that is cut into a pipeline.

A family's plan (`model.shapes.Family`) names the modules that tensor ranks share, each with its
role; `apply_plan` replaces them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hpczero.comm.grid import Grid
from hpczero.comm.group import Group
from hpczero.comm.node_axis import NodeAxis
from hpczero.comm.world import World
from hpczero.model import build, families
from hpczero.model.batch import MicroBatch
from hpczero.model.shapes import (
    NORM_OF_HEADS,
    NORM_OF_ROWS,
    SPLIT_OF_ROWS,
    Family,
    Layer,
    role_of,
)
from hpczero.parallel import user_module
from hpczero.parallel.activations.calls import Ways, calls_of, use_recipes
from hpczero.parallel.activations.choice import loss_rows
from hpczero.parallel.activations.loss_by_pieces import Pieces, head_by_pieces
from hpczero.parallel.activations.recipes import Recipes
from hpczero.parallel.pipeline import user_stages
from hpczero.parallel.pipeline.executor import Pipeline
from hpczero.parallel.pipeline.partition import (
    Chunks,
    Tied,
    chunks_of_stages,
    handed_on,
    separate_tied,
    stages_of_ties,
)
from hpczero.parallel.states import Sharded, shares_nodes
from hpczero.parallel.step import PipelineStage, SingleStage, StepRunner
from hpczero.parallel.tensor.attention_inputs import HeadsOfRank, core_of_rank
from hpczero.parallel.tensor.cut_modules import CutModules
from hpczero.parallel.tensor.linear import (
    ColumnLinear,
    ColumnOfWhole,
    DropoutOnOwnRows,
    OnOwnRows,
    PickedFromRows,
    Residual,
    RowLinear,
)
from hpczero.parallel.tensor.serial_check import SerialCheck
from hpczero.parallel.tensor.streams import SplitOfRows, residual_of
from hpczero.parallel.tensor.user_plan import Cuts
from hpczero.parallel.tensor.vocabulary import VocabularyCrossEntropy, VocabularyLookup
from hpczero.parallel.user_module import Layers
from hpczero.parallel.zero.data_axis import DataAxis, Messages, Replicas, ShardsAndReplicas
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.engine_settings import EngineSettings
from hpczero.parallel.zero.gather_sizes import gathers_in_8_bits
from hpczero.parallel.zero.state_dict import InitialValues, no_values
from hpczero.parallel.zero.update_plan import PLAIN_ADAMW, UpdatePlan, own_update
from hpczero.parallel.zero.weights import DTYPES, ModelParts
from hpczero.spec.schema import Spec

# the roles of modules among tensor ranks
ROLES: dict[str, Callable[[nn.Module, Residual], nn.Module]] = {
    "column": ColumnLinear,
    "column of whole": ColumnOfWhole,
    "picked from rows": PickedFromRows,
    "row": RowLinear,
    "vocabulary": VocabularyLookup,
    "vocabulary loss": VocabularyCrossEntropy,
    "attention inputs": HeadsOfRank,
    "attention core": core_of_rank,
    NORM_OF_HEADS: OnOwnRows,
    NORM_OF_ROWS: OnOwnRows,
    "dropout of rows": DropoutOnOwnRows,
    SPLIT_OF_ROWS: SplitOfRows,
}


_COMPILED_AT_STAGE_3 = (
    "zero.stage = 3 gathers parameters layer by layer, as Python runs: leave it as it is there, or"
    " take zero.stage = 2 (or zero.node_shared = true, with all ranks on one node)"
)
_COMPILED_AND_CUT = (
    "a tensor plan gives the modules in it other forwards, as Python runs: leave it as it is"
)


@dataclass(frozen=True)
class EngineContext:
    """A spec with the world and grid that it is trained on."""

    spec: Spec
    world: World
    grid: Grid
    accumulates: bool  # a step has several micro-batches
    threads: int = 1
    update: UpdatePlan = PLAIN_ADAMW

    def group(self, axis: str) -> Group:
        return self.world.group(axis, self.grid.ranks(self.world.rank, axis))

    def group_if_cut(self, axis: str) -> Group | None:
        return self.group(axis) if self.grid.size(axis) > 1 else None

    def data_axis(self) -> DataAxis:
        """Return how this rank's data ranks exchange gradients and weights."""
        group = self.group("data")
        divided = self.grid.shards_and_replicas(self.spec.zero.shard_ranks)
        cut_alike = divided.nodes_cut_data_alike
        if divided.size("replica") == 1:
            return data_axis(self.spec, self.world, group, cut_alike)
        rank = self.world.rank
        shards = self.world.group("shard", divided.ranks(rank, "shard"))
        inside = data_axis(self.spec, self.world, shards, cut_alike)
        alike = divided.ranks(rank, "replica")
        first, second = (self.world.group("replica", alike, of) for of in ("", "averages"))
        return ShardsAndReplicas(group, inside, Replicas(first, second))

    def settings(self, own_model: bool = False) -> EngineSettings:
        spec = self.spec
        return EngineSettings(
            spec.train,
            spec.optimizer,
            spec.zero,
            spec.seed,
            self.accumulates,
            self.threads,
            own_model,
            self.update,
            spec.comm.compress == "int8",
            gathers_in_8_bits(spec, self.grid),
            spec.schedule.warmup_steps,
        )


@dataclass(frozen=True)
class UserModel:
    """A module of somebody else, and this rank's stage of it (None: there is one stage)."""

    module: nn.Module
    stage: user_stages.UserStage | None


def make_user_model(spec: Spec, world: World, grid: Grid) -> UserModel:
    """Make the module that model.family names. Collective.

    InputError on all ranks where it cannot be trained so.
    """

    def make() -> UserModel:
        module = build.from_factory(spec.model, spec.seed)
        if spec.parallel.pipeline == 1:
            return UserModel(module, None)
        number = grid.coordinate(world.rank, "pipeline")
        return UserModel(module, user_stages.stage_of(module, spec.parallel, number))

    made = world.run_on_all(make)
    user_module.refuse_modules_that_differ(made.module, world)
    return made


def assemble(
    spec: Spec,
    world: World,
    grid: Grid,
    accumulates: bool,
    threads: int = 1,
    user_model: UserModel | None = None,
    bare: bool = False,
) -> StepRunner:
    """Return the runner of the spec's model on this rank, with its engine and initial values.

    `user_model`: the module that model.family has made, if it exists already. `bare`: leave
    hpczero's own models without values, to be loaded or made (`Engine.initial_values`).
    """
    context = EngineContext(spec, world, grid, accumulates, threads, own_update(spec.optimizer))
    if families.known(spec.model):
        return _own_model(context, bare)
    user_model = user_model or make_user_model(spec, world, grid)
    if user_model.stage is None:
        module = user_model.module
        layers = world.run_on_all(lambda: user_module.layers_of(module))
        return SingleStage(_train_user_module(module, layers, context))
    return _user_stage(user_model.module, user_model.stage, context)


class CutModule:
    """An engine's module among tensor ranks, until `close`."""

    def __init__(self, engine: Engine, cuts: Cuts, tensor: Group) -> None:
        module = engine.module
        self._modules = CutModules(module, cuts, tensor, engine.device.torch)
        slots = [slot for unit in engine.units for slot in unit.layout.slots]
        self._check = SerialCheck(module, self._modules, slots)

    def close(self) -> None:
        self._check.close()
        self._modules.close()


def build_engine(
    module: nn.Module, layers: Layers, context: EngineContext, cuts: Cuts | None = None
) -> tuple[Engine, CutModule | None]:
    """Return the engine that trains a module of somebody else, in these layers of it.

    The module is the same on every rank but for its values, which become rank 0's. `cuts`: of the
    module, and of the layers, among the tensor ranks; what carries them out is to be closed with
    the engine.
    """
    tensor = context.group_if_cut("tensor")
    if tensor is None or cuts is None:
        return _train_user_module(module, layers, context), None
    context.world.run_on_all(lambda: user_module.refuse_compiled(module, _COMPILED_AND_CUT))
    everyone = context.world.everyone
    axis = _axis_of_user_module(module, context)
    values = InitialValues(module, context.spec.seed, everyone)
    names = [parameter.name for _, layer in layers for parameter in layer.parameters]
    parts = ModelParts(module, layers, values, {}, names, everyone)
    engine = Engine(parts, axis, context.settings(), tensor)
    values.broadcast_rest(set(names), DTYPES[context.spec.train.precision])
    return engine, CutModule(engine, cuts, tensor)


def _own_model(context: EngineContext, bare: bool) -> StepRunner:
    spec = context.spec
    module = build.on_meta(spec.model)
    recipes = Recipes()
    if spec.memory.recompute == "selective":
        use_recipes(module, families.family(spec.model).cheap, recipes)
    layers = list(zip(module.layers(), families.layers(spec.model), strict=True))
    tensor = context.group_if_cut("tensor")
    pipeline = context.group_if_cut("pipeline")
    residual = None
    if tensor:
        residual = residual_of(spec.model, tensor, spec.parallel.sequence_parallel)
        apply_plan(layers, families.family(spec.model), residual)
    _cut_loss(module.head, spec, residual)
    described = [layer for _, layer in layers]
    stages = chunks_of_stages(spec, described)
    held = stages[pipeline.rank if pipeline else 0]
    chunks = _with_modules(held, {layer.name: module for module, layer in layers})
    ties = _tie_groups(stages_of_ties(stages), context.world, pipeline) if pipeline else {}
    names = [parameter.name for layer in described for parameter in layer.parameters]
    parts = ModelParts(module, _joined(chunks), no_values if bare else None, ties, names)
    axis = context.data_axis()
    engine = Engine(parts, axis, context.settings(own_model=True), tensor, pipeline)
    ways = Ways.of(spec, engine, tensor)
    calls = [calls_of(spec, chunk, recipes, ways) for chunk in chunks]
    if pipeline is None:
        return SingleStage(engine, calls[0])
    tensor_rank = tensor.rank if tensor else 0

    def shape_of(batch: MicroBatch) -> tuple[int, ...]:
        samples, seq_len = batch.tokens.shape
        return samples, *handed_on(spec, tensor_rank, seq_len)

    executor = _pipeline(spec, pipeline, shape_of)
    return PipelineStage(engine, executor, chunks, calls)


def _cut_loss(head: Any, spec: Spec, residual: Residual | None) -> None:
    """Let a head make its loss by pieces of the micro-batch, where the spec says so."""
    group = residual.group if residual else None
    layout = (lambda: residual.layout) if residual else None

    def pieces_of(positions: int) -> Pieces | None:
        rows = loss_rows(spec.memory, positions)
        vocab, cap = spec.model.vocab, spec.model.logit_cap
        return Pieces(rows, vocab, cap, layout, group) if rows else None

    if spec.memory.loss_chunk:
        head.forward = head_by_pieces(head, pieces_of)


def apply_plan(
    layers: Sequence[tuple[nn.Module, Layer]], family: Family, residual: Residual
) -> None:
    """Replace the serial modules of these layers by the parallel ones of the family's plan.

    The model is on meta: the engine gives each rank its part of the parameters later.
    """

    def follow(_: nn.Module, arguments: tuple[object, MicroBatch]) -> None:
        residual.follow(arguments[1].tokens.shape[1])

    plan = dict(family.tensor_plan)
    if residual.sequence_parallel:
        plan |= family.sequence_plan
    for module, layer in layers:
        if residual.sequence_parallel:
            module.register_forward_pre_hook(follow)
        for path, serial in list(module.named_modules()):
            whole_name = f"{layer.name}.{path}"
            role, stream = role_of(plan, whole_name), role_of(family.stream_of, whole_name)
            if role and not isinstance(serial, nn.Identity):  # a norm that this model lacks
                parent, _, name = path.rpartition(".")
                of = residual if stream is None else residual.streams[stream]
                setattr(module.get_submodule(parent), name, ROLES[role](serial, of))


def _user_stage(
    module: nn.Module, stage: user_stages.UserStage, context: EngineContext
) -> StepRunner:
    """Assemble one of the stages of a module that is cut into a pipeline."""
    spec = context.spec
    pipeline = context.group("pipeline")
    group = context.group("data")
    names = list(user_module.trained_parameters(module))
    layers = user_module.layers_of_chunks(module, stage.chunks)
    user_stages.to_meta(module, stage.elsewhere)
    modules = {layer.name: module for module, layer in _joined(layers)}
    parameters = [parameter for _, layer in _joined(layers) for parameter in layer.parameters]
    tied = {one.name: one for one in parameters if one.name in stage.tied}
    described = separate_tied([[layer for _, layer in chunk] for chunk in layers], tied)
    chunks = _with_modules(described, modules)
    ties = _tie_groups(stage.tied, context.world, pipeline)
    axis = _axis_of_user_module(module, context)
    values = InitialValues(module, spec.seed, group, stage.elsewhere, ties)
    parts = ModelParts(module, _joined(chunks), values, ties, names)
    engine = Engine(parts, axis, context.settings(), pipeline=pipeline)
    values.broadcast_rest(set(names), DTYPES[spec.train.precision])
    return PipelineStage(engine, _pipeline(spec, pipeline, None), chunks, stage.calls)


def _train_user_module(module: nn.Module, layers: Layers, context: EngineContext) -> Engine:
    group = context.group("data")
    axis = _axis_of_user_module(module, context)
    values = InitialValues(module, context.spec.seed, group)
    names = [parameter.name for _, layer in layers for parameter in layer.parameters]
    engine = Engine(ModelParts(module, layers, values, {}, names), axis, context.settings())
    values.broadcast_rest(set(names), DTYPES[context.spec.train.precision])
    return engine


def _joined(chunks: Sequence[Layers]) -> Layers:
    return [held for chunk in chunks for held in chunk]


def _with_modules(held: Chunks, modules: Mapping[str, nn.Module]) -> list[Layers]:
    return [
        [
            (nn.Module() if isinstance(layer, Tied) else modules[layer.name], layer)
            for layer in chunk
        ]
        for chunk in held
    ]


def _pipeline(
    spec: Spec, group: Group, shape_of: Callable[[MicroBatch], Sequence[int]] | None
) -> Pipeline:
    dtype = DTYPES[spec.train.precision]
    return Pipeline(group, spec.parallel.schedule, spec.parallel.chunks, shape_of, dtype)


def _tie_groups(
    tied: Mapping[str, Sequence[int]], world: World, pipeline: Group
) -> dict[str, Group]:
    """Return the groups of the tied parameters (name -> stages) that this stage has.

    They are made in one order on all stages, as are the operations that follow from it.
    """
    return {
        name: world.group("pipeline", [pipeline.ranks[stage] for stage in stages])
        for name, stages in tied.items()
        if pipeline.rank in stages
    }


def _axis_of_user_module(module: nn.Module, context: EngineContext) -> DataAxis:
    axis = context.data_axis()
    if Sharded.at_stage(context.spec.zero.stage, axis.shared).parameters:
        context.world.run_on_all(lambda: user_module.refuse_compiled(module, _COMPILED_AT_STAGE_3))
    return axis


def data_axis(spec: Spec, world: World, group: Group, cut_alike: bool) -> DataAxis:
    """Return how the ranks among which states are cut exchange gradients and weights.

    `cut_alike`: nodes divide them at the same places for all ranks that hold values together.
    """
    ranks_on_nodes = Counter(world.node_of_rank[rank] for rank in group.ranks).values()
    if shares_nodes(spec.zero, ranks_on_nodes, cut_alike):
        return NodeAxis(world, group)
    gathers_in_passes = Sharded.at_stage(spec.zero.stage, False).parameters
    if world.backend != "mpi" and not gathers_in_passes:
        return Messages(group, group)  # what starts in one order anyway needs no agreement on one
    return Messages(group, world.group(group.axis, group.ranks, "gathers"))
