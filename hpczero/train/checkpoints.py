"""The checkpoints of a run: when one is saved, what the engine gives and gets back, where the run begins again."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpczero import env
from hpczero.checkpoint import folder
from hpczero.checkpoint.files import Damaged
from hpczero.checkpoint.manifest import Content, State
from hpczero.checkpoint.read import Checkpoint
from hpczero.checkpoint.shard import SLOTS, Array
from hpczero.checkpoint.table import Holding, Table, Tensor, stored
from hpczero.checkpoint.write import Job, Saved, SaveFailed, Saver
from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import unit_layout
from hpczero.parallel.unit import Unit
from hpczero.parallel.zero import Engine
from hpczero.planner.memory import saves_behind
from hpczero.spec.load import differences
from hpczero.spec.schema import Spec
from hpczero.train.rundir import path_of

Described = list[list[Any]]  # units of a stage: name, parameters (name, shape, split, grain)


@dataclass(frozen=True)
class Resumed:
    """Where a run begins again, and what was passed over on the way there."""

    step: int
    path: Path
    damaged: tuple[str, ...]
    changed: tuple[str, ...]


class Checkpoints:
    """On every rank; all methods are collective."""

    def __init__(self, spec: Spec, world: World, grid: Grid, engine: Engine) -> None:
        self.spec, self.world, self.grid, self.engine = spec, world, grid, engine
        self.path = path_of(spec) / "checkpoints"
        self.behind = saves_behind(spec)
        self._stages = self._described()
        sizes = {axis: grid.size(axis) for axis in grid.axes}
        owned = sum(map(len, _owned(engine, self.holding())[0]))
        job = Job(self.path, spec.model_dump(mode="json"), sizes, self._table, spec.checkpoint.writers)
        self.saver = Saver(world, job, owned if self.behind else None)

    # -- saving --------------------------------------------------------------------------------------------------------------------

    def is_due(self, step: int, ends: bool) -> bool:
        every = self.spec.checkpoint.every
        return every >= 0 and (ends or (every > 0 and step % every == 0))

    def begin(self, step: int, ends: bool) -> None:
        """SaveFailed, on all ranks alike."""
        state = State(step=step, updates=self.engine.updates, loss_scale=self.engine.loss_scale.value, good_steps=self.engine.loss_scale.good_steps)
        self.saver.begin(_owned(self.engine, self.holding()), state, self._buffers(), self.behind and not ends)

    def conclude(self) -> Saved:
        """Also drops what is not to be kept."""
        saved = self.saver.conclude()
        if problem := self.world.share(self._prune() if self.world.rank == 0 else ""):
            raise SaveFailed(problem)
        return saved

    def holding(self) -> Holding:
        engine = self.engine
        copies = {unit.layout.name for unit in engine.copies}
        return Holding([unit.layout for unit in engine.units], engine.axis.rank, engine.tensor.rank if engine.tensor else 0, copies)

    def _prune(self) -> str:
        """What could not be removed."""
        settings, complete = self.spec.checkpoint, folder.steps(self.path)
        for step in folder.to_prune(list(complete), settings.keep, settings.keep_every):
            try:
                folder.remove(complete[step])
            except OSError as error:
                return f"{complete[step]}: it was to be removed: {error.strerror}"
        return ""

    # -- loading -------------------------------------------------------------------------------------------------------------------

    def resume(self) -> Resumed | None:
        """The engine's states become those of the checkpoint that `checkpoint.resume` asks for; None: there is none. A checkpoint that is damaged on
        whichever rank's way is passed over.
        """
        damaged: list[str] = []
        for path in self._candidates():
            try:
                content = self._load(path)
            except Damaged as error:
                if self.spec.checkpoint.resume != "auto":
                    raise InputError(f"checkpoint.resume: {error}") from error
                damaged.append(str(error))
            else:
                return Resumed(content.state.step, path, tuple(damaged), tuple(_changed(content, self.spec, "changeable")))
        if damaged:
            listed = "".join(f"\n  {problem}" for problem in damaged)
            raise InputError(f"no checkpoint of this run can be read:{listed}\n--fresh starts the run anew")
        return None

    def _candidates(self) -> list[Path]:
        """The newest first; rank 0's answer for all."""
        wanted = self.spec.checkpoint.resume
        if wanted == "never":
            return []
        if wanted != "auto":
            return [Path(env.expand(wanted)).absolute()]
        found = self.world.together(lambda: [str(path) for path in folder.steps(self.path).values()] if self.world.rank == 0 else [])
        return [Path(path) for path in self.world.share(found)]

    def _load(self, path: Path) -> Content:
        """Damaged, on all ranks alike, if it is so on any of them's way: then the engine is in no good state."""
        problem, content = self.world.together(lambda: self._tried(path))
        found = next((text for text in self.world.share(self.world.collect(problem)) if text), "")
        if found:
            raise Damaged(found)
        assert content
        return content

    def _tried(self, path: Path) -> tuple[str, Content | None]:
        """What is wrong with the checkpoint, or what it is."""
        try:
            with Checkpoint.open(path, checks_view=self.world.rank == 0) as checkpoint:
                _refuse_another_run(checkpoint, self.spec)
                _refuse_another_model(checkpoint, self.engine)
                self._read(checkpoint)
                return "", checkpoint.content
        except Damaged as error:
            return str(error), None

    def _read(self, checkpoint: Checkpoint) -> None:
        """What this rank steps, straight into the engine's states."""
        for unit in self.engine.units:
            _read_unit(checkpoint, unit)
        state, engine = checkpoint.content.state, self.engine
        engine.updates = state.updates
        if engine.loss_scale.dynamic:
            engine.loss_scale = replace(engine.loss_scale, value=state.loss_scale, good_steps=state.good_steps)
        own = dict(engine.module.named_buffers())
        for name, values in checkpoint.buffers.items():
            if name in own and tuple(own[name].shape) == values.shape:
                own[name].copy_(torch.from_numpy(values))

    def settle(self) -> None:
        """After `resume`: the weights follow the states."""
        self.engine.renew(lambda unit: unit.weights_from_master())

    # -- what lies where -----------------------------------------------------------------------------------------------------------

    @property
    def _speaks_for_stage(self) -> bool:
        """Of the ranks that have the same layers and buffers, one."""
        return all(self.grid.coordinate(self.world.rank, axis) == 0 for axis in ("data", "tensor"))

    def _described(self) -> list[tuple[Described, list[str]]]:
        """Of each stage its units, and which of them belong to another one; rank 0 makes the table of it."""
        own = None
        if self._speaks_for_stage:
            units = [
                [unit.layout.name, [[p.parameter.name, p.parameter.shape, p.parameter.split, p.parameter.grain] for p in unit.layout.places]]
                for unit in self.engine.units
            ]
            own = self.grid.coordinate(self.world.rank, "pipeline"), units, sorted(unit.layout.name for unit in self.engine.copies)
        collected = self.world.collect(own) or []
        return [(units, copies) for _, units, copies in sorted(found for found in collected if found)]

    def _table(self) -> Table:
        stages = [([_layer(*unit) for unit in units], set(copies)) for units, copies in self._stages]
        tensors = {p.name: Tensor(p.name, p.shape) for layers, _ in stages for layer in layers for p in layer.parameters}
        grid, cut = self.grid, {}

        def holding_of(rank: int) -> Holding:
            stage, tensor_rank = grid.coordinate(rank, "pipeline"), grid.coordinate(rank, "tensor")
            layers, copies = stages[stage]
            if (stage, tensor_rank) not in cut:
                cut[stage, tensor_rank] = [unit_layout(layer, grid.size("data"), grid.size("tensor"), tensor_rank) for layer in layers]
            return Holding(cut[stage, tensor_rank], grid.coordinate(rank, "data"), tensor_rank, copies)

        return Table.of(list(tensors.values()), self.world.size, holding_of)

    def _buffers(self) -> dict[str, Array]:
        """What the modules keep besides parameters, of the first data rank; on rank 0."""
        own = {name: _packed(buffer) for name, buffer in _persistent_buffers(self.engine.module).items()} if self._speaks_for_stage else {}
        found: dict[str, Array] = {}
        for of_rank in self.world.collect(own) or []:
            found |= {name: np.frombuffer(base64.b64decode(text), dtype).reshape(shape) for name, (text, dtype, shape) in of_rank.items()}
        return found


