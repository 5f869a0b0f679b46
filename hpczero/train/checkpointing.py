"""The checkpoints of a run: when one is saved, what the engine gives and gets back, where the run begins again."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.load import Checkpoint, Wanted
from hpczero.checkpoint.manifest import Content, TrainingState
from hpczero.checkpoint.piece_table import RankShard, Table, Tensor, stored
from hpczero.checkpoint.save import Saved, SaveJob, Saver
from hpczero.checkpoint.shard_file import SLOTS, Array, Damaged, DataSource
from hpczero.comm.grid import Grid
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import unit_layout
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.unit import Unit
from hpczero.planner.memory import saves_behind
from hpczero.spec.schema import Spec
from hpczero.text import printable
from hpczero.train.resume import (
    Candidates,
    candidates,
    differences,
    flat,
    gone_on_with,
    other_data,
    readable,
    refuse_another_run,
    refuse_other_data,
)
from hpczero.train.run_directory import path_of

Shapes = Mapping[str, tuple[int, ...]]
Described = list[list[Any]]  # units of a stage: name, parameters (name, shape, split, grain)
_SHOWN = 5


@dataclass(frozen=True)
class Resumed:
    """Where a run begins, and what people should know about it."""

    step: int
    path: Path | None = None  # of the checkpoint; None: there is none
    changed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Checkpoints:
    """On every rank; all methods are collective."""

    def __init__(
        self,
        spec: Spec,
        world: World,
        grid: Grid,
        engine: Engine,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self.spec, self.world, self.grid, self.engine = spec, world, grid, engine
        self.identity = dict(identity or {})  # besides the spec (`beginning.identity_of`)
        self.path = path_of(spec) / "checkpoints"
        self.behind = saves_behind(spec)
        self._stages = self._described()
        if spec.checkpoint.every >= 0:
            world.run_on_all(self._refuse_what_cannot_be_saved)
        self._buffer_shapes = self._shapes_of_buffers()
        sizes = {axis: grid.size(axis) for axis in grid.axes}
        job = SaveJob(
            self.path,
            spec.model_dump(mode="json"),
            sizes,
            self._table,
            spec.checkpoint.writers,
            self.identity,
        )
        self.saver = Saver(world, job, _owned(engine, self.holding()), self.behind)

    # -- saving --------------------------------------------------------------------------------------------------------------------

    def is_due(self, step: int, ends: bool) -> bool:
        every = self.spec.checkpoint.every
        return every >= 0 and (ends or (every > 0 and step % every == 0))

    def begin(self, step: int, ends: bool) -> None:
        """SaveFailed, on all ranks alike."""
        engine, scale = self.engine, self.engine.loss_scale
        missed = self._missed_of_all_stages()
        counts = {"step": step, "updates": engine.updates, "good_steps": scale.good_steps}
        state = TrainingState(**counts, loss_scale=scale.value, missed=missed)
        self.saver.begin(state, self._buffers(), self.behind and not ends)

    def _missed_of_all_stages(self) -> dict[str, int]:
        """On rank 0. The data ranks of a stage know the same."""
        if self.engine.settings.own_model:
            return {}
        own = self.engine.absent.missed if self._speaks_for_stage else {}
        collected = (
            [own] if self.grid.size("pipeline") == 1 else self.world.gather_objects(own) or []
        )
        return {name: missed for of_rank in collected for name, missed in of_rank.items()}

    def conclude(self) -> tuple[Saved, str]:
        """Also drops what is not to be kept; with what could not be dropped. SaveFailed, on all ranks alike."""
        saved = self.saver.conclude()
        return saved, self._of_first_rank(lambda: self._prune(saved.step))

    def holding(self) -> RankShard:
        engine = self.engine
        copies = {unit.layout.name for unit in engine.copies}
        return RankShard(
            [unit.layout for unit in engine.units],
            engine.axis.rank,
            engine.tensor.rank if engine.tensor else 0,
            copies,
        )

    def _prune(self, newest: int) -> str:
        """Return what could not be removed."""
        settings, problems = self.spec.checkpoint, []
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

    # -- loading -------------------------------------------------------------------------------------------------------------------

    def resume(self) -> Resumed:
        """The engine's states become those of the checkpoint that the run begins from (`beginning`). One of its own that is damaged on whichever
        rank's way is passed over. What the run finds of its own that is newer is set aside: it has no part in it any more.
        """
        found = Candidates(**self._of_first_rank(lambda: asdict(candidates(self.spec, self.path))))
        damaged: list[str] = []
        for path in map(Path, found.paths):
            try:
                content = self._load(
                    path, only_weights := self.spec.checkpoint.weights_only and not found.own
                )
            except Damaged as error:
                if not found.own:
                    raise InputError(f"checkpoint.resume: {error}") from error
                damaged.append(str(error))
            else:
                step = 0 if only_weights else content.state.step
                warnings = [
                    f"passed over a damaged checkpoint: {problem}" for problem in damaged
                ] + self._make_way(step, path)
                return Resumed(
                    step,
                    path,
                    tuple(differences(content, self.spec, "changeable")),
                    (*warnings, *other_data(content, self.spec, step)),
                )
        if damaged:
            listed = "".join(f"\n  {problem}" for problem in damaged)
            raise InputError(
                f"no checkpoint of this run can be read:{listed}\n--fresh starts the run anew"
            )
        return Resumed(0, warnings=tuple(self._make_way(0, None)))

    def _make_way(self, step: int, origin: Path | None) -> list[str]:
        """What is said about it. A run that saves nothing has nothing that needs way."""
        if self.spec.checkpoint.every < 0:
            return []
        moved = self._of_first_rank(
            lambda: [str(path) for path in directory.make_way(self.path, step, origin)]
        )
        return [f"set aside, as the run goes on from step {step}: {path}" for path in moved]

    def _of_first_rank(self, action: Callable[[], Any]) -> Any:
        """What rank 0 finds, on all ranks."""
        own = lambda: readable(action) if self.world.rank == 0 else None  # noqa: E731
        return self.world.broadcast_object(
            self.world.run_on_all(lambda: run_while_polling(self.world, own))
        )

    def _load(self, path: Path, only_weights: bool) -> Content:
        """Damaged, on all ranks alike, if it is so on any of them's way: then the engine is in no good state."""
        problem, content = self.world.run_on_all(
            lambda: run_while_polling(
                self.world, lambda: readable(lambda: self._tried(path, only_weights))
            )
        )
        found = next(
            (
                text
                for text in self.world.broadcast_object(self.world.gather_objects(problem))
                if text
            ),
            "",
        )
        if found:
            raise Damaged(found)
        assert content
        return content

    def _tried(self, path: Path, only_weights: bool) -> tuple[str, Content | None]:
        """What is wrong with the checkpoint, or what it is."""
        try:
            with Checkpoint.open(path) as checkpoint:
                if path.parent == self.path:
                    directory.refuse_misnamed(path, checkpoint.content.state.step)
                if not only_weights:
                    refuse_another_run(path, checkpoint.content, self.spec)
                    refuse_other_data(path, checkpoint.identity, self.identity)
                self._refuse_another_model(checkpoint)
                self._read(checkpoint, only_weights)
                self.identity.update(gone_on_with(checkpoint.identity, self.identity))
                return "", checkpoint.content
        except Damaged as error:
            return str(error), None

    def _read(self, checkpoint: Checkpoint, only_weights: bool) -> None:
        """What this rank steps, straight into the engine's states."""
        units = [(unit, checkpoint.runs(_wanted(unit))) for unit in self.engine.units]
        for slot in range(
            1 if only_weights else len(SLOTS)
        ):  # as a rank's data lies: at the same layout it is read from its beginning to its end
            for unit, runs in units:
                held = _states(unit)[slot]
                here = held.cpu()  # the same, but on another device
                checkpoint.read_runs(slot, runs, here.numpy())
                held.copy_(here)
        own = dict(self.engine.module.named_buffers())
        for name, values in checkpoint.buffers.items():
            if name in own and tuple(own[name].shape) == values.shape:  # if not, rank 0 refuses it
                own[name].copy_(torch.from_numpy(values))
        if only_weights:
            return
        state, engine = checkpoint.content.state, self.engine
        engine.updates = state.updates
        engine.absent.missed = {
            name: state.missed[name] for name in engine.names if name in state.missed
        }
        if engine.loss_scale.dynamic and flat(checkpoint.content.spec)["train.precision"] == "fp16":
            engine.loss_scale = replace(
                engine.loss_scale, value=state.loss_scale, good_steps=state.good_steps
            )

    def _refuse_another_model(self, checkpoint: Checkpoint) -> None:
        """Each rank looks for what it is going to read, rank 0 at all there is."""
        there = {tensor.name: tensor.shape for tensor in checkpoint.table.tensors}
        wrong = _lacking(
            there,
            {
                place.parameter.name: place.parameter.shape
                for unit in self.engine.units
                for place in unit.layout.slots
            },
        )
        if self.world.rank == 0:
            here = {
                name: tuple(shape)
                for units, _ in self._stages
                for _, parameters in units
                for name, shape, *_ in parameters
            }
            buffers = {name: values.shape for name, values in checkpoint.buffers.items()}
            wrong = _unlike(there, here) + [
                f"buffer {line}" for line in _unlike(buffers, self._buffer_shapes)
            ]
        if wrong:
            more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            shown = "".join(f"\n  {printable(line)}" for line in wrong[:_SHOWN]) + more
            raise InputError(f"{checkpoint.folder} does not have this model's tensors:{shown}")

    def refresh_weights(self) -> None:
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
                [
                    unit.layout.name,
                    [
                        [p.parameter.name, p.parameter.shape, p.parameter.split, p.parameter.grain]
                        for p in unit.layout.slots
                    ],
                ]
                for unit in self.engine.units
            ]
            own = (
                self.grid.coordinate(self.world.rank, "pipeline"),
                units,
                sorted(unit.layout.name for unit in self.engine.copies),
            )
        collected = self.world.gather_objects(own) or []
        return [
            (units, copies) for _, units, copies in sorted(found for found in collected if found)
        ]

    def _shapes_of_buffers(self) -> Shapes:
        """Of all stages, on rank 0."""
        own = (
            {
                name: list(buffer.shape)
                for name, buffer in _persistent_buffers(self.engine.module).items()
            }
            if self._speaks_for_stage
            else {}
        )
        return {
            name: tuple(shape)
            for of_rank in self.world.gather_objects(own) or []
            for name, shape in of_rank.items()
        }

    def _table(self) -> Table:
        stages = [
            ([_layer(*unit) for unit in units], set(copies)) for units, copies in self._stages
        ]
        tensors = {
            p.name: Tensor(p.name, p.shape)
            for layers, _ in stages
            for layer in layers
            for p in layer.parameters
        }
        grid, cut = self.grid, {}

        def holding_of(rank: int) -> RankShard:
            stage, tensor_rank = grid.coordinate(rank, "pipeline"), grid.coordinate(rank, "tensor")
            layers, copies = stages[stage]
            if (stage, tensor_rank) not in cut:
                cut[stage, tensor_rank] = [
                    unit_layout(layer, grid.size("data"), grid.size("tensor"), tensor_rank)
                    for layer in layers
                ]
            return RankShard(
                cut[stage, tensor_rank], grid.coordinate(rank, "data"), tensor_rank, copies
            )

        return Table.of(list(tensors.values()), self.world.size, holding_of)

    def _refuse_what_cannot_be_saved(self) -> None:
        """Collective; InputError on rank 0."""
        own = _persistent_buffers(self.engine.module) if self._speaks_for_stage else {}
        described = (
            self.world.gather_objects(
                {
                    name: (_dtype_when_saved(buffer), list(buffer.shape))
                    for name, buffer in own.items()
                }
            )
            or []
        )
        buffers = {
            name: (dtype, shape)
            for of_rank in described
            for name, (dtype, shape) in of_rank.items()
        }
        tensors = {
            name: shape
            for units, _ in self._stages
            for _, parameters in units
            for name, shape, *_ in parameters
        }
        if problem := manifest.problem(tensors, buffers):
            ways = "a buffer with persistent=False is left out; checkpoint.every = -1 trains without checkpoints"
            raise InputError(f"a checkpoint cannot hold this model: {problem} ({ways})")

    def _buffers(self) -> dict[str, Array]:
        """What the modules keep besides parameters, of the first data rank; on rank 0."""
        own = (
            {
                name: _packed(buffer)
                for name, buffer in _persistent_buffers(self.engine.module).items()
            }
            if self._speaks_for_stage
            else {}
        )
        found: dict[str, Array] = {}
        for of_rank in self.world.gather_objects(own) or []:
            found |= {
                name: np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
                for name, (text, dtype, shape) in of_rank.items()
            }
        return found


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if (
                buffer is not None
                and name not in part._non_persistent_buffers_set
                and not buffer.is_meta
            ):
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def _dtype_when_saved(buffer: torch.Tensor) -> str:
    return "float32" if buffer.dtype == torch.bfloat16 else str(buffer.dtype).removeprefix("torch.")


