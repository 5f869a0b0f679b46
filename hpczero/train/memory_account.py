"""The account of memory: what a rank holds at the widest moment of a step, by kind.

What was predicted stands beside what is measured, in memory.jsonl. A measured step is looked at
three times: when it begins, when its first backward begins, and at its end. Of what comes on top
of the states, that which is there when backward begins are the activations kept; the rest of the
peak is workspace. In the computer's memory the first look returns what malloc holds free to the
kernel: what is held then are the states, and Python with its libraries. Until the last look a
thread gives back what is freed, so the peak is what the step needs, not what malloc keeps.

The pages that come back in the step, the looks and the exchange between ranks cost time. Steps are
measured so seldom that this is less than a hundredth of the run's.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.device import Device
from hpczero.model.shapes import Layer
from hpczero.parallel.states import UpdateMemory
from hpczero.parallel.zero.engine import Engine
from hpczero.planner.memory import need
from hpczero.planner.needs import Need, of_account
from hpczero.planner.placement import Placement, placement
from hpczero.spec.schema import Spec
from hpczero.train import malloc, process
from hpczero.train.preflight import platform_of

_SHARE = 0.01  # of the run's time

Kinds = Mapping[str, int]  # bytes by kind


@dataclass(frozen=True)
class Expected:
    """A rank's place, and what the planner says that it needs; None: its layers are not known."""

    placement: Placement
    need: Need | None

    @property
    def rank(self) -> dict[str, int]:
        return self.need.rank if self.need else {}


def expect(
    world: World,
    spec: Spec,
    grid: Grid,
    layers: Sequence[Layer] | None,
    update: UpdateMemory | None = None,
) -> Expected:
    place = placement(spec, grid, world.rank)
    platform = replace(platform_of(world, spec), update=update)
    return Expected(place, need(spec, layers, place, platform) if layers else None)


class MemoryAccount:
    """On every rank; `end_step` is collective. The first step of a job is not measured."""

    def __init__(
        self, world: World, engine: Engine, expected: Expected, standing: Callable[[], Kinds]
    ) -> None:
        """`standing`: what this rank has allocated from step to step, by kind. Collective."""
        self._world = world
        self._engine = engine
        self._standing = standing
        self._expected = expected
        files = expected.need.files if expected.need else 0
        self._predicted = world.gather_objects({**expected.rank, "files": files})
        self._left = 1  # steps until the next one that is measured
        self._step: _Step | None = None  # that is measured
        self._began = time.perf_counter()
        self._usual = 0.0  # seconds of the last step that was not measured
        self._peak = 0  # before the kernel's began anew
        self._held = 0  # at most, in a measured step
        engine.on_backward = self._at_backward

    @property
    def most(self) -> dict[str, int]:
        """The most bytes of this process that were resident, and that it held in a measured step.

        The latter is left out if no step was measured.
        """
        held = {"held": self._held} if self._held else {}
        return {"peak_resident": max(self._peak, process.peak_resident()), **held}

    def begin_step(self) -> None:
        self._began = time.perf_counter()
        if self._left:
            self._left -= 1
            return
        self._peak = max(self._peak, process.peak_resident())
        self._step = _Step(self._world.device, self._own)

    def leave_out(self) -> None:
        """Do not measure the step that has begun."""
        if self._step:
            self._step.leave()
        self._step = None

    def end_step(self, number: int) -> dict[str, Any] | None:
        """Return the line of a measured step, on rank 0."""
        seconds = time.perf_counter() - self._began
        step, self._step = self._step, None
        if step is None:
            self._usual = seconds
            self._began = time.perf_counter()  # a loop without a directory begins no step
            return None
        began = time.perf_counter()
        found = step.end()
        self._held = max(self._held, found["held"])
        arena = self._engine.arena
        if arena.of_zeros:
            found["files"] = sum(arena.sizes[kind] for kind in arena.of_zeros)
        of_ranks = self._world.gather_objects(found)
        took = step.seconds + time.perf_counter() - began
        seconds -= step.seconds
        cost = took + max(0.0, seconds - self._usual)
        self._left = self._world.broadcast_object(steps_left_out(cost, seconds))
        if of_ranks is None or not found["held"]:
            return None
        assert self._predicted is not None
        return {"step": number} | fullest_rank(self._world, of_ranks, self._predicted)

    def _own(self) -> dict[str, int]:
        return self._expected.placement.part_of_rank(self._standing())

    def _at_backward(self) -> None:
        if self._step:
            self._step.at_backward()


