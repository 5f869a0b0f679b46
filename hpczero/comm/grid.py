"""The grid: every rank has one coordinate along each axis, and talks along it with the ranks that differ in that coordinate only.

Pure arithmetic. Places of the grid are counted with the innermost axis fastest, and given to the ranks sorted by (node, rank):
neighbours along the innermost axis share a node however the launcher dealt the ranks out, as long as the axis fits there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod

from hpczero.errors import InputError
from hpczero.spec.rules import AXES, axes_in_order
from hpczero.spec.schema import Parallel

_SHOWN = 4  # groups, ranks or choices written out before a list is cut short


@dataclass(frozen=True)
class Grid:
    """Build it with `Grid.build`. `axes` and `sizes` run from the innermost to the outermost axis."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    node_of_rank: tuple[int, ...]
    rank_at_place: Sequence[int]
    place_of_rank: Sequence[int]

    @classmethod
    def build(cls, parallel: Parallel, node_of_rank: Sequence[int]) -> "Grid":
        """The order "auto" has to be decided before (`planner.volumes.resolved`), except where no order is better than another."""
        ranks = len(node_of_rank)
        wanted = _wanted(parallel)
        if ranks % prod(wanted.values()):
            raise InputError(impossible(parallel, ranks))
        size_of = wanted | {"data": ranks // prod(wanted.values())}
        axes = axes_in_order(parallel)
        if axes is None:
            axes = AXES
            assert order_is_free(size_of, node_of_rank), (
                'parallel.order = "auto" has not been decided'
            )
        rank_at_place = sorted(
            range(ranks), key=node_of_rank.__getitem__
        )  # stable: by node, then by rank
        place_of_rank = [0] * ranks
        for place, rank in enumerate(rank_at_place):
            place_of_rank[rank] = place
        return cls(
            axes,
            tuple(size_of[axis] for axis in axes),
            tuple(node_of_rank),
            rank_at_place,
            place_of_rank,
        )

    def size(self, axis: str) -> int:
        return self.sizes[self.axes.index(axis)]

    def coordinate(self, rank: int, axis: str) -> int:
        return self.place_of_rank[rank] // self._stride[axis] % self.size(axis)

    def ranks(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of `rank` along the axis, ordered by coordinate."""
        stride = self._stride[axis]
        first = self.place_of_rank[rank] - self.coordinate(rank, axis) * stride
        return tuple(self.rank_at_place[first + step * stride] for step in range(self.size(axis)))

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """All groups along the axis, one after the other; together they hold every rank once."""
        stride, size = self._stride[axis], self.size(axis)
        for outer in range(0, len(self.rank_at_place), stride * size):
            for first in range(outer, outer + stride):
                yield tuple(self.rank_at_place[first : first + stride * size : stride])

    def groups_across_nodes(self, axis: str) -> int:
        """How many of the groups along the axis have ranks on more than one node."""
        return sum(
            len({self.node_of_rank[rank] for rank in group}) > 1 for group in self.groups(axis)
        )

    @cached_property
    def nodes_cut_data_alike(self) -> bool:
        """Whether nodes divide the data ranks in the same places for all tensor ranks of a stage: then sums node by node are the same sums."""
        cuts: dict[int, list[int]] = {}
        for group in self.groups("data") if self.size("tensor") > 1 else ():
            first: dict[int, int] = {}
            cut = [
                first.setdefault(self.node_of_rank[rank], place) for place, rank in enumerate(group)
            ]
            if cuts.setdefault(self.coordinate(group[0], "pipeline"), cut) != cut:
                return False
        return True

    def describe(self) -> list[str]:
        """The layout in lines for people; of many groups the first few."""
        nodes = len(set(self.node_of_rank))
        product = " x ".join(
            f"{axis}({size})" for axis, size in zip(self.axes, self.sizes, strict=True)
        )
        lines = [
            f"{_count(len(self.node_of_rank), 'rank')} on {_count(nodes, 'node')}: {product}, innermost axis first"
        ]
        return lines + [
            self._describe_axis(axis, size)
            for axis, size in zip(self.axes, self.sizes, strict=True)
            if size > 1
        ]

    def _describe_axis(self, axis: str, size: int) -> str:
        count, across = len(self.rank_at_place) // size, self.groups_across_nodes(axis)
        where = (
            "inside nodes"
            if not across
            else "across nodes"
            if across == count
            else f"{across:,} of {count:,} across nodes"
        )
        groups = self.groups(axis)
        shown = [_span(next(groups)) for _ in range(min(count, _SHOWN))]
        more = f"  … {count - len(shown):,} more" if count > len(shown) else ""
        return (
            f"  {axis:<9} {_count(count, 'group')} of {size:,}, {where}:  {'  '.join(shown)}{more}"
        )

    @cached_property
    def _stride(self) -> dict[str, int]:
        """Places between neighbours along each axis."""
        return {axis: prod(self.sizes[:number]) for number, axis in enumerate(self.axes)}


def order_is_free(sizes: Mapping[str, int], node_of_rank: Sequence[int]) -> bool:
    """Whether all orders of the axes send the same: there is one node, or one axis at most that is longer than 1."""
    return len(set(node_of_rank)) == 1 or sum(size > 1 for size in sizes.values()) < 2


def impossible(parallel: Parallel, ranks: int, most: Mapping[str, int] | None = None) -> str:
    """All numbers, and what would work: another number of ranks, or other sizes of the axes (of an axis at most `most`)."""
    wanted, most = _wanted(parallel), most or {}
    together = prod(wanted.values())
    product = " x ".join(f"{axis}({size})" for axis, size in wanted.items() if size > 1)
    equals = f" = {together}" if product.count("(") > 1 else ""
    below = ranks // together * together
    fixes = [f"mpirun -n {below + together}" + (f" or {below}" if below else "")]
    for axis, size in wanted.items():
        others = together // size
        if size > 1 and ranks % others == 0:
            fixes.append(
                f"parallel.{axis} = {_alternatives(_nearest_divisors(ranks // others, size, most.get(axis, ranks)))}"
            )
    if len(fixes) == 1:
        fixes.append(
            " and ".join(
                f"parallel.{axis} = {size}"
                for axis, size in _nearest_sizes(wanted, ranks, most).items()
            )
        )
    return f"{product}{equals} does not divide the {_count(ranks, 'rank')} given: use {', or '.join(fixes)}"


def _wanted(parallel: Parallel) -> dict[str, int]:
    return {axis: getattr(parallel, axis) for axis in AXES if axis != "data"}


def _nearest_sizes(
    wanted: Mapping[str, int], ranks: int, most: Mapping[str, int]
) -> dict[str, int]:
    """One after the other, each axis gets the divisor of what is left of the ranks that is nearest to what was wanted."""
    found = {}
    for axis, size in wanted.items():
        possible = sorted(
            divisor for divisor in _divisors(ranks) if divisor <= most.get(axis, ranks)
        )
        found[axis] = min(possible, key=lambda divisor: abs(divisor - size))
        ranks //= found[axis]
    return found


def _nearest_divisors(number: int, near: int, most: int) -> list[int]:
    useful = {divisor for divisor in _divisors(number) if 1 < divisor <= most} or {1}
    return sorted(sorted(useful, key=lambda divisor: abs(divisor - near))[:_SHOWN])


def _divisors(number: int) -> set[int]:
    below_root = {small for small in range(1, isqrt(number) + 1) if number % small == 0}
    return below_root | {number // small for small in below_root}


def _alternatives(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _span(group: tuple[int, ...]) -> str:
    """[0 2 4 6], or with many ranks [0 2 4 … 98]."""
    shown = [str(rank) for rank in group]
    if len(shown) > 2 * _SHOWN:
        shown = [*shown[: _SHOWN - 1], "…", shown[-1]]
    return f"[{' '.join(shown)}]"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