def look_ahead(spec: Spec) -> None:
    """Before anything is written: InputError if the checkpoint that `checkpoint.resume` names is none that this run can begin from."""
    if spec.checkpoint.resume in ("auto", "never"):
        return
    try:
        with Checkpoint.open(Path(env.expand(spec.checkpoint.resume)).absolute()) as checkpoint:
            _refuse_another_run(checkpoint, spec)
    except Damaged as error:
        raise InputError(f"checkpoint.resume: {error}") from error


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set and not buffer.is_meta:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def _packed(buffer: torch.Tensor) -> list[Any]:
    values = (buffer.float() if buffer.dtype == torch.bfloat16 else buffer).contiguous().numpy()
    return [base64.b64encode(values.tobytes()).decode(), values.dtype.str, list(values.shape)]


def _layer(name: str, parameters: Sequence[Sequence[Any]]) -> Layer:
    return Layer(name, tuple(Parameter(own, tuple(shape), ZEROS, split, grain) for own, shape, split, grain in parameters))


def _owned(engine: Engine, holding: Holding) -> list[list[Array]]:
    found: list[list[Array]] = [[] for _ in SLOTS]
    for stretch in stored(holding):
        unit = engine.units[stretch.unit]
        own = slice(stretch.inside.start - unit.own.start, stretch.inside.stop - unit.own.start)
        for of_slot, state in zip(found, (unit.master, unit.moment1, unit.moment2), strict=True):
            of_slot.append(state[own].numpy())
    return found