class _Step:
    """The looks at one step, in the memory of the device or else in the computer's."""

    def __init__(self, device: Device, standing: Callable[[], Kinds]) -> None:
        began = time.perf_counter()
        self._device = device
        self._standing = standing
        self._kept: int | None = None  # unknown
        self._giving_back: malloc.GivingBack | None = None
        memory = device.memory()
        if memory:
            device.new_peak()
            self._held = memory.held
        else:
            self._giving_back = malloc.GivingBack()
            self._held = process.held()
            self._counts = process.forget_peak()
            self._resident = process.peak_resident()
        self._before = sum(self._states().values())
        self._given_out = self._besides()
        self.seconds = time.perf_counter() - began

    def at_backward(self) -> None:
        began = time.perf_counter()
        now = self._besides()
        if self._kept is None and now is not None and self._given_out is not None:
            self._kept = max(0, now - self._given_out)
        self.seconds += time.perf_counter() - began

    def end(self) -> dict[str, Any]:
        """Return what is held at the widest moment, and its kinds."""
        self.leave()
        states = self._states()
        on_top = self._on_top()
        new = sum(states.values()) - self._before  # a copy for a checkpoint, buffers
        held = self._held + on_top if self._held else 0  # unknown
        found = by_kind(states, held, on_top - new, self._kept)
        figures: dict[str, Any] = {"held": held, "measured": found}
        if self._device.memory():
            held = process.held()
            on_host = by_kind(of_account(self._standing(), "host"), held, 0, None)
            figures["on_host"] = {"held": held, "measured": on_host}
        return figures

    def leave(self) -> None:
        if self._giving_back:
            self._giving_back.end()

    def _states(self) -> dict[str, int]:
        return of_account(self._standing(), "device" if self._device.memory() else "all")

    def _besides(self) -> int | None:
        """Return the bytes given out now besides those of the kinds that are known."""
        memory = self._device.memory()
        given_out = memory.held if memory else malloc.given_out()
        return None if given_out is None else given_out - sum(self._states().values())

    def _on_top(self) -> int:
        """Return how much more than at the beginning was held at the widest moment since."""
        if self._device.memory():
            return self._device.new_peak() - self._held
        if self._counts:
            return process.peak_resident() - self._resident
        return self._kept or 0


def by_kind(states: Kinds, held: int, on_top: int, kept: int | None) -> dict[str, int]:
    """Return the bytes by kind, which add up to `held` (pure).

    `on_top`: of them, what came on top of the states in the step; `kept`: of that, what backward
    found. Where it is not known, all is workspace.
    """
    kept = min(max(0, on_top), kept or 0)
    found = Counter(states)
    found["activations"] += kept  # beside those that are away
    found["workspace"] += max(0, on_top) - kept
    found["runtime"] += held - found.total()
    return {kind: size for kind, size in found.items() if size}


def steps_left_out(cost: float, seconds: float) -> int:
    """Return how many steps of so many seconds go unmeasured after one that cost so much (pure)."""
    return max(1, math.ceil(cost / (_SHARE * seconds)))


def fullest_rank(
    world: World, of_ranks: Sequence[dict[str, Any]], predicted: Sequence[Kinds]
) -> dict[str, Any]:
    """Return the figures of the rank that holds the most, beside what was predicted of it."""
    rank = max(range(len(of_ranks)), key=lambda rank: of_ranks[rank]["held"])
    found, said = of_ranks[rank], dict(predicted[rank])
    files = said.pop("files")
    node = world.node_of_rank[rank]
    neighbours = (one for one, of in zip(of_ranks, world.node_of_rank, strict=True) if of == node)
    account = "device" if "on_host" in found else "all"
    line = {
        "rank": rank,
        "host": world.hosts[rank],
        "held": found["held"],
        "node": sum(one["held"] for one in neighbours),
        "predicted": _some(of_account(said, account)),
        "measured": found["measured"],
    }
    if "on_host" in found:
        on_host = _some(of_account(said, "host"))
        line["on_host"] = {"predicted": on_host, **found["on_host"]}
    if "files" in found:
        line["files"] = {"predicted": files, "measured": found["files"]}
    return line


def _some(kinds: Kinds) -> dict[str, int]:
    return {kind: size for kind, size in kinds.items() if size}
