"""What the schema says of each key, in words: the source of error messages, `check --explain`, `init` and the reference page."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpczero.spec.schema import LARGEST, PATTERNS, Role, Spec
from hpczero.text import listed, printable, shown


@dataclass(frozen=True)
class Key:
    table: str  # "" for the keys above all tables
    leaf: str
    allowed: str  # "a whole number >= 1"
    default: Any
    role: Role
    description: str
    is_text: bool  # any text
    is_choice: bool  # one of several words

    @property
    def name(self) -> str:
        return f"{self.table}.{self.leaf}" if self.table else self.leaf


@functools.cache
def tables() -> dict[str, dict[str, Key]]:
    """Table -> key -> what the schema says of it; "" are the keys above all tables."""
    found: dict[str, dict[str, Key]] = {"": {}}
    for name, field in Spec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = {
                leaf: _key(name, leaf, inner)
                for leaf, inner in field.annotation.model_fields.items()
            }
        else:
            found[""][name] = _key("", name, field)
    return found


@functools.cache
def keys() -> dict[str, Key]:
    """ "train.steps" -> Key, in the order of the schema."""
    return {key.name: key for table in tables().values() for key in table.values()}


def about(table: str) -> str:
    """The schema's line on a table."""
    annotation = Spec.model_fields[table].annotation if table else Spec
    return inspect.cleandoc(getattr(annotation, "__doc__", "") or "")


def flat(spec: Spec) -> dict[str, Any]:
    """ "train.steps" -> value, in the order of the schema."""
    return {
        name: getattr(getattr(spec, key.table) if key.table else spec, key.leaf)
        for name, key in keys().items()
    }


def nearest(name: str, among: Iterable[str]) -> str | None:
    """The known name that an unknown one was probably meant to be.

    That is its word in another table, its initials, a slip of the pen, or a part of its word.
    """
    import difflib  # wanted only where something is wrong

    wanted = name[:100].lower()
    word = _leaf(wanted)
    candidates = list(among)
    same_word = [candidate for candidate in candidates if _leaf(candidate) == word]
    same_word = same_word or [
        candidate for candidate in candidates if _leaf(candidate) == _initials(word)
    ]
    close = difflib.get_close_matches(wanted, same_word, 1, 0.0) or difflib.get_close_matches(
        wanted, candidates, 1, 0.75
    )
    close = close or [
        candidate
        for candidate in candidates
        if difflib.get_close_matches(word, [_leaf(candidate)], 1, 0.75)
    ]
    close = close or [
        candidate
        for candidate in candidates
        if len(word) > 3 and (word in _leaf(candidate) or _leaf(candidate) in word)
    ]
    return close[0] if close else None


def _initials(word: str) -> str:
    """ "learning_rate" -> "lr"; of one word nothing."""
    words = [part for part in word.replace("-", "_").split("_") if part]
    return "".join(part[0] for part in words) if len(words) > 1 else ""


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _key(table: str, leaf: str, field: FieldInfo) -> Key:
    extra = typing.cast(dict[str, Any], field.json_schema_extra)
    kind = field.annotation
    return Key(
        table,
        leaf,
        _allowed(kind, field.metadata),
        field.default,
        extra["role"],
        field.description or "",
        is_text=kind is str,
        is_choice=len(typing.get_args(kind)) > 1 and typing.get_origin(kind) is typing.Literal,
    )


def _allowed(annotation: Any, metadata: list[Any]) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner = [limit for field in annotation.__metadata__ for limit in field.metadata]
        return _allowed(annotation.__origin__, inner)
    if origin is typing.Literal:
        return listed([shown(choice) for choice in typing.get_args(annotation)], "or")
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_allowed(choice, []) for choice in typing.get_args(annotation))
    if origin is tuple and typing.get_args(annotation)[-1] is ...:
        return f"a list, each {_allowed(typing.get_args(annotation)[0], [])}"
    if origin is dict:
        name, value = (_allowed(item, []) for item in typing.get_args(annotation))
        return f"a table, each key {name}, each value {value}"
    if origin is tuple:
        items = [_allowed(item, []) for item in typing.get_args(annotation)]
        if len(set(items)) == 1:
            return f"a list of {len(items)} numbers, each {items[0]}"
        return f"a list of {len(items)}: " + ", ".join(items)
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "text" + _text_limits(metadata)
    return {int: "a whole number", float: "a number"}[annotation] + _number_limits(metadata)


