"""A save of a loop of one's own beside the engine's states: numbers, generators, buffers."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from hpczero.checkpoint.shard_file import Array
from hpczero.comm.world import World
from hpczero.parallel.zero.engine import Engine
from hpczero.train import rank_states
from hpczero.train.arguments import table
from hpczero.train.loop_state import LoopState
from hpczero.train.rank_states import Generators, by_name


@dataclass(frozen=True)
class SavedValues:
    """The values of a save: equal ones need no second save. The digest is rank 0's."""

    step: int
    digest: bytes
    changes: int


NOT_SAVED = SavedValues(-1, b"", 0)


def digest_of(module: nn.Module, state: Mapping[str, Array], is_first: bool) -> bytes:
    digest = hashlib.sha256(rank_states.digest_of_buffers(module))
    for name, values in state.items() if is_first else ():
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


def packed_loop(
    world: World, engine: Engine, extra: Mapping[str, Any] | None, random: Generators | None
) -> dict[str, Array]:
    """Return the loop's state as rank 0's buffers. Collective; InputError on all ranks."""
    own = world.run_on_all(lambda: rank_states.states_of(table("random", random)))
    buffers = rank_states.buffers_that_differ(engine.module, world)
    facts = engine.update.facts()
    of_ranks = world.gather_objects([own, buffers])

    def packed() -> dict[str, Array]:
        if of_ranks is None:
            return {}
        generators_of, buffers_of = zip(*of_ranks, strict=True)
        states = by_name("random", generators_of), by_name("buffers", buffers_of)
        return LoopState(dict(table("extra", extra)), *states, facts).packed()

    return world.run_on_all(packed)