def _read_unit(checkpoint: Checkpoint, unit: Unit) -> None:
    for place, part in unit.layout.stretches(unit.own.start, unit.own.stop):
        at = part.start - unit.own.start
        for wanted in place.rectangles(part.start, part.stop):
            count = prod(cut.stop - cut.start for cut in wanted)
            for slot, state in enumerate((unit.master, unit.moment1, unit.moment2)):
                checkpoint.read(slot, place.parameter.name, wanted, state[at : at + count].numpy())
            at += count


def _changed(content: Content, spec: Spec, role: str) -> list[str]:
    """Keys of this role that differ; a run may have another name."""
    try:
        found = differences(Spec.model_validate_json(json.dumps(content.spec)), spec)
    except ValueError as error:
        raise Damaged(f"the spec in the checkpoint cannot be read: {error}") from error
    return [str(difference) for difference in found if difference.role == role and difference.key != "name"]


def _refuse_another_run(checkpoint: Checkpoint, spec: Spec) -> None:
    if other := _changed(checkpoint.content, spec, "identity"):
        raise InputError(f"{checkpoint.folder} is a checkpoint of another run:" + "".join(f"\n  {line}" for line in other))


def _refuse_another_model(checkpoint: Checkpoint, engine: Engine) -> None:
    there = {tensor.name: tensor.shape for tensor in checkpoint.table.tensors}
    here = {place.parameter.name: place.parameter.shape for unit in engine.units for place in unit.layout.places}
    wrong = [f"{name}: {there.get(name, 'nothing')} there, {shape} now" for name, shape in here.items() if there.get(name) != shape]
    if wrong:
        shown = "".join(f"\n  {line}" for line in wrong[:5]) + (f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise InputError(f"{checkpoint.folder} does not have this model's tensors:{shown}")