def _packed(buffer: torch.Tensor) -> list[Any]:
    values = (
        (buffer.float() if buffer.dtype == torch.bfloat16 else buffer).contiguous().cpu().numpy()
    )
    return [base64.b64encode(values.tobytes()).decode(), values.dtype.str, list(values.shape)]


def _layer(name: str, parameters: Sequence[Sequence[Any]]) -> Layer:
    return Layer(
        name,
        tuple(
            Parameter(own, tuple(shape), ZEROS, split, grain)
            for own, shape, split, grain in parameters
        ),
    )


def _owned(engine: Engine, holding: RankShard) -> list[list[DataSource]]:
    found: list[list[DataSource]] = [[] for _ in SLOTS]
    for stretch in stored(holding):
        unit = engine.units[stretch.unit]
        own = slice(stretch.inside.start - unit.owned.start, stretch.inside.stop - unit.owned.start)
        for of_slot, state in zip(found, _states(unit), strict=True):
            of_slot.append(_of_tensor(state[own]))
    return found


class _OnDevice:
    """A stretch of fp32 in a device's memory, as far as saving asks: what is taken of it is a copy."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, part: slice) -> Array:
        return self._values[part].cpu().numpy()


def _of_tensor(values: torch.Tensor) -> DataSource:
    return values.numpy() if values.device.type == "cpu" else _OnDevice(values)


def _states(unit: Unit) -> tuple[torch.Tensor, ...]:
    """In the order of SLOTS."""
    return unit.master, unit.moment1, unit.moment2


def _wanted(unit: Unit) -> Iterator[Wanted]:
    """What the elements that this rank steps are of the tensors."""
    for place, part in unit.layout.stretches(unit.owned.start, unit.owned.stop):
        at = part.start - unit.owned.start
        for box in place.rectangles(part.start, part.stop):
            yield at, place.parameter.name, box
            at += prod(cut.stop - cut.start for cut in box)


def _lacking(there: Shapes, here: Shapes) -> list[str]:
    return [
        f"{name}: {there.get(name, 'nothing')} there, {shape} now"
        for name, shape in here.items()
        if there.get(name) != shape
    ]


def _unlike(there: Shapes, here: Shapes) -> list[str]:
    return _lacking(there, here) + [
        f"{name}: {shape} there, nothing now" for name, shape in there.items() if name not in here
    ]
