"""The run of a loop of one's own: its directory, its checkpoints, and the requests to stop it.

The directory is claimed when the loop first asks for something that lies there. A save that goes on
behind the loop is brought to its end at the first step boundary after all ranks have written.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpczero import env
from hpczero.checkpoint.save import Saved, SaveFailed
from hpczero.checkpoint.shard_file import WIDTH, Array
from hpczero.comm.grid import Grid
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.parallel.zero.engine import Engine, StepResult
from hpczero.spec.schema import Spec
from hpczero.text import first_few
from hpczero.train import process, rank_states, setup
from hpczero.train.arguments import refuse_what_differs, table
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.loop_state import LoopState
from hpczero.train.process import Deadline, StopRequests
from hpczero.train.rank_states import Generators
from hpczero.train.restored_loop import RestoredLoop
from hpczero.train.resume import Loaded, look_ahead, other_tokens, states
from hpczero.train.run_directory import RunDirectory

_MOST_STEPS = 1 << 62


@dataclass(frozen=True)
class Position:
    """The place where a loop goes on: after so many steps, with what was saved as `extra`.

    `path`: the checkpoint; None: there is none, and the loop begins.
    """

    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


class OwnRun:
    """On every rank; all methods are collective."""

    def __init__(self, spec: Spec, world: World, grid: Grid, engine: Engine) -> None:
        self.spec = spec
        self.world = world
        self.grid = grid
        self.engine = engine
        self._saved = -1, b""  # step of the last save of this run, and a digest of its values
        self._begins: tuple[int, Path | None] | None = (0, None)  # until the first save, at most
        self._trims = True  # the next step's metrics go behind those of the steps before it
        self._saving = b""  # the digest of the save in flight
        self._read: dict[str, str] = {}  # what data the loop reads, as a run's identity
        self._resumed: Mapping[str, str] = {}  # what data the loop had read before
        self._directory: RunDirectory | None = None  # rank 0's, once it is claimed
        self._claimed: Checkpoints | None = None
        self._requests: StopRequests | None = None
        self._listening = ExitStack()  # to requests
        self._deadline: Deadline | None = None
        self.jumps = 0  # loads so far: what was read ahead for the steps before is of no use
        self._began = time.monotonic()
        self._stepped = time.monotonic()

    # -- the directory ---------------------------------------------------------------------------

    def _checkpoints(self) -> Checkpoints:
        """Return the run's checkpoints, with the run directory claimed."""
        if self._claimed is None:
            first = self.world.rank == 0
            spec = self.spec
            self.world.run_on_all(lambda: look_ahead(spec) if first else None)
            self._directory = self.world.run_on_all(
                lambda: RunDirectory.claim(spec, resume=False, fresh=False) if first else None
            )
            ranks = setup.places_of_ranks(self.world)
            if self._directory:
                packages = setup.packages()
                git = setup.git_state()
                self._directory.event("start", ranks=ranks, packages=packages, git=git, loop="own")
            kept = len(states(self.engine, self.engine.units[0]))
            copies = WIDTH * kept * self.engine.owned_elements
            behind = spec.checkpoint.asynchronous
            if behind and not setup.has_room(self.world, copies):
                behind = False
                self._warn(
                    "no room for a copy of the states: the loop waits while a checkpoint is saved"
                )
            self._claimed = self._in_folder(None, behind)
        return self._claimed

    def _in_folder(self, path: Path | None, behind: bool = False) -> Checkpoints:
        """Return the checkpoints in this folder (None: the run's); `behind`: saved from copies."""
        engine, read = self.engine, self._read
        return Checkpoints(self.spec, self.world, self.grid, engine, read, path, behind, True)

    def _warn(self, what: str) -> None:
        if self.world.rank == 0:
            print(f"hpczero: WARN {what}", file=sys.stderr, flush=True)
        if self._directory:
            self._directory.event("WARN", what=what)

    # -- begin -----------------------------------------------------------------------------------

    def resume(self, random: Generators | None) -> Position:
        """Load the checkpoint that the run goes on from, if there is one."""
        generators = self.world.run_on_all(lambda: table("random", random))
        self.finish_save()
        checkpoints = self._checkpoints()
        resumed = checkpoints.resume()
        for warning in resumed.warnings:
            self._warn(warning)
        self._begins = None
        self._trims = True
        self._saved = -1, b""
        if resumed.path is None or resumed.loaded is None:
            return Position()
        if self._directory:
            path = str(resumed.path)
            changed = {"changed": "; ".join(resumed.changed)} if resumed.changed else {}
            self._directory.event("resume", step=resumed.step, path=path, **changed)
        return self._taken(checkpoints, resumed.loaded, resumed.step, resumed.path, generators)

    def load(self, path: str | Path, only_weights: bool, random: Generators | None) -> Position:
        """Load a checkpoint of any run, or the newest of a run's directory."""
        generators = self.world.run_on_all(lambda: table("random", random))
        given = {"path": str(path), "weights_only": str(only_weights)}
        refuse_what_differs(self.world, "engine.load", given)
        self.finish_save()
        folder = _path(path)
        checkpoints = self._in_folder(folder)
        loaded, at = checkpoints.load(folder, only_weights)
        step = 0 if only_weights else loaded.content.state.step
        self._begins = step, at
        self._trims = True
        self._saved = -1, b""
        return self._taken(checkpoints, loaded, step, at, generators)

    def _taken(
        self,
        checkpoints: Checkpoints,
        loaded: Loaded,
        step: int,
        path: Path,
        generators: Generators,
    ) -> Position:
        self.jumps += 1
        self._resumed = {} if loaded.weights_only else loaded.identity
        checkpoints.refresh_weights()
        restored = RestoredLoop(checkpoints, loaded, str(path))
        for warning in restored.take_over(generators):
            self._warn(warning)
        return Position(step, loaded.loop.extra, path)

    def reads(self, identity: Mapping[str, str]) -> None:
        """Note what data the loop reads; InputError if it goes on from a run on others."""
        if problem := other_tokens(self._resumed, identity):
            raise InputError(f"the checkpoint that the loop goes on from {problem}")
        self._read.update(identity)
        if self._claimed:
            self._claimed.identity.update(identity)

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
        self.world.run_on_all(lambda: _refuse_step(step))
        given = {"step": str(step), "folder": str(folder), "wait": str(waits)}
        refuse_what_differs(self.world, "engine.save", given)
        self.finish_save()
        if folder is None:
            self._save(self._checkpoints(), step, self._state(extra, random), waits)
            return
        elsewhere = self._in_folder(_path(folder) / "checkpoints")
        state = self._state(extra, random)
        if self._attempt(lambda: elsewhere.begin(step, True, state)):
            self._attempt(lambda: self._note(elsewhere.saver.conclude()))  # all are kept there

    def save_at_end(
        self, step: int, extra: Mapping[str, Any] | None, random: Generators | None
    ) -> bool:
        """Save this step, unless it is saved with these values; return True if it is saved."""
        self.finish_save()
        checkpoints = self._checkpoints()
        state = self._state(extra, random)
        is_saved = self._saved == (step, _digest(state))
        if not self.world.broadcast_object(is_saved):
            self._save(checkpoints, step, state, waits=True)
        return self._saved[0] == step

    def _save(
        self, checkpoints: Checkpoints, step: int, state: Mapping[str, Array], waits: bool
    ) -> None:
        if self._begins:
            for warning in checkpoints.make_way(*self._begins):
                self._warn(warning)
            self._begins = None
        self._saving = _digest(state)
        self._attempt(lambda: checkpoints.begin(step, waits, state))
        if waits or not checkpoints.asynchronous:
            self.finish_save()

    def _state(
        self, extra: Mapping[str, Any] | None, random: Generators | None
    ) -> dict[str, Array]:
        """Return the loop's state as rank 0's buffers; InputError on all ranks."""
        self.engine.refuse_averaged("save")
        own = self.world.run_on_all(lambda: rank_states.states_of(table("random", random)))
        buffers = rank_states.buffers_that_differ(self.engine.module, self.world)
        facts = self.engine.update.facts()
        of_ranks = self.world.gather_objects([own, buffers])

        def packed() -> dict[str, Array]:
            if of_ranks is None:
                return {}
            generators_of, buffers_of = zip(*of_ranks, strict=True)
            states = _by_name("random", generators_of), _by_name("buffers", buffers_of)
            return LoopState(dict(table("extra", extra)), *states, facts).packed()

        return self.world.run_on_all(packed)

    def finish_save(self) -> None:
        """Bring the save that is in flight, if any, to its end."""
        checkpoints = self._claimed
        if checkpoints and checkpoints.saver.in_flight:
            self._attempt(lambda: self._conclude(checkpoints))

    def _conclude(self, checkpoints: Checkpoints) -> None:
        directory = self._directory
        run_while_polling(self.world, lambda: directory.sync() if directory else None)
        saved, not_removed = checkpoints.conclude()
        self._saved = saved.step, self._saving
        if not_removed:
            self._warn(not_removed)
        self._note(saved)

    def _note(self, saved: Saved) -> None:
        if self._deadline:
            self._deadline.saved(saved.seconds)
        if self._directory:
            self._directory.event("save", **_facts(saved))

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Carry out a part of a save; a failure ends the loop, or is only said (on_error)."""
        try:
            action()
        except SaveFailed as error:
            if self.spec.checkpoint.on_error == "stop":
                raise
            self._warn(str(error))
            return False
        return True

    # -- every step ------------------------------------------------------------------------------

    def stepped(self, step: int, lr: float, result: StepResult) -> None:
        """Note a step that is done, and bring a save to its end that all ranks have written."""
        now = time.monotonic()
        seconds, self._stepped = now - self._stepped, now
        if self._claimed is None:
            return
        if self._directory:
            if self._trims:
                self._directory.keep_metrics_before(step)
            skipped = {"skipped": True} if result.bad else {}
            values = {"step": step, "grad_norm": result.grad_norm, "lr": lr}
            self._directory.metrics(values | {"step_seconds": seconds} | skipped)
        self._trims = False
        if self._claimed.saver.in_flight:
            writing = torch.tensor([not self._claimed.saver.written], dtype=torch.float64)
            self.world.everyone.all_reduce(writing)
            if not writing.item():
                self.finish_save()

    def should_stop(self) -> str:
        """Return why the loop is to end here, on all ranks alike; "" if it is not."""
        if self._requests is None:
            self._checkpoints()
            if self._directory:
                kept = len(states(self.engine, self.engine.units[0]))
                owned = self.engine.owned_elements
                estimate = process.seconds_of_save(self.world, owned, kept)
                self._deadline = Deadline(env.deadline(), estimate)
            folder = self._directory.path if self._directory else None
            self._requests = StopRequests(folder, self._deadline)
            self._listening.enter_context(self._requests)
        return process.agreed_reason(self.world, self._requests)

    def end(self, step: int, state: str, reason: str = "") -> None:
        """Write the run's last words; the directory is given back."""
        try:
            self.finish_save()
        except SaveFailed as error:
            state, reason = "failed", str(error)
            raise
        finally:
            self._give_back(step, state, reason)

    def _give_back(self, step: int, state: str, reason: str) -> None:
        self._listening.close()
        self._requests = None
        if self._directory:
            seconds = time.monotonic() - self._began
            summary = {"state": state, "reason": reason, "steps": step, "final_loss": None}
            self._directory.summary(summary | {"ranks": self.world.size, "wall_seconds": seconds})
            self._directory.event("stop", state=state, step=step, reason=reason)
            self._directory.close()
            self._directory = None
        self._claimed = None


def _path(path: str | Path) -> Path:
    return Path(env.expand(str(path))).absolute()


def _refuse_step(step: object) -> None:
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise InputError(f"save: step = {step!r} must be a whole number from 0 to 2**62 - 1")


def _digest(state: Mapping[str, Array]) -> bytes:
    """Return what differs where the buffers do."""
    digest = hashlib.sha256()
    for name, values in state.items():
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


def _by_name(what: str, of_ranks: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return name -> the states of the ranks; InputError: not all ranks have the same names."""
    for rank, of_rank in enumerate(of_ranks):
        if other := of_ranks[0].keys() ^ of_rank.keys():
            names = first_few(sorted(map(str, other)))
            raise InputError(f"{what}: {names} is on rank 0 or on rank {rank}, not on both")
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


def _facts(saved: Saved) -> dict[str, Any]:
    return {
        "step": saved.step,
        "path": str(saved.path),
        "bytes": saved.size,
        "seconds": saved.seconds,
    }
