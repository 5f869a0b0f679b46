"""The run of a loop of one's own: its directory, its checkpoints, and the requests to stop it.

The directory is claimed when the loop first asks for something that lies there. A save that goes on
behind the loop is brought to its end at the first step boundary after all ranks have written.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from hpczero import env
from hpczero.checkpoint import directory
from hpczero.checkpoint.save import Saved, SaveFailed
from hpczero.checkpoint.shard_file import WIDTH, Array
from hpczero.comm import node_file
from hpczero.comm.grid import Grid
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.update import StepResult
from hpczero.planner.forecast import replicas_left_out
from hpczero.spec.schema import Spec
from hpczero.train import preflight, process, rank_states, run_directory, setup
from hpczero.train.arguments import (
    checkpoints_outside_runs,
    folder_path,
    refuse_step,
    refuse_what_differs,
    table,
)
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.loop_state import LoopState, Position
from hpczero.train.memory_account import Expected, MemoryAccount
from hpczero.train.mixed_data import continued_loop, samples_in_step
from hpczero.train.own_clock import OwnClock
from hpczero.train.own_log import OwnLog
from hpczero.train.own_state import NOT_SAVED, SavedValues, digest_of, packed_loop
from hpczero.train.process import Deadline, StopRequests
from hpczero.train.rank_states import Generators, refuse_unknown
from hpczero.train.restored_loop import RestoredLoop
from hpczero.train.resume import Loaded, look_ahead, other_tokens
from hpczero.train.run_directory import RunDirectory
from hpczero.train.saved_states import saved_elements


class OwnRun:
    """On every rank; all methods are collective."""

    def __init__(
        self, spec: Spec, world: World, grid: Grid, engine: Engine, expected: Expected
    ) -> None:
        self.spec = spec
        self.world = world
        self.grid = grid
        self.engine = engine
        self._saved = NOT_SAVED  # by the last save of this run, or loaded since
        self._begins: tuple[int, Path | None] | None = (0, None)  # until the first save, at most
        self._saving = NOT_SAVED
        self._whole = True  # no load has failed since the last one that did not
        self._read: dict[str, str] = {}  # what data the loop reads, as a run's identity
        self._resumed: Mapping[str, str] = {}  # what data the loop had read before
        self._goes_on = 0, 0  # after so many steps, of so many samples (0: as many as now)
        self._log = OwnLog(world.rank == 0, spec.checkpoint.on_error == "continue")
        self.clock = OwnClock(world, spec.train.log_every)
        self._claimed: Checkpoints | None = None
        self._requests: StopRequests | None = None
        self._listening = ExitStack()  # to requests
        self._deadline: Deadline | None = None
        self._account = MemoryAccount(world, engine, expected, self._standing)
        self._account.begin_step()
        self.jumps = 0  # loads so far: what was read ahead for the steps before is of no use
        self.changes = 0  # of the weights so far
        if what := replicas_left_out(spec, grid):
            self._log.warn(what)

    def _standing(self) -> dict[str, int]:
        copies = self._claimed.copy_bytes if self._claimed else 0
        buffers = {"communication": self.world.buffered, "checkpoint copy": copies}
        return self.engine.memory() | buffers

    # -- the directory ---------------------------------------------------------------------------

    def _checkpoints(self) -> Checkpoints:
        """Return the run's checkpoints, with the run directory claimed."""
        if self._claimed is None:
            first = self.world.rank == 0
            spec = self.spec
            self.world.run_on_all(lambda: look_ahead(spec) if first else None)
            self._log.directory = self.world.run_on_all(
                lambda: RunDirectory.claim(spec, resume=False, fresh=False) if first else None
            )
            self.world.watch_in(self._watched)
            self._log.start(setup.places_of_ranks(self.world))
            self.clock.open(self._log.path, self._log.warn)
            copies = WIDTH * saved_elements(self.engine)
            behind = spec.checkpoint.asynchronous
            if behind and not preflight.has_room(self.world, copies):
                behind = False
                self._log.warn(
                    "no room for a copy of the states: the loop waits while a checkpoint is saved"
                )
            self._claimed = self._in_folder(None, behind)
        return self._claimed

    @property
    def _watched(self) -> Path:
        return run_directory.path_of(self.spec) / node_file.FOLDER

    def let_go(self) -> None:
        """Leave the run's directory alone, which may be removed now."""
        self.world.watch_no_more_in(self._watched)

    def _in_folder(self, path: Path | None, behind: bool = False) -> Checkpoints:
        """Return the checkpoints in this folder (None: the run's); `behind`: saved from copies."""
        engine, read = self.engine, self._read
        return Checkpoints(self.spec, self.world, self.grid, engine, read, path, behind, True)

    # -- begin -----------------------------------------------------------------------------------

    def resume(self, random: Generators | None) -> Position:
        """Load the checkpoint that the run goes on from, if there is one."""
        generators = self._begin_load("resume", random)
        checkpoints = self._checkpoints()
        with self._told_of_a_failure():
            resumed = checkpoints.resume(lambda loop: self._restore_follows(loop, generators))
        for warning in resumed.warnings:
            self._log.warn(warning)
        self._begins = None
        changed = {"changed": "; ".join(resumed.changed)} if resumed.changed else {}
        self._log.resumed(resumed.step, str(resumed.path or ""), **changed)
        self.clock.begin_anew()
        if resumed.path is None or resumed.loaded is None:
            return Position()
        return self._taken(checkpoints, resumed.loaded, resumed.step, resumed.path, generators)

    def load(self, path: str | Path, only_weights: bool, random: Generators | None) -> Position:
        """Load a checkpoint of any run, or the newest of a run's directory."""
        generators = self._begin_load("load", random)
        folder = self.world.run_on_all(lambda: folder_path("path", path))
        given = {"path": str(path), "weights_only": str(only_weights)}
        refuse_what_differs(self.world, "engine.load", given)
        checkpoints = self._in_folder(folder)
        wanted = {} if only_weights else generators
        with self._told_of_a_failure():
            loaded, at = checkpoints.load(
                folder, only_weights, lambda loop: self._restore_follows(loop, wanted)
            )
        step = 0 if only_weights else loaded.content.state.step
        self._begins = step, None if only_weights else at
        return self._taken(checkpoints, loaded, step, at, generators)

    def _begin_load(self, call: str, random: Generators | None) -> Generators:
        """Return the generators; InputError on all ranks if they are none."""
        self.engine.refuse_averaged(call)
        generators = self.world.run_on_all(lambda: table("random", random))
        self.world.run_on_all(lambda: rank_states.states_of(generators))
        self.finish_save()
        self.engine.complete_exchanges()
        self._log.go_on_from_another_step()
        self._account.leave_out()
        return generators

    def _restore_follows(self, loop: LoopState, generators: Generators) -> None:
        refuse_unknown(generators, loop.generators)
        self._saved = NOT_SAVED
        self._whole = False

    @contextmanager
    def _told_of_a_failure(self) -> Iterator[None]:
        """Let all ranks know if a load that fails on all has changed the states of any."""
        try:
            yield
        except InputError:
            self._whole = all(self.world.all_gather_objects(self._whole))
            raise

    def _taken(
        self,
        checkpoints: Checkpoints,
        loaded: Loaded,
        step: int,
        path: Path,
        generators: Generators,
    ) -> Position:
        self.jumps += 1
        self.changes += 1
        self._resumed = {} if loaded.weights_only else loaded.identity
        self._goes_on = step, samples_in_step(loaded.content.spec)
        checkpoints.refresh_weights()
        restored = RestoredLoop(checkpoints, loaded, str(path))
        for warning in restored.take_over(generators):
            self._log.warn(warning)
        self._whole = True
        self.clock.begin_anew()
        if path.parent == self._folder and not loaded.weights_only:
            self._saved = self._values(step, loaded.loop.packed())
        return Position(step, loaded.loop.extra, path)

    def reads(self, identity: Mapping[str, str], batch: int) -> Mapping[str, str]:
        """Note what data the loop reads, `batch` samples a step; return it as it goes on.

        InputError if the loop goes on from a run on others.
        """
        if problem := other_tokens(self._resumed, identity):
            raise InputError(f"the checkpoint that the loop goes on from {problem}")
        record, changes = continued_loop(self._resumed, identity, *self._goes_on, batch)
        for change in changes if dict(self._read) != {**identity, **record} else ():
            self._log.warn(change)
        identity = {**identity, **record}
        self._read.update(identity)
        if self._claimed:
            self._claimed.identity.update(identity)
        return identity

    # -- save ------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        extra: Mapping[str, Any] | None,
        random: Generators | None,
        folder: str | Path | None = None,
        waits: bool = False,
    ) -> None:
        """Save a checkpoint of this step; behind the loop, unless it `waits`."""
        self.world.run_on_all(lambda: refuse_step(step))
        given = {"step": str(step), "folder": str(folder), "wait": str(waits)}
        refuse_what_differs(self.world, "engine.save", given)
        self.finish_save()
        if folder is None:
            self._save(self._checkpoints(), step, self._state(extra, random), waits)
            return
        elsewhere = self._in_folder(self.world.run_on_all(lambda: checkpoints_outside_runs(folder)))
        state = self._state(extra, random)
        with self.clock.standing():
            if self._attempt(lambda: elsewhere.begin(step, True, state)):
                self._attempt(lambda: self._note(elsewhere.saver.conclude()))  # all are kept there

    def save_at_end(
        self, step: int, extra: Mapping[str, Any] | None, random: Generators | None
    ) -> bool:
        """Save this step, unless it is saved with these values; return True if it is saved."""
        self.finish_save()
        checkpoints = self._checkpoints()
        values = self._save(checkpoints, step, self._state(extra, random), waits=True)
        return self._is_saved(values)

    def _save(
        self, checkpoints: Checkpoints, step: int, state: Mapping[str, Array], waits: bool
    ) -> SavedValues:
        """Save these values, unless they are saved; behind the loop, unless it `waits`."""
        values = self._values(step, state)
        if self._is_saved(values):
            return values
        if step < self._saved.step:
            self._begins = step, None  # the loop goes back by numbers of its own
        self._saving = values
        with self.clock.standing():
            self._attempt(lambda: self._begin_save(checkpoints, step, waits, state))
        if waits or not checkpoints.asynchronous:
            self.finish_save()
        return values

    def _begin_save(
        self, checkpoints: Checkpoints, step: int, waits: bool, state: Mapping[str, Array]
    ) -> None:
        if self._begins:
            try:
                aside = checkpoints.make_way(*self._begins)
            except InputError as error:
                raise SaveFailed(f"the checkpoint could not be saved: {error}") from error
            for warning in aside:
                self._log.warn(warning)
            self._begins = None
        checkpoints.begin(step, waits, state)

    def _values(self, step: int, state: Mapping[str, Array]) -> SavedValues:
        digest = digest_of(self.engine.module, state, self.world.rank == 0)
        return SavedValues(step, digest, self.changes)

    def _is_saved(self, values: SavedValues) -> bool:
        """Return True if they are, and the checkpoint is still there."""
        is_there = values == self._saved and values.step in directory.steps(self._folder)
        saved: bool = self.world.broadcast_object(is_there)
        return saved

    @property
    def _folder(self) -> Path:
        return run_directory.path_of(self.spec).absolute() / "checkpoints"

    def _state(
        self, extra: Mapping[str, Any] | None, random: Generators | None
    ) -> dict[str, Array]:
        """Return the loop's state as rank 0's buffers; InputError on all ranks."""
        self.engine.refuse_averaged("save")
        if not self._whole:
            raise HpczeroError(
                "save: the last load or resume failed, and the states may be of two checkpoints:"
                " load another one"
            )
        return packed_loop(self.world, self.engine, extra, random)

    def finish_save(self) -> None:
        """Bring the save that is in flight, if any, to its end."""
        checkpoints = self._claimed
        if checkpoints and checkpoints.saver.in_flight:
            with self.clock.standing():
                self._attempt(lambda: self._conclude(checkpoints))

    def _conclude(self, checkpoints: Checkpoints) -> None:
        run_while_polling(self.world, self._log.sync)
        saved, not_removed = checkpoints.conclude()
        self._saved = self._saving
        if not_removed:
            self._log.warn(not_removed)
        self._note(saved)

    def _note(self, saved: Saved) -> None:
        self.clock.saved(saved.own_seconds)
        if self._deadline:
            self._deadline.saved(saved.seconds)
        self._log.saved(saved, self.clock.stalled())

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Carry out a part of a save; a failure ends the loop, or is only said (on_error)."""
        try:
            with self.world.doing("save"):
                action()
        except SaveFailed as error:
            if self.spec.checkpoint.on_error == "stop":
                raise
            self._log.warn(str(error))
            return False
        return True

    # -- every step ------------------------------------------------------------------------------

    def stepped(self, step: int, lr: float, result: StepResult) -> None:
        """Note a step that is done, and bring a save to its end that all ranks have written."""
        self.world.status.at_step(step + 1)
        if self._claimed is None and self.spec.track.is_on:
            self._checkpoints()  # trackers have the lines of a run directory
        times = self.clock.step(step)
        skipped = {"skipped": True} if result.bad else {}
        values = {"grad_norm": result.grad_norm, "lr": lr}
        memory = self._account.end_step(step)
        if self._claimed:
            self._account.begin_step()
        self._log.step(step, values | times | skipped, memory, self._claimed is not None)
        if self._claimed is None:
            return
        if self._claimed.saver.in_flight:
            writing = torch.tensor([not self._claimed.saver.written], dtype=torch.float64)
            self.world.everyone.all_reduce(writing)
            if not writing.item():
                self.finish_save()

    def should_stop(self) -> str:
        """Return why the loop is to end here, on all ranks alike; "" if it is not."""
        if self._requests is None:
            self._checkpoints()
            if self._log.path:
                estimate = process.seconds_of_save(self.world, saved_elements(self.engine))
                self._deadline = Deadline(env.deadline(), estimate)
            self._requests = StopRequests(self._log.path, self._deadline, self.world.status)
            self._listening.enter_context(self._requests)
        return process.agreed_reason(self.world, self._requests)

    def end(self, step: int, state: str, reason: str = "") -> None:
        """Write the run's last words; the directory is given back."""
        try:
            self.finish_save()
            self.engine.update.refuse_after_failure()
            self.clock.flush()
        except HpczeroError as error:
            state, reason = "failed", str(error)
            raise
        finally:
            self._listening.close()
            self.clock.close()
            self._account.leave_out()  # the step that has begun is none
            self._requests = None
            self._claimed = None
            self._log.end(step, state, reason, self.world.size)
