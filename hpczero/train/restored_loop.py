"""A loop of one's own takes over the rest of a checkpoint, besides the tensors of the model.

These are what its optimizer keeps, and what each rank had of its own: states of generators, and
buffers. The latter fit the same grid of ranks alone.
"""

from collections.abc import Mapping
from typing import Any

from hpczero.checkpoint.shard_file import Damaged
from hpczero.errors import InputError
from hpczero.parallel.zero.kernel_update import FACTS_OF_ADAMW
from hpczero.text import first_few, printable
from hpczero.train import rank_states
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.rank_states import Generators
from hpczero.train.restored_states import AVERAGE
from hpczero.train.resume import Loaded


class RestoredLoop:
    """A checkpoint whose tensors the engine has. On every rank."""

    def __init__(self, checkpoints: Checkpoints, loaded: Loaded, where: str) -> None:
        self._loaded = loaded
        self._where = where
        self._slots = checkpoints.slots
        self._engine = checkpoints.engine
        self._world = checkpoints.world
        self._grid = {axis: checkpoints.grid.size(axis) for axis in checkpoints.grid.axes}

    def take_over(self, generators: Generators) -> list[str]:
        """Restore the rest; return warnings. Collective; InputError on all ranks."""
        if self._loaded.weights_only:
            self._engine.begin_anew()
            return []
        return self._optimizer() + self._ranks(generators)

    def _optimizer(self) -> list[str]:
        """Take over what the optimizer keeps besides its tensors; an average begins or ends."""
        self._world.run_on_all(self._facts)
        before, now = (AVERAGE in slots for slots in (self._loaded.content.slots, self._slots))
        if now and not before:
            self._engine.update.begin_average()
            step = self._loaded.content.state.step
            return [
                f"{self._where} has no average of the weights: it begins with those of step {step}"
            ]
        if before and not now:
            return [f"{self._where} has an average of the weights, which goes no further"]
        return []

    def _facts(self) -> None:
        """InputError: they are another optimizer's, or nobody's, as a stranger may write them."""
        try:
            self._engine.update.restore(self._loaded.loop.optimizer or FACTS_OF_ADAMW)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"what its optimizer keeps does not fit: {printable(str(error), 200)}"
            raise InputError(f"{self._where}: {what}") from error

    def _ranks(self, generators: Generators) -> list[str]:
        """Give this rank what it had of its own, if the grid is the same; say so if not."""
        loop = self._loaded.loop
        known, where = loop.generators, self._where
        warnings = []
        if left := [name for name in known if name not in generators]:
            names = first_few(left)
            warnings.append(f"{where} has states of generators that are not asked for: {names}")
        grid = self._loaded.content.grid
        if grid == self._grid:
            self._world.run_on_all(lambda: self._own(generators))
            return warnings
        kept = []
        if generators:
            kept.append("generators stay as this job has seeded them")
        if loop.buffers:
            kept.append(f"{first_few(list(loop.buffers))} becomes rank 0's on all ranks")
        if kept:
            grids = f"{_shown(grid)}; here {_shown(self._grid)}"
            warnings.append(f"{where} was saved on another grid ({grids}): {'; '.join(kept)}")
        return warnings

    def _own(self, generators: Generators) -> None:
        """InputError: what is there is no state of such a generator or buffer."""
        loop, rank = self._loaded.loop, self._world.rank
        try:
            saved = {name: loop.generators[name][rank] for name in generators}
            rank_states.set_states(generators, saved)
            buffers = {name: states[rank] for name, states in loop.buffers.items()}
            rank_states.set_buffers(self._engine.module, buffers)
        except (Damaged, IndexError) as error:
            raise InputError(f"{self._where}: {error}") from error


def _shown(grid: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in grid.items())
