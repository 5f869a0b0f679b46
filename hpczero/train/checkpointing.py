"""The checkpoints of a run: when one is saved, what it holds, and the resume from one."""

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpczero.checkpoint import directory, limits
from hpczero.checkpoint.directory import checkpoint_at
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import TrainingState
from hpczero.checkpoint.piece_table import RankShard, Table, Tensor, stored_by_others, stored_spans
from hpczero.checkpoint.save import Saved, SaveJob, Saver
from hpczero.checkpoint.shard_file import SLOTS, Array, Damaged, DataSource
from hpczero.comm.grid import Grid
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.offload.state_file import StateFile
from hpczero.parallel.zero.engine import Engine
from hpczero.planner.memory import saves_behind
from hpczero.spec.schema import Spec
from hpczero.train.loop_state import LoopState
from hpczero.train.mixed_data import continue_mixture
from hpczero.train.rank_states import persistent_buffers
from hpczero.train.resume import (
    Candidates,
    Loaded,
    Resumed,
    Shapes,
    candidates,
    differences,
    other_data,
    readable,
    refuse_another_model,
    refuse_another_run,
    restore,
    resumed_identity,
)
from hpczero.train.run_directory import path_of
from hpczero.train.saved_states import SavedStates

StageUnits = tuple[
    list[Layer], set[str]
]  # units of a pipeline stage; those that another stage saves


