"""The run of a loop of one's own: its directory, its checkpoints, and the requests to stop it.

The directory is claimed when the loop first asks for something that lies there. A save that goes on
behind the loop is brought to its end at the first step boundary after all ranks have written.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpczero import env
from hpczero.checkpoint.save import Saved, SaveFailed
from hpczero.checkpoint.shard_file import WIDTH, Damaged
from hpczero.comm.grid import Grid
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.parallel.zero.engine import Engine, StepResult
from hpczero.parallel.zero.update import FACTS_OF_ADAMW
from hpczero.spec.schema import Spec
from hpczero.text import first_few, printable
from hpczero.train import process, rank_states, setup
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.loop_state import LoopState
from hpczero.train.process import Deadline, StopRequests
from hpczero.train.rank_states import Generators
from hpczero.train.resume import AVERAGE, Loaded, look_ahead, other_tokens, states
from hpczero.train.run_directory import RunDirectory

_MOST_STEPS = 1 << 62


@dataclass(frozen=True)
class Position:
    """Where a loop goes on: after so many steps, with what was saved as `extra`.

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
        self.saved = -1  # the step of the newest checkpoint of this run that is known
        self._read: dict[str, str] = {}  # what data the loop reads, as a run's identity
        self._resumed: Mapping[str, str] = {}  # what data the loop had read before
        self._directory: RunDirectory | None = None  # rank 0's, once it is claimed
        self._claimed: Checkpoints | None = None
        self._requests: StopRequests | None = None
        self._deadline: Deadline | None = None
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
                lambda: RunDirectory.claim(spec, False, False) if first else None
            )
            ranks = setup.places_of_ranks(self.world)
            if self._directory:
                packages = setup.packages()
                git = setup.git_state()
                self._directory.event("start", ranks=ranks, packages=packages, git=git, loop="own")
            self._claimed = self._made(None, spec.checkpoint.asynchronous)
        return self._claimed

    def _made(self, path: Path | None, behind: bool) -> Checkpoints:
        """Return the checkpoints in this folder (None: the run's); `behind`: saved from copies."""
        kept = len(states(self.engine, self.engine.units[0]))
        copies = WIDTH * kept * self.engine.owned_elements
        if behind and not setup.has_room(self.world, copies):
            behind = False
            self._warn(
                "no room for a copy of the states: the loop waits while a checkpoint is saved"
            )
        made = Checkpoints(self.spec, self.world, self.grid, self.engine, self._read, path, behind)
        self.world.run_on_all(made.refuse_what_cannot_be_saved)
        return made

    def _warn(self, what: str) -> None:
        if self.world.rank == 0:
            print(f"hpczero: WARN {what}", file=sys.stderr, flush=True)
        if self._directory:
            self._directory.event("WARN", what=what)

    # -- begin -----------------------------------------------------------------------------------

    def resume(self, generators: Generators) -> Position:
        """Load the checkpoint that the run goes on from, if there is one."""
        _refuse_no_table("random", generators)
        self.finish_save()
        checkpoints = self._checkpoints()
        resumed = checkpoints.resume()
        for warning in resumed.warnings:
            self._warn(warning)
        if self._directory:
            self._directory.keep_metrics_before(resumed.step + 1)
        self.saved = resumed.step if resumed.path else -1
        if resumed.path is None or resumed.loaded is None:
            return Position()
        if self._directory:
            path = str(resumed.path)
            changed = {"changed": "; ".join(resumed.changed)} if resumed.changed else {}
            self._directory.event("resume", step=resumed.step, path=path, **changed)
        return self._taken(checkpoints, resumed.loaded, resumed.step, resumed.path, generators)

    def load(self, path: Path, only_weights: bool, generators: Generators) -> Position:
        """Load a checkpoint of any run, or the newest of a run's directory."""
        _refuse_no_table("random", generators)
        self.finish_save()
        checkpoints = self._made(path, behind=False)
        loaded, at = checkpoints.load(path, only_weights)
        step = 0 if only_weights else loaded.content.state.step
        return self._taken(checkpoints, loaded, step, at, generators)

    def _taken(
        self,
        checkpoints: Checkpoints,
        loaded: Loaded,
        step: int,
        path: Path,
        generators: Generators,
    ) -> Position:
        checkpoints.refresh_weights()
        self._resumed = {} if loaded.weights_only else loaded.identity
        if not loaded.weights_only:
            self._follow(checkpoints, loaded, str(path))
            self._set_states(loaded, generators, str(path))
        else:
            self.engine.begin_anew()
        return Position(step, loaded.loop.extra, path)

    def _follow(self, checkpoints: Checkpoints, loaded: Loaded, where: str) -> None:
        """Take over what the optimizer keeps besides its tensors, and begin or end an average."""
        self.world.run_on_all(lambda: self._restore(loaded.loop.optimizer or FACTS_OF_ADAMW, where))
        before, now = (AVERAGE in slots for slots in (loaded.content.slots, checkpoints.slots))
        if now and not before:
            self.engine.update.begin_average()
            self._warn(
                f"{where} has no average of the weights: it begins with those of step "
                f"{loaded.content.state.step}"
            )
        if before and not now:
            self._warn(f"{where} has an average of the weights, which goes no further")

    def _restore(self, facts: Mapping[str, Any], where: str) -> None:
        """InputError: they are another optimizer's, or nobody's, as a stranger may write them."""
        try:
            self.engine.update.restore(facts)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"what its optimizer keeps does not fit: {printable(str(error), 200)}"
            raise InputError(f"{where}: {what}") from error

    def _set_states(self, loaded: Loaded, generators: Generators, where: str) -> None:
        """Give this rank what it had of its own, if the grid is the same; say so if not."""
        loop = loaded.loop
        known = loop.generators
        self.world.run_on_all(lambda: rank_states.refuse_unknown(generators, known, where))
        if left := [name for name in known if name not in generators]:
            self._warn(
                f"{where} has states of generators that are not asked for: {first_few(left)}"
            )
        grid = {axis: self.grid.size(axis) for axis in self.grid.axes}
        if loaded.content.grid == grid:
            self.world.run_on_all(lambda: self._set_own(loop, generators, where))
            return
        kept = []
        if generators:
            kept.append("generators stay as this job has seeded them")
        if loop.buffers:
            kept.append(f"{first_few(list(loop.buffers))} becomes rank 0's on all ranks")
        if kept:
            grids = f"{_shown(loaded.content.grid)}; here {_shown(grid)}"
            self._warn(f"{where} was saved on another grid ({grids}): {'; '.join(kept)}")

    def _set_own(self, loop: LoopState, generators: Generators, where: str) -> None:
        """InputError: what is there is no state of such a generator or buffer."""
        rank = self.world.rank
        try:
            saved = {name: loop.generators[name][rank] for name in generators}
            rank_states.set_states(generators, saved)
            buffers = {name: states[rank] for name, states in loop.buffers.items()}
            rank_states.set_buffers(self.engine.module, buffers)
        except (Damaged, IndexError) as error:
            raise InputError(f"{where}: {error}") from error

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
        extra: Mapping[str, Any],
        generators: Generators,
        folder: Path | None,
        waits: bool,
    ) -> None:
        """Save a checkpoint of this step; behind the loop, unless it `waits`."""
        self.engine.refuse_averaged("save")
        if type(step) is not int or not 0 <= step < _MOST_STEPS:
            raise InputError(f"save: step = {step!r} must be a whole number from 0 to 2**62 - 1")
        _refuse_no_table("extra", extra)
        _refuse_no_table("random", generators)
        state = self._buffers(extra, generators)
        self.finish_save()
        if folder:
            elsewhere = self._made(folder / "checkpoints", behind=False)
            if self._attempt(lambda: elsewhere.begin(step, True, state)):
                self._attempt(lambda: self._note(elsewhere.saver.conclude()))  # all are kept there
            return
        checkpoints = self._checkpoints()
        self._attempt(lambda: checkpoints.begin(step, waits, state))
        if waits or not checkpoints.asynchronous:
            self.finish_save()

    def _buffers(self, extra: Mapping[str, Any], generators: Generators) -> dict[str, Any]:
        """Return the loop's state as rank 0's buffers; InputError on all ranks."""
        own = self.world.run_on_all(lambda: rank_states.states_of(generators))
        buffers = rank_states.buffers_that_differ(self.engine.module, self.world)
        facts = self.engine.update.facts()
        of_ranks = self.world.gather_objects([own, buffers])

        def packed() -> dict[str, Any]:
            if of_ranks is None:
                return {}
            generators_of, buffers_of = zip(*of_ranks, strict=True)
            states = _by_name("random", generators_of), _by_name("buffers", buffers_of)
            return LoopState(dict(extra), *states, facts).packed()

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
        self.saved = saved.step
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
        if self._claimed is None:
            return
        now = time.monotonic()
        if self._directory:
            skipped = {"skipped": True} if result.bad else {}
            values = {"step": step, "grad_norm": result.grad_norm, "lr": lr}
            values["step_seconds"] = now - self._stepped
            self._directory.metrics(values | skipped)
        self._stepped = now
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
                estimate = process.seconds_of_save(self.world, self.engine.owned_elements)
                self._deadline = Deadline(env.deadline(), estimate)
            folder = self._directory.path if self._directory else None
            self._requests = StopRequests(folder, self._deadline).__enter__()
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
        if self._requests:
            self._requests.__exit__(None, None, None)
            self._requests = None
        if self._directory:
            seconds = time.monotonic() - self._began
            summary = {"state": state, "reason": reason, "steps": step, "final_loss": None}
            self._directory.summary(summary | {"ranks": self.world.size, "wall_seconds": seconds})
            self._directory.event("stop", state=state, step=step, reason=reason)
            self._directory.close()
            self._directory = None
        self._claimed = None


def _refuse_no_table(what: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise InputError(
            f"{what} is a {type(given).__name__}: give a table of names, as {what}={{'name': ...}}"
        )


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


def _shown(grid: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in grid.items())
