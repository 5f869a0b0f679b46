"""The search for the fastest layouts of a job that fit into its nodes (pure).

All layouts are looked at, and few are timed: each cheap look leaves out what cannot be among the
best. A grid with a size of micro-batches is bounded by what its ranks compute; a layout that gives
nothing up by its time in closed form; and what only saves memory (`layout_space.Saving`) is given
up where the layout without it does not fit, as it never makes a step faster. What is left, and
fits, is timed by its schedule.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import inf
from operator import itemgetter

from hpczero.model.shapes import Layer
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster
from hpczero.planner.layout_space import Saving, Space
from hpczero.planner.layouts import Layout
from hpczero.planner.platform import Platform
from hpczero.planner.room import Fit, Room
from hpczero.planner.step_time import StepTime, StepTimes
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Parallel, Spec

_OF_A_GRID = 3  # rows
_SLOWER = 2.0  # times the fastest one: of no interest, whatever else there is
_BOUNDED = 1.01  # a bound in closed form may be above the time by less


@dataclass(frozen=True)
class Planned:
    """A layout on some nodes, what it needs there and how long a step takes."""

    layout: Layout
    spec: Spec
    nodes: Allocation
    fit: Fit
    time: StepTime

    @property
    def order(self) -> tuple[float, int]:
        """Sorts the fastest first; of equally fast ones that which needs the least memory."""
        return float(f"{self.time.seconds:.4g}"), self.fit.first.size


@dataclass
class Counts:
    """Layouts by what became of them."""

    all: int = 0
    slower: int = 0
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

    @property
    def first(self) -> Planned:
        """The best, or the first of those that are too close to call."""
        return self.best or self.planned[0]

    def rows(self, count: int) -> list[Planned]:
        """Return the rows of a table of so many; the best is among them."""
        rows = distinct(self.planned, count)
        return rows if self.best is None or self.best in rows else [*rows[:-1], self.best]


@dataclass(frozen=True)
class Machine:
    """The cluster as the search sees it."""

    cluster: Cluster
    platform: Platform


class Search:
    """The search among the layouts of a job on some nodes, for so many rows of a table."""

    def __init__(
        self, space: Space, layers: Sequence[Layer], machine: Machine, rows: int = 10
    ) -> None:
        self.space = space
        self.room = Room(layers, machine.platform, machine.cluster.hardware, space.nodes)
        self._times = StepTimes(layers, machine.cluster, machine.platform)
        self._rows = rows
        self._found = Found(space.nodes)
        self._fastest: dict[tuple[object, int], float] = {}  # of a grid and a size, what fits

    def judge(self, spec: Spec) -> Planned:
        """Return what a layout needs and how long it takes, whether it fits or not."""
        parallel = resolved(spec, self.space.nodes.node_of_rank)
        spec = spec.model_copy(update={"parallel": parallel})
        return self._timed(self.room.fit(spec), spec)

    def run(self, thorough: bool = False) -> Found:
        """Return the layouts that may fit, except those that are slower or give memory up in vain.

        `thorough`: slower ones are there, too.
        """
        counts = self._found.counts
        for bound, parallel, size in self._groups():
            savings = self.space.savings(parallel, size)
            cores = list(self._cores(parallel, size))
            counts.all += len(savings) * len(cores)
            at_least = [(bound, layout) for layout in cores]
            if not thorough and bound <= self._limit * _BOUNDED:
                at_least = [(self._at_least(self.space.spec_with(one)), one) for one in cores]
            for least, layout in sorted(at_least, key=itemgetter(0)):  # the limit falls sooner
                if not thorough and least > self._limit * _BOUNDED:
                    counts.slower += len(savings)
                else:
                    self._climb(layout, savings, thorough)
        self._found.planned.sort(key=lambda one: one.order)
        counts.timed = len(self._found.planned)
        return self._found

    def _groups(self) -> list[tuple[float, Parallel, int]]:
        """Return each grid with each size of micro-batches, by what no layout of it falls below."""
        space, nodes = self.space, self.space.nodes
        groups = []
        for parallel in space.parallels:
            order = space.orders(parallel)[0]
            *_, states = space.states(parallel, order)  # each rank adds up the fewest gradients
            for size in space.micro_batches(parallel):
                spec = space.spec_with(space.layout(parallel, order, states, size))
                groups.append((self._times.of_computing(spec, nodes), parallel, size))
        return sorted(groups, key=itemgetter(0))

    def _cores(self, parallel: Parallel, size: int) -> Iterator[Layout]:
        """Yield the layouts that give nothing up."""
        space = self.space
        for order in space.orders(parallel):
            for states in space.states(parallel, order):
                yield space.layout(parallel, order, states, size)

    def _at_least(self, spec: Spec) -> float:
        """Return what a layout takes at least."""
        return self._times.at_least(spec, self.space.nodes)

    @property
    def _limit(self) -> float:
        """The time of the last row of a table, of those that fit so far, a few of each grid."""
        of_grid: dict[object, list[float]] = {}
        for (grid, _), seconds in self._fastest.items():
            of_grid.setdefault(grid, []).append(seconds)
        few = chain.from_iterable(sorted(each)[:_OF_A_GRID] for each in of_grid.values())
        ranked = sorted(few)
        if not ranked:
            return inf
        last = ranked[self._rows - 1] if len(ranked) >= self._rows else inf
        return min(last, _SLOWER * ranked[0])

    def _climb(self, layout: Layout, savings: Sequence[Saving], thorough: bool) -> None:
        ladder = _Ladder(self.space, self.room, self._found.counts, layout, savings)
        for spec, fit in ladder.climb():
            if not thorough and self._at_least(spec) > self._limit * _BOUNDED:
                self._found.counts.slower += 1
                continue
            planned = self._timed(fit, spec)
            self._found.planned.append(planned)
            if fit.verdict == "fits":
                key = layout[:3], layout.micro_batch
                fastest = self._fastest.get(key, inf)
                self._fastest[key] = min(fastest, planned.time.seconds)

    def _timed(self, fit: Fit, spec: Spec) -> Planned:
        nodes = self.space.nodes
        return Planned(Layout.of(spec), spec, nodes, fit, self._times.of(spec, nodes))


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
        if not self._at(self.savings[-1])[1]:
            self.counts.too_large += len(self.savings)
            return
        fitting: list[Saving] = []
        for _, of_chain in groupby(self.savings, key=lambda saving: saving[1:]):
            ways = list(of_chain)
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