class Checkpoints:
    """Saves and loads an engine's states. On every rank; all methods are collective."""

    def __init__(
        self,
        spec: Spec,
        world: World,
        grid: Grid,
        engine: Engine,
        identity: Mapping[str, str] | None = None,
        path: Path | None = None,
        behind: bool | None = None,
        saves: bool | None = None,
    ) -> None:
        """In place of what the spec says: `path` where, `behind` if from copies, `saves` if any."""
        self.spec = spec
        self.world = world
        self.grid = grid
        self.engine = engine
        self._saved = SavedStates(engine)
        self.slots = self._saved.slots
        self.identity = dict(identity or {})  # besides the spec (`resume.identity_of`)
        self.path = path or path_of(spec) / "checkpoints"
        self.asynchronous = saves_behind(spec) if behind is None else behind
        # One of the ranks that have the same layers and buffers speaks for them all.
        self._speaks_for_stage = all(
            grid.coordinate(world.rank, axis) == 0 for axis in ("data", "tensor")
        )
        self._stages = self._stages_of_pipeline()
        self._buffer_types = self._of_all_stages(
            {
                name: (_dtype_when_saved(buffer), buffer.shape)
                for name, buffer in self._persistent_buffers()
            }
        )
        self._saves = spec.checkpoint.every >= 0 if saves is None else saves
        if self._saves:
            world.run_on_all(self._refuse_what_cannot_be_saved)
        job = SaveJob(
            self.path,
            spec.model_dump(mode="json"),
            {axis: grid.size(axis) for axis in grid.axes},
            self._table,
            spec.checkpoint.writers,
            self.identity,
            self.slots,
        )
        self.saver = Saver(world, job, _sources(engine, self._saved), self.asynchronous)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the memory in which states are copied, or come together, to be saved."""
        return self.saver.copy_bytes + self._saved.size

    # -- saving ------------------------------------------------------------------------------------

    def is_due(self, step: int, ends: bool) -> bool:
        every = self.spec.checkpoint.every
        return every >= 0 and (ends or (every > 0 and step % every == 0))

    def begin(self, step: int, ends: bool, more: Mapping[str, Array] | None = None) -> None:
        """Begin a save; SaveFailed, on all ranks alike. `more`: rank 0's further buffers."""
        engine = self.engine
        engine.complete_exchanges()
        engine.wait_for_weights()  # and so for all steps
        self._saved.collect()
        scale = engine.loss_scale
        state = TrainingState(
            step=step,
            updates=engine.updates,
            loss_scale=scale.value,
            good_steps=scale.good_steps,
            missed=self._missed_updates(),
            slots=[] if self.slots == SLOTS else list(self.slots),
            update=engine.update.numbers(),
        )
        buffers = self._buffers() | dict(more or {})
        self.saver.begin(state, buffers, self.asynchronous and not ends)

    def conclude(self) -> tuple[Saved, str]:
        """Bring the save to its end, and remove old checkpoints; SaveFailed, on all ranks alike.

        Return also what could not be removed.
        """
        saved = self.saver.conclude()
        return saved, self._on_first_rank(lambda: self._prune(saved.step))

    def _missed_updates(self) -> dict[str, int]:
        """Return, on rank 0, the updates that parameters without a gradient have missed."""
        if self.engine.settings.own_model:
            return {}
        missed: dict[str, int] = self.engine.absent.missed
        if self.grid.size("pipeline") == 1:
            return dict(missed)  # rank 0 has the only stage
        return self._of_all_stages(missed)

    def _prune(self, newest: int) -> str:
        """Return what could not be removed."""
        settings = self.spec.checkpoint
        problems = []
        try:
            outdated = directory.outdated(self.path, newest, settings.keep, settings.keep_every)
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        for path, known_as in outdated:
            try:
                directory.remove(path, known_as)
            except OSError as error:
                problems.append(f"{path}: it was to be removed: {error.strerror}")
        return "; ".join(problems)

    # -- loading -----------------------------------------------------------------------------------

    def resume(self, check: Callable[[LoopState], None] = lambda _: None) -> Resumed:
        """Load the checkpoint that the run begins from (`resume.candidates`), if there is one.

        `check` is called before anything is restored, and raises InputError to prevent it.
        A checkpoint of this run that any rank finds damaged is passed over. Newer ones of this run
        are set aside: the run goes on without them.
        """
        named = Candidates(**self._on_first_rank(lambda: asdict(candidates(self.spec, self.path))))
        only_weights = self.spec.checkpoint.weights_only and not named.of_this_run
        damaged: list[str] = []
        for path in map(Path, named.paths):
            try:
                loaded = self._load(path, only_weights, check)
            except Damaged as error:
                if not named.of_this_run:
                    raise InputError(f"checkpoint.resume: {error}") from error
                damaged.append(str(error))
            else:
                content = loaded.content
                step = 0 if only_weights else content.state.step
                changed = tuple(differences(content, self.spec, "changeable"))
                warnings = [f"passed over a damaged checkpoint: {problem}" for problem in damaged]
                warnings += self.make_way(step, path) + other_data(content, self.spec, step)
                warnings += loaded.notes
                return Resumed(step, path, changed, tuple(warnings), loaded)
        if damaged:
            problems = "".join(f"\n  {problem}" for problem in damaged)
            advice = "--fresh starts the run anew"
            raise InputError(f"no checkpoint of this run can be read:{problems}\n{advice}")
        return Resumed(0, warnings=tuple(self.make_way(0, None)))

    def load(
        self, path: Path, only_weights: bool, check: Callable[[LoopState], None]
    ) -> tuple[Loaded, Path]:
        """Load this checkpoint, or the newest of this run; InputError if it is damaged."""
        at = Path(self._on_first_rank(lambda: str(checkpoint_at(path))))
        try:
            return self._load(at, only_weights, check), at
        except Damaged as error:
            raise InputError(str(error)) from error

    def refresh_weights(self) -> None:
        """Make the weights from the states, after `resume` or `load`."""
        self.engine.renew(lambda unit: unit.weights_from_master())

    def make_way(self, step: int, origin: Path | None) -> list[str]:
        """Set newer checkpoints aside, unless none are saved; return warnings."""
        if not self._saves:
            return []

        def set_aside() -> list[str]:
            try:
                return list(map(str, directory.make_way(self.path, step, origin)))
            except OSError as error:
                where = error.filename or self.path
                raise InputError(f"cannot set aside {where}: {error.strerror}") from error

        moved = self._on_first_rank(set_aside)
        return [f"set aside, as the run goes on from step {step}: {path}" for path in moved]

    def _on_first_rank(self, action: Callable[[], Any]) -> Any:
        """Run the action on rank 0 alone, and return its result on all ranks."""
        return self.world.broadcast_object(
            self._reading(lambda: None if self.world.rank else action())
        )

    def _reading(self, action: Callable[[], Any]) -> Any:
        """Run an action that reads checkpoints; InputError on all ranks if one cannot."""
        return self.world.run_on_all(
            lambda: run_while_polling(self.world, lambda: readable(action))
        )

    def _load(self, path: Path, only_weights: bool, check: Callable[[LoopState], None]) -> Loaded:
        """Load this checkpoint; Damaged on all ranks if it is for any.

        The engine's states are then undefined.
        """
        problem, loaded = self._reading(lambda: self._read(path, only_weights, check))
        problems = self.world.all_gather_objects(problem)
        if first := next(filter(None, problems), None):
            raise Damaged(first)
        assert loaded
        return loaded

    def _read(
        self, path: Path, only_weights: bool, check: Callable[[LoopState], None]
    ) -> tuple[str, Loaded | None]:
        """Return how the checkpoint is damaged ("" if it is not), and what it says."""
        try:
            with Checkpoint.open(path) as checkpoint:
                if path.parent == self.path:
                    directory.refuse_misnamed(path, checkpoint.content.state.step)
                if not only_weights:
                    refuse_another_run(checkpoint, self.spec, self.identity)
                shapes = {name: tuple(shape) for name, (_, shape) in self._buffer_types.items()}
                buffers = shapes if self.world.rank == 0 else None
                refuse_another_model(checkpoint, self._tensor_shapes(), buffers)
                loop = LoopState.of(checkpoint.loop, str(path))
                check(loop)
                notes = restore(self.engine, checkpoint, only_weights)
                if not only_weights:
                    notes += continue_mixture(checkpoint, self.spec, self.identity)
                self.identity.update(resumed_identity(checkpoint.identity, self.identity))
                return "", Loaded(
                    checkpoint.content, loop, checkpoint.identity, only_weights, notes
                )
        except Damaged as error:
            return str(error), None

    # -- the model, described on rank 0 ------------------------------------------------------------

    def _of_all_stages(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return on rank 0 the union of what one rank of every stage has; empty on the others."""
        of_ranks = self.world.gather_objects(values if self._speaks_for_stage else {})
        return {name: value for of_rank in of_ranks or [] for name, value in of_rank.items()}

    def _stages_of_pipeline(self) -> list[StageUnits]:
        """Return all stages on rank 0, in order; its own stage alone on any other rank."""
        layers = [_described(unit.layout) for unit in self.engine.units]
        stored_elsewhere = [unit.layout.name for unit in self.engine.counted_elsewhere]
        mine = {str(self.grid.coordinate(self.world.rank, "pipeline")): (layers, stored_elsewhere)}
        stages = self._of_all_stages(mine) or mine
        return [
            ([_layer(*layer) for layer in layers], set(stored_elsewhere))
            for layers, stored_elsewhere in (stages[number] for number in sorted(stages, key=int))
        ]

    def _table(self) -> Table:
        tensors = [Tensor(name, shape) for name, shape in self._tensor_shapes().items()]
        grid = self.grid.shards_and_replicas(self.spec.zero.shard_ranks)

        @cache
        def layouts(stage: int, tensor_rank: int) -> list[UnitLayout]:
            sizes = grid.size("shard"), grid.size("tensor")
            return [unit_layout(layer, *sizes, tensor_rank) for layer in self._stages[stage][0]]

        def shard_of(rank: int) -> RankShard:
            stage, tensor_rank = grid.coordinate(rank, "pipeline"), grid.coordinate(rank, "tensor")
            units = layouts(stage, tensor_rank)
            of_replica = grid.size("replica"), grid.coordinate(rank, "replica")
            elsewhere = self._stages[stage][1] | stored_by_others(units, *of_replica)
            return RankShard(units, grid.coordinate(rank, "shard"), tensor_rank, elsewhere)

        return Table.of(tensors, self.world.size, shard_of)

    def _tensor_shapes(self) -> Shapes:
        """Return the shapes of all parameters on rank 0, of this stage's on any other rank."""
        layers = [layer for stage, _ in self._stages for layer in stage]
        return {p.name: p.shape for layer in layers for p in layer.parameters}

    def _refuse_what_cannot_be_saved(self) -> None:
        problem = limits.problem(self._tensor_shapes(), self._buffer_types)
        if problem := problem or limits.slots_problem(self.slots, self.world.size):
            advice = (
                "a buffer with persistent=False is left out; "
                "checkpoint.every = -1 trains without checkpoints"
            )
            raise InputError(f"a checkpoint cannot hold this model: {problem} ({advice})")

    def _buffers(self) -> dict[str, Array]:
        """Return the modules' buffers, of the first data rank of each stage, on rank 0."""
        packed = {name: _packed(buffer) for name, buffer in self._persistent_buffers()}
        return {
            name: np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
            for name, (text, dtype, shape) in self._of_all_stages(packed).items()
        }

    def _persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of this stage that are saved, on the rank that speaks for it."""
        if self._speaks_for_stage:
            yield from persistent_buffers(self.engine.module)


# -- what a rank has -------------------------------------------------------------------------------


def _described(layout: UnitLayout) -> list[Any]:
    """Return as plain data what `_layer` makes a layer of."""
    parameters = [slot.parameter for slot in layout.slots]
    described = [[p.name, p.shape, p.split, p.grain, p.fine_grain, p.sections] for p in parameters]
    return [layout.name, described]


def _layer(name: str, parameters: list[list[Any]]) -> Layer:
    made = [Parameter(name, tuple(shape), ZEROS, *cut) for name, shape, *cut in parameters]
    return Layer(name, tuple(made))


def _dtype_when_saved(buffer: torch.Tensor) -> str:
    return "float32" if buffer.dtype == torch.bfloat16 else str(buffer.dtype).removeprefix("torch.")


def _packed(buffer: torch.Tensor) -> list[Any]:
    widened = buffer.float() if buffer.dtype == torch.bfloat16 else buffer
    values = widened.contiguous().cpu().numpy()
    return [base64.b64encode(values.tobytes()).decode(), values.dtype.str, list(values.shape)]


def _sources(engine: Engine, saved: SavedStates) -> list[list[DataSource]]:
    """Return for each slot the spans that this rank saves, in the order of the piece table."""
    sources: list[list[DataSource]] = [[] for _ in saved.slots]
    for span in stored_spans(saved.here):
        unit = engine.units[span.unit]
        for of_slot, state in zip(sources, saved.of(unit).values(), strict=True):
            # what came from other replicas is of the shard, which may be less than what is owned
            first = (unit.owned if state.numel() == unit.master.numel() else unit.shard).start
            inside = slice(span.inside.start - first, span.inside.stop - first)
            of_slot.append(_of_tensor(state[inside], engine.file))
    return sources


class _Away:
    """A span of fp32 on a device or in a file, as a source of a save: reading a part copies it."""

    def __init__(self, values: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._values = values
        self._copy = copy

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, part: slice) -> Array:
        return self._copy(self._values[part]).numpy()


def _of_tensor(values: torch.Tensor, file: StateFile | None) -> DataSource:
    if file and file.holds(values):
        return _Away(values, file.copy_of)
    return values.numpy() if values.device.type == "cpu" else _Away(values, torch.Tensor.cpu)
