"""The grid: every rank has one coordinate along each axis, and groups along the axes (pure).

A group along an axis, or along several, holds the ranks that differ in these coordinates only.
Places of the grid are counted with the innermost axis fastest, and given to the ranks sorted by
(node, rank): neighbours along the innermost axis share a node however the launcher dealt the ranks
out, as long as the axis fits there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import gcd, isqrt, prod

from hpczero.errors import InputError
from hpczero.spec.rules import AXES, axes_in_order
from hpczero.spec.schema import Parallel
from hpczero.text import format_count, join_words

_SHOWN = 4  # groups, ranks or choices written out before a list is cut short


@dataclass(frozen=True)
class Grid:
    """All ranks on a grid, made by `Grid.build`; `axes` and `sizes` begin with the innermost."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    node_of_rank: tuple[int, ...]
    rank_at_place: Sequence[int]
    place_of_rank: Sequence[int]

    @classmethod
    def build(cls, parallel: Parallel, node_of_rank: Sequence[int]) -> "Grid":
        """Deal the ranks out; the remaining factor is the data axis.

        The order "auto" has to be decided before (`planner.volumes.resolved`), except where no
        order is better than another.
        """
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
        rank_at_place = sorted(range(ranks), key=node_of_rank.__getitem__)  # by node, then by rank
        place_of_rank = [0] * ranks
        for place, rank in enumerate(rank_at_place):
            place_of_rank[rank] = place
        sizes = tuple(size_of[axis] for axis in axes)
        return cls(axes, sizes, tuple(node_of_rank), rank_at_place, place_of_rank)

    def size(self, axis: str) -> int:
        return self.sizes[self.axes.index(axis)]

    def coordinate(self, rank: int, axis: str) -> int:
        return self.place_of_rank[rank] // self._stride[axis] % self.size(axis)

    def sharing_layers(self, rank: int) -> list[int]:
        """Return the ranks that share each layer with this one: its tensor group."""
        return list(self.ranks(rank, "tensor"))

    def ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along these axes only, innermost fastest."""
        steps = [self.coordinate(rank, axis) * self._stride[axis] for axis in axes]
        return self._group(self.place_of_rank[rank] - sum(steps), axes)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Yield all groups along these axes; together they hold every rank once."""
        for first in self._places(0, [axis for axis in self.axes if axis not in axes]):
            yield self._group(first, axes)

    def _group(self, first: int, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(map(self.rank_at_place.__getitem__, self._places(first, axes)))

    def _places(self, first: int, axes: Sequence[str]) -> list[int]:
        """Return the places along the axes, from the one where their coordinates are all 0."""
        assert len(set(axes) & set(self.axes)) == len(axes), (axes, self.axes)
        places = [first]
        for axis in self.axes:
            if axis in axes:
                stride = self._stride[axis]
                steps = range(0, self.size(axis) * stride, stride)
                if places == [first]:
                    places = list(range(first, first + steps.stop, stride))
                else:
                    places = [place + step for step in steps for place in places]
        return places

    def divided(self, axis: str, parts: Mapping[str, int]) -> "Grid":
        """Return the same ranks on a grid that has these axes, innermost first, in place of one.

        The group along all of them is the group along the axis: "data" may be cut into "shard" and
        "replica".
        """
        assert prod(parts.values()) == self.size(axis), (axis, self.size(axis), parts)
        at = self.axes.index(axis)
        return replace(
            self,
            axes=(*self.axes[:at], *parts, *self.axes[at + 1 :]),
            sizes=(*self.sizes[:at], *parts.values(), *self.sizes[at + 1 :]),
        )

    def shards_and_replicas(self, shard_ranks: int | str) -> "Grid":
        """Return the grid with "shard" and "replica" in place of "data" (zero.shard_ranks).

        "node": the most data ranks that nodes, which may have different numbers, can form groups
        of without any across nodes. InputError: a number that does not divide the data ranks.
        """
        data = self.size("data")
        shards = data if shard_ranks == "all" else shard_ranks
        if shard_ranks == "node":
            shards = self._data_ranks_on_nodes
        assert isinstance(shards, int)
        if data % shards:
            raise InputError(impossible_shards(data, shards))
        return self.divided("data", {"shard": shards, "replica": data // shards})

    def by_axis(self, shard_ranks: int | str) -> dict[str, "Grid"]:
        """Return for each axis the grid that has it: also "shard" and "replica" where they are two.

        `shard_ranks`: as for `shards_and_replicas`.
        """
        divided = self.shards_and_replicas(shard_ranks)
        axes = dict.fromkeys(self.axes, self)
        if divided.size("replica") > 1:
            axes |= {"shard": divided, "replica": divided}
        return axes

    def size_by_axis(self, shard_ranks: int | str) -> dict[str, int]:
        return {axis: grid.size(axis) for axis, grid in self.by_axis(shard_ranks).items()}

    @cached_property
    def _data_ranks_on_nodes(self) -> int:
        """The largest number that divides the data ranks of every data group on every node."""
        counts: set[int] = set()
        for group in self.groups("data"):
            nodes = [self.node_of_rank[rank] for rank in group]
            counts.update(len(list(same)) for _, same in groupby(nodes))
        return gcd(*counts)

    def groups_across_nodes(self, axis: str) -> int:
        """Return how many of the groups along the axis have ranks on more than one node."""
        return sum(
            len({self.node_of_rank[rank] for rank in group}) > 1 for group in self.groups(axis)
        )

    @cached_property
    def nodes_cut_data_alike(self) -> bool:
        """True if nodes divide the data ranks at the same places for all tensor ranks of a stage.

        Then sums node by node are the same sums. Where states have replicas, it is the ranks that
        share a copy, of all replicas: all exchange alike.
        """
        cuts: dict[int, list[int]] = {}
        axis = "data" if "data" in self.axes else "shard"
        is_one = self.size("tensor") == 1 and (axis == "data" or self.size("replica") == 1)
        for group in () if is_one else self.groups(axis):
            first: dict[int, int] = {}
            nodes = [self.node_of_rank[rank] for rank in group]
            cut = [first.setdefault(node, place) for place, node in enumerate(nodes)]
            if cuts.setdefault(self.coordinate(group[0], "pipeline"), cut) != cut:
                return False
        return True

    def describe(self, shard_ranks: int | str = "all") -> list[str]:
        """Return the layout in lines for people; of many groups the first few.

        `shard_ranks`: as for `shards_and_replicas`.
        """
        nodes = len(set(self.node_of_rank))
        product = " x ".join(
            f"{axis}({size})" for axis, size in zip(self.axes, self.sizes, strict=True)
        )
        where = f"{format_count(len(self.node_of_rank), 'rank')} on {format_count(nodes, 'node')}"
        grids = self.by_axis(shard_ranks)
        inner = [axis for axis in grids if axis not in self.axes]
        lines = [
            grids[part]._describe_axis(part, "  " * (part != axis))
            for axis in self.axes
            for part in (axis, *(inner if axis == "data" else ()))
            if grids[part].size(part) > 1
        ]
        return [f"{where}: {product}, innermost axis first", *lines]

    def _describe_axis(self, axis: str, indent: str) -> str:
        size = self.size(axis)
        count = len(self.rank_at_place) // size
        across = self.groups_across_nodes(axis)
        where = f"{across:,} of {count:,} across nodes"
        if across in (0, count):
            where = "across nodes" if across else "inside nodes"
        groups = self.groups(axis)
        shown = [_listed(next(groups)) for _ in range(min(count, _SHOWN))]
        more = f"  … {count - len(shown):,} more" if count > len(shown) else ""
        sizes = f"{format_count(count, 'group')} of {size:,}"
        return f"  {indent + axis:<9} {sizes}, {where}:  {'  '.join(shown)}{more}"

    @cached_property
    def _stride(self) -> dict[str, int]:
        """Places between neighbours along each axis."""
        return {axis: prod(self.sizes[:number]) for number, axis in enumerate(self.axes)}


def node_slice(length: int, parts: int, index: int) -> slice:
    """Return the elements of a shard that one of a node's ranks takes: whole cache lines.

    `parts` ranks of the node share the work on the shard; this is the part of rank `index` of them.
    """
    step = -(-length // (parts * 64)) * 64
    return slice(min(index * step, length), min((index + 1) * step, length))


def order_is_free(sizes: Mapping[str, int], node_of_rank: Sequence[int]) -> bool:
    """Return True where all orders of the axes send the same: one node, or one axis above 1."""
    return len(set(node_of_rank)) == 1 or sum(size > 1 for size in sizes.values()) < 2


def impossible(parallel: Parallel, ranks: int, most: Mapping[str, int] | None = None) -> str:
    """Say what does not divide, with all numbers, and what would work.

    That is another number of ranks, or other sizes of the axes (of an axis at most `most`).
    """
    wanted = _wanted(parallel)
    most = most or {}
    together = prod(wanted.values())
    product = " x ".join(f"{axis}({size})" for axis, size in wanted.items() if size > 1)
    equals = f" = {together}" if product.count("(") > 1 else ""
    below = ranks // together * together
    fixes = [f"mpirun -n {below + together}" + (f" or {below}" if below else "")]
    for axis, size in wanted.items():
        others = together // size
        if size > 1 and ranks % others == 0:
            near = _nearest_divisors(ranks // others, size, most.get(axis, ranks))
            fixes.append(f"parallel.{axis} = {join_words(list(map(str, near)), 'or')}")
    if len(fixes) == 1:
        sizes = _nearest_sizes(wanted, ranks, most).items()
        fixes.append(" and ".join(f"parallel.{axis} = {size}" for axis, size in sizes))
    given = f"the {format_count(ranks, 'rank')} given"
    return f"{product}{equals} does not divide {given}: use {', or '.join(fixes)}"


def impossible_shards(data: int, shards: int) -> str:
    """Say that data ranks do not divide so, and what would work."""
    near = join_words(list(map(str, _nearest_divisors(data, shards, data))), "or")
    return (
        f"zero.shard_ranks = {shards} does not divide the {format_count(data, 'data rank')}"
        f': take {near}, "node" or "all"'
    )


def _wanted(parallel: Parallel) -> dict[str, int]:
    return {axis: getattr(parallel, axis) for axis in AXES if axis != "data"}


def _nearest_sizes(
    wanted: Mapping[str, int], ranks: int, most: Mapping[str, int]
) -> dict[str, int]:
    """Give each axis in turn the divisor of the remaining ranks that is nearest to the wish."""
    nearest = {}
    for axis, size in wanted.items():
        limit = most.get(axis, ranks)
        possible = sorted(divisor for divisor in _divisors(ranks) if divisor <= limit)
        nearest[axis] = min(possible, key=lambda divisor: abs(divisor - size))
        ranks //= nearest[axis]
    return nearest


def _nearest_divisors(number: int, near: int, most: int) -> list[int]:
    useful = {divisor for divisor in _divisors(number) if 1 < divisor <= most} or {1}
    return sorted(sorted(useful, key=lambda divisor: abs(divisor - near))[:_SHOWN])


def _divisors(number: int) -> set[int]:
    below_root = {small for small in range(1, isqrt(number) + 1) if number % small == 0}
    return below_root | {number // small for small in below_root}


def _listed(group: tuple[int, ...]) -> str:
    """Return "[0 2 4 6]", or with many ranks "[0 2 4 … 98]"."""
    shown = [str(rank) for rank in group]
    if len(shown) > 2 * _SHOWN:
        shown = [*shown[: _SHOWN - 1], "…", shown[-1]]
    return f"[{' '.join(shown)}]"
