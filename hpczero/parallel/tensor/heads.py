"""Heads of the columns of one module, and how tensor ranks share them (pure).

Columns of one parent are cut alike: in groups of query heads that share a head of keys. Where there
are fewer heads of keys than ranks, queries are cut head by head, and every rank holds keys and
values whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpczero.errors import InputError
from hpczero.parallel.layout import shard_range

# names by which modules know their sizes
_WIDTH_OF_HEAD = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head")
_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_QUERIES_OF_A_KEY = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
_WIDTHS = ("split_size", "all_head_size", "inner_dim")


@dataclass(frozen=True)
class Column:
    """The role "column" where more has to be said.

    `heads`: that the outputs are (of each section), which stay together; 0: as the parent says.
    `sections`: maps that lie one after the other in the outputs, as queries, keys and values do.
    """

    heads: int = 0
    sections: int = 1


@dataclass(frozen=True)
class Cut:
    """A dimension of so many elements in each section; as `shapes.Parameter` has it."""

    length: int
    grain: int
    fine_grain: int | None = None
    sections: int = 1


@dataclass(frozen=True)
class ColumnsOfParent:
    """The columns of one module. `outputs` is the cut of what they make together: of queries.

    `queries`, `keys`: heads; 0: there are none.
    """

    cuts: Mapping[str, Cut]
    outputs: Cut
    queries: int
    keys: int
    head_width: int

    @property
    def width(self) -> int:
        return self.outputs.length

    def is_kept_whole(self, name: str) -> bool:
        return self.cuts[name].fine_grain == 0

    def own(self, ranks: int, rank: int) -> range:
        """Return the query heads of a rank."""
        grain = self.outputs.grain
        if self.outputs.fine_grain and ranks > -(-self.width // grain):
            grain = self.outputs.fine_grain
        part = shard_range(self.width, grain, ranks, rank)
        return range(part.start // self.head_width, part.stop // self.head_width)

    def seen(self, ranks: int, rank: int) -> list[int]:
        """Return the head of keys that each of the rank's queries sees."""
        return [head // (self.queries // self.keys) for head in self.own(ranks, rank)]

    def sizes(self, facts: Mapping[str, Any], ranks: int, rank: int) -> dict[str, int]:
        """Return what the parent's own sizes are for the part of this rank."""
        if not self.queries:
            return {}
        own = len(self.own(ranks, rank))
        kept_whole = any(map(self.is_kept_whole, self.cuts))
        each = self.queries // self.keys
        keys = own if kept_whole else own // each
        new = [(_QUERIES, self.queries, own), (_KEYS, self.keys, keys)]
        new += [(_QUERIES_OF_A_KEY, each, 1 if kept_whole else each)]
        new += [(_WIDTHS, self.width, own * self.head_width)]
        return {
            name: part
            for names, whole, part in new
            for name in names
            if _whole_number(facts.get(name)) == whole
        }


def columns_of_parent(
    parent: str, facts: Mapping[str, Any], columns: Mapping[str, tuple[int, Column]], ranks: int
) -> ColumnsOfParent:
    """Return the cuts of the columns of a module, whose attributes are `facts`."""
    widths = {name: _section(name, *column) for name, column in columns.items()}
    counts = _heads(facts, widths, {name: column.heads for name, (_, column) in columns.items()})
    sections = {name: column.sections for name, (_, column) in columns.items()}
    if not counts:
        longest = max(widths.values())
        if longest < ranks:
            raise InputError(f"{parent} has {longest} columns, fewer than the {ranks} tensor ranks")
        cuts = {name: Cut(width, 1, None, sections[name]) for name, width in widths.items()}
        return ColumnsOfParent(cuts, Cut(longest, 1), 0, 0, 1)
    queries, keys = max(counts.values()), min(counts.values())
    if len(set(counts.values())) > 2 or queries % keys:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise InputError(
            f"tensor_plan: {parent} has columns of {shown} heads, which cannot be cut alike: "
            + _SAY_HEADS
        )
    if queries < ranks:
        raise InputError(
            f"{parent} has {queries} heads, and every tensor rank needs one: parallel.tensor ="
            f" {ranks} is more"
        )
    cuts = {}
    for name, width in widths.items():
        head = width // counts[name]
        if counts[name] < queries:
            cuts[name] = Cut(width, head, 0, sections[name])
        else:
            fine = head if queries > keys else None
            cuts[name] = Cut(width, queries // keys * head, fine, sections[name])
    if ranks <= keys:  # then keys and values are cut as well
        cuts = {name: Cut(cut.length, cut.grain, None, cut.sections) for name, cut in cuts.items()}
    of_queries = next(cuts[name] for name, count in counts.items() if count == queries)
    outputs = Cut(of_queries.length, of_queries.grain, of_queries.fine_grain)
    return ColumnsOfParent(cuts, outputs, queries, keys, outputs.length // queries)


_SAY_HEADS = 'say them by hpczero.Column(heads=...) in place of "column"'


def _section(name: str, width: int, column: Column) -> int:
    if column.sections < 1 or column.heads < 0 or width % column.sections:
        raise InputError(
            f"tensor_plan: {name} has {width} outputs, which are not {column.sections} equal"
            " sections"
        )
    return width // column.sections


def _heads(
    facts: Mapping[str, Any], widths: Mapping[str, int], said: Mapping[str, int]
) -> dict[str, int]:
    """Return the heads of each column; none if the module has no heads."""
    head_width = _first(facts, _WIDTH_OF_HEAD)
    of_queries = _first(facts, _QUERIES)
    if not head_width and of_queries and not max(widths.values()) % of_queries:
        head_width = max(widths.values()) // of_queries
    if not head_width and not any(said.values()):
        return {}
    counts = {}
    for name, width in widths.items():
        heads = said[name] or (width // head_width if head_width else 0)
        if not heads or width % heads or (not said[name] and width % head_width):
            raise InputError(
                f"tensor_plan: {name} has {width} outputs, which are not a whole number of heads"
                f" of {head_width or 'any known width'}: {_SAY_HEADS}"
            )
        counts[name] = heads
    by_name = set(said.values()) == {0} and of_queries
    if by_name and max(counts.values()) > of_queries:
        name = max(counts, key=lambda name: counts[name])
        times = counts[name] / of_queries
        raise InputError(
            f"tensor_plan: {name} has the outputs of {times:g} x {of_queries} heads: write"
            f" hpczero.Column(sections={times:g}) if it is so many maps one after the other"
            f" (queries, keys, values), or hpczero.Column(heads={of_queries}) if each head has all"
            " of its own together"
        )
    return counts


def _first(facts: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((number for name in names if (number := _whole_number(facts.get(name)))), 0)


def _whole_number(fact: object) -> int:
    return fact if isinstance(fact, int) and not isinstance(fact, bool) and fact > 0 else 0
