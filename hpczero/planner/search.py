"""The search for the fastest layouts of a job that fit into its nodes (pure).

Memory comes first: a layout whose bytes exceed a device or a node is left out before its time is
asked for. What only saves memory (`layout_space.Saving`) is given up where the layout without it
does not fit: it never makes a step faster.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from math import inf
from operator import itemgetter

from hpczero.model.shapes import Layer
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster
from hpczero.planner.layout_space import Saving, Space
from hpczero.planner.layouts import Layout
from hpczero.planner.needs import Hardware
from hpczero.planner.platform import Platform
from hpczero.planner.room import Fit, Room
from hpczero.planner.rough_time import RoughTime
from hpczero.planner.step_seconds import StepSeconds, TimeModel
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Parallel, Spec

_OF_A_GRID = 3  # rows
_LEADING = 30  # layouts that lead on to others
_ROUNDS = 3
_MOST = 6000  # layouts that are timed before those near the fastest ones
_ROUGHLY = 1.7  # a rough time is not trusted further


@dataclass(frozen=True)
class Planned:
    """A layout on some nodes, what it needs there and how long a step takes."""

    layout: Layout
    spec: Spec
    nodes: Allocation
    fit: Fit
    time: StepSeconds

    @property
    def order(self) -> tuple[float, int]:
        """Sorts the fastest first; of equally fast ones that which needs the least memory."""
        return float(f"{self.time.seconds:.4g}"), self.fit.first.size


@dataclass
class Counts:
    """Layouts by what became of them."""

    tried: int = 0
    too_large: int = 0
    needless: int = 0  # they give up more than one that fits
    timed: int = 0


@dataclass
class Found:
    """The layouts on so many nodes that may fit, the fastest first."""

    nodes: Allocation
    planned: list[Planned] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    @property
    def best(self) -> Planned | None:
        """The fastest layout that fits."""
        return next((one for one in self.planned if one.fit.verdict == "fits"), None)

    def sort(self) -> None:
        self.planned.sort(key=lambda one: one.order)
        self.counts.timed = len(self.planned)


@dataclass(frozen=True)
class Machine:
    """The cluster as the search sees it."""

    cluster: Cluster
    platform: Platform

    @property
    def node(self) -> Hardware:
        node, device = self.cluster.node, self.cluster.device
        gpus = node.devices if device.kind == "cuda" else 0
        return Hardware(node.memory_gb, gpus, device.memory_gb if gpus else 0, node.nvme_gb)


class Search:
    """The search among the layouts of a job on some nodes."""

    def __init__(
        self, space: Space, layers: Sequence[Layer], machine: Machine, time: TimeModel
    ) -> None:
        self.space = space
        self.room = Room(layers, machine.platform, machine.node, space.nodes)
        self._time = time
        self._rough = RoughTime(layers, machine.cluster, machine.platform)
        self._seen: set[Layout] = set()
        self._found = Found(space.nodes)

    def judge(self, spec: Spec) -> Planned:
        """Return what a layout needs and how long it takes, whether it fits or not."""
        parallel = resolved(spec, self.space.nodes.node_of_rank)
        spec = spec.model_copy(update={"parallel": parallel})
        return self._timed(self.room.fit(spec), spec)

    def run(self, thorough: bool = False) -> Found:
        """Return the layouts that may fit, except those that give up memory in vain.

        All grids are looked at, in the order of their rough time, until that is `_ROUGHLY` times
        the smallest one of a layout that fits; and on a coarse choice of the keys that change
        little. The fastest ones then lead on to those that differ from them in one of these keys.
        `thorough`: all are tried.
        """
        limit = inf
        for roughly, parallel, layout in self._cores(thorough):
            if roughly > limit or len(self._found.planned) > (inf if thorough else _MOST):
                break
            fitting = (one for one in self._climb(parallel, layout) if one.fit.verdict == "fits")
            fastest = min(map(self._roughly, (one.spec for one in fitting)), default=inf)
            limit = inf if thorough else min(limit, _ROUGHLY * fastest)
        self._found.sort()
        for _ in range(0 if thorough else _ROUNDS):
            for one in distinct(self._found.planned, _LEADING):
                for parallel, layout in self._near(one.layout):
                    self._climb(parallel, layout)
            self._found.sort()
        return self._found

    def _cores(self, thorough: bool) -> list[tuple[float, Parallel, Layout]]:
        """Return layouts that give nothing up and their rough times, the fastest first."""
        space = self.space
        cores = []
        for parallel in space.parallels if thorough else space.coarse:
            innermost, *more = space.orders(parallel)
            orders = [order for order in more if thorough or order.startswith("tensor")]
            sizes = space.micro_batches(parallel)
            for order, states, size in product(
                (innermost, *orders), space.states(parallel), sizes if thorough else sizes[::2]
            ):
                layout = space.layout(parallel, order, states, size)
                cores.append((self._roughly(space.spec_with(layout)), parallel, layout))
        return sorted(cores, key=itemgetter(0))

    def _roughly(self, spec: Spec) -> float:
        nodes = self.space.nodes
        return self._rough(spec, nodes.ranks, nodes.ranks_per_node).seconds

    def _near(self, layout: Layout) -> Iterator[tuple[Parallel, Layout]]:
        """Yield the layouts that differ from this one in one of the keys that change little."""
        space = self.space
        states = layout.stage, layout.node_shared
        for parallel in space.on_grid(layout):
            orders = space.orders(parallel)
            order = layout.order if layout.order in orders else orders[0]
            yield parallel, space.layout(parallel, order, states, layout.micro_batch)
        parallel = space.parallel(layout)
        for order in space.orders(parallel):
            yield parallel, space.layout(parallel, order, states, layout.micro_batch)
        for other in space.states(parallel):
            yield parallel, space.layout(parallel, layout.order, other, layout.micro_batch)
        for size in space.micro_batches(parallel):
            if layout.micro_batch <= 2 * size <= 4 * layout.micro_batch:
                yield parallel, space.layout(parallel, layout.order, states, size)

    def _climb(self, parallel: Parallel, layout: Layout) -> list[Planned]:
        if layout in self._seen:
            return []
        self._seen.add(layout)
        savings = self.space.savings(parallel, layout.micro_batch)
        ladder = _Ladder(self.space, self.room, self._found.counts, layout, savings)
        planned = [self._timed(fit, spec) for spec, fit in ladder.climb()]
        self._found.planned += planned
        return planned

    def _timed(self, fit: Fit, spec: Spec) -> Planned:
        nodes = self.space.nodes
        seconds = self._time(spec, nodes.ranks, nodes.ranks_per_node)
        return Planned(Layout.of(spec), spec, nodes, fit, seconds)


@dataclass(frozen=True)
class _Ladder:
    """The ways of a layout to save memory, from none to all."""

    space: Space
    room: Room
    counts: Counts
    layout: Layout
    savings: Sequence[Saving]

    def climb(self) -> Iterator[tuple[Spec, Fit]]:
        """Yield the ways that may fit, but those that contain one that does."""
        self.counts.tried += len(self.savings)
        if not self._at(self.savings[-1])[1]:
            self.counts.too_large += len(self.savings)
            return
        fitting: list[Saving] = []
        for _, chain in groupby(self.savings, key=lambda saving: saving[1:]):
            ways = list(chain)
            if self._needless(ways[0], fitting):
                self.counts.needless += len(ways)
            elif not self._at(ways[-1])[1]:
                self.counts.too_large += len(ways)
            else:
                yield from self._recomputing(ways, fitting)

    def _recomputing(
        self, ways: Sequence[Saving], fitting: list[Saving]
    ) -> Iterator[tuple[Spec, Fit]]:
        for saving in ways:
            if self._needless(saving, fitting):
                self.counts.needless += 1
                continue
            spec, fit = self._at(saving)
            if not fit or fit.verdict == "does not fit":
                self.counts.too_large += 1
                continue
            if fit.verdict == "fits":
                fitting.append(saving)
            yield spec, fit

    def _needless(self, saving: Saving, fitting: Sequence[Saving]) -> bool:
        return any(saving.gives_up(other) for other in fitting)

    def _at(self, saving: Saving) -> tuple[Spec, Fit | None]:
        spec = self.space.spec_with(self.space.saving(self.layout, saving))
        return spec, self.room.may_fit(spec)


def distinct(planned: Sequence[Planned], count: int) -> list[Planned]:
    """Return the first so many that differ in something that matters.

    A row is left out that has the grid and the micro-batches of one above it, a time within half a
    percent of that, and no less memory to speak of. There are a few of each grid, or more where
    others are missing.
    """
    rows: list[Planned] = []
    more: list[Planned] = []
    of_grid = Counter[tuple[object, ...]]()
    for one in planned:
        if len(rows) == count:
            break
        if any(_alike(one, row) for row in (*rows, *more[:count])):
            continue
        grid = one.layout[:3]
        of_grid[grid] += 1
        (rows if of_grid[grid] <= _OF_A_GRID else more).append(one)
    return sorted((rows + more)[:count], key=lambda one: one.order)


def _alike(one: Planned, above: Planned) -> bool:
    key = one.layout[:3], one.layout.micro_batch
    if key != (above.layout[:3], above.layout.micro_batch):
        return False
    near = one.time.seconds <= 1.005 * above.time.seconds
    return near and one.fit.first.size >= 0.98 * above.fit.first.size