def _number_limits(metadata: list[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = {
        sign: _number(getattr(limit, name))
        for limit in metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    }
    if limits.keys() == {">=", "<="}:
        return f" from {limits['>=']} to {limits['<=']}"
    return " " + " and ".join(f"{sign} {limit}" for sign, limit in limits.items()) if limits else ""


def _number(limit: float) -> str:
    return "10**15" if limit == LARGEST else f"{limit:_}"


def _text_limits(metadata: list[Any]) -> str:
    limits = []
    for limit in metadata:
        if hasattr(limit, "min_length"):
            limits.append("not empty")
        if hasattr(limit, "max_length"):
            limits.append(f"at most {limit.max_length} characters")
        if pattern := getattr(limit, "pattern", None):
            limits.append(PATTERNS[pattern])
    return f" ({', '.join(limits)})" if limits else ""


# What is wrong with a spec, in words: one line a mistake, in the order in which they stand in the files.
_MOST_SHOWN = 20  # mistakes in one message


@dataclass(frozen=True)
class Origin:
    """Where a value came from. `text` says it to people: "spec.toml:12", "--set train.steps=5", "default"."""

    file: str
    line: int | None
    text: str


@dataclass(frozen=True)
class Mistake:
    source: Origin
    describe: Callable[[], str]  # called for those that are shown: a file of nonsense has thousands


def message(path: str, files: list[str], mistakes: list[Mistake]) -> str:
    """`files`: the order in which they are reported (the command line, which has no file, comes last)."""
    order = {file: place for place, file in enumerate(dict.fromkeys(files)) if file}
    mistakes = sorted(
        mistakes,
        key=lambda mistake: (order.get(mistake.source.file, len(order)), mistake.source.line or 0),
    )
    lines = [f"{mistake.source.text}: {mistake.describe()}" for mistake in mistakes[:_MOST_SHOWN]]
    if len(mistakes) == 1:
        return lines[0]
    if len(mistakes) > _MOST_SHOWN:
        lines.append(f"... and {len(mistakes) - _MOST_SHOWN} more")
    return "\n  ".join([f"{len(mistakes)} mistakes in {printable(path)}:", *lines])


def not_allowed(name: str, value: Any) -> str:
    return f"{name} = {shown(value)}: must be {keys()[name].allowed}"


def unknown(table: str, leaf: str, value: Any) -> str:
    if not table and leaf in tables():
        how = (
            f"once, as [{leaf}], not [[{leaf}]]"
            if isinstance(value, list)
            else f"as [{leaf}], with its keys below"
        )
        return f"{leaf} = {shown(value)}: {leaf} is a table: write it {how}"
    name = printable(f"{table}.{leaf}" if table else leaf, 100)
    others = [known for known in tables() if known]
    if not table and isinstance(value, dict):
        close = nearest(leaf, others)
        return f"[{name}]: unknown table; " + (
            f"did you mean [{close}]?" if close else f"the tables are {listed(others)}"
        )
    close = nearest(f"{table}.{leaf}" if table else leaf, [*keys(), "extends"])
    if close:
        return f"{name}: unknown key; did you mean {close}{_place(close, table)}?"
    here = f"the keys of [{table}] are" if table else "the keys above all tables are extends,"
    return f"{name}: unknown key; {here} {listed(list(tables()[table]))}"


def no_such_key(name: str) -> str:
    if name in tables():
        return f"{name} is a table; its keys are {listed([key.name for key in tables()[name].values()])}"
    close = nearest(name, keys())
    return f"{printable(name, 100)} is no key of the spec; " + (
        f"did you mean {close}?" if close else "hpczero spec prints them all"
    )


def _place(name: str, table: str) -> str:
    there = name.rpartition(".")[0]
    return "" if there == table else f" (under [{there}])" if there else " (above all tables)"
