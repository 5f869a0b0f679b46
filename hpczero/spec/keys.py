"""The facts of every key in words, and the mistakes in a spec as one message.

Error messages, `check --explain`, `init` and the reference page are made from these facts.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpczero.spec.schema import Spec
from hpczero.spec.table import LARGEST, PATTERNS, Role
from hpczero.text import join_words, printable, toml_repr


@dataclass(frozen=True)
class Key:
    """A key of the spec, as the schema describes it."""

    table: str  # "" for the keys above all tables; "optimizer.outer" is one inside of another
    leaf: str
    allowed: str  # "a whole number >= 1"
    default: Any
    role: Role
    description: str
    is_text: bool  # any text
    is_choice: bool  # one of several words

    @property
    def name(self) -> str:
        return full_name(self.table, self.leaf)


def full_name(table: str, leaf: str) -> str:
    """Return "train.steps", or the leaf alone if it stands above all tables."""
    return f"{table}.{leaf}" if table else leaf


@functools.cache
def tables() -> dict[str, dict[str, Key]]:
    """Return table -> name -> Key; "" is the table of the keys above all tables.

    A table inside of another has its full name, "optimizer.outer", and follows that one.
    """
    return dict(_tables("", Spec))


def _tables(table: str, kind: type[BaseModel]) -> Iterator[tuple[str, dict[str, Key]]]:
    inner = {}
    leaves = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner[full_name(table, name)] = field.annotation
        else:
            leaves[name] = _key(table, name, field)
    yield table, leaves
    for name, kind_inside in inner.items():
        yield from _tables(name, kind_inside)


@functools.cache
def keys() -> dict[str, Key]:
    """Return "train.steps" -> Key, in the order of the schema."""
    return {key.name: key for table in tables().values() for key in table.values()}


def table_description(table: str) -> str:
    """Return the schema's description of a table."""
    kind = type(attrgetter(table)(Spec())) if table else Spec
    return inspect.cleandoc(kind.__doc__ or "")


def flat(spec: Spec) -> dict[str, Any]:
    """Return "train.steps" -> value, in the order of the schema."""
    return {name: attrgetter(name)(spec) for name in keys()}


def entries(tree: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (table, key, value) of a tree, as TOML or JSON has it.

    What is no table of the spec, or a table given as something else, is a key of the table it is
    in. So is a quoted name with a dot.
    """
    for name, value in tree.items():
        inner = full_name(table, name)
        if name and "." not in name and inner in tables() and isinstance(value, dict):
            yield from entries(value, inner)
        else:
            yield table, name, value


def nearest(name: str, among: Iterable[str]) -> str | None:
    """Return the known name that an unknown one was probably meant to be.

    Tried in this order: the same word in another table, its initials, a misspelling, a part of it.
    """
    import difflib  # needed only after a mistake

    def alike(word: str, possible: list[str], least: float) -> list[str]:
        return difflib.get_close_matches(word, possible, 1, least)

    wanted = name[:100].lower()
    word = _leaf(wanted)
    candidates = list(among)
    same_word = [known for known in candidates if _leaf(known) == word]
    as_initials = wanted.removesuffix(word) + _initials(word)
    by_initials = [known for known in candidates if _leaf(known) == _leaf(as_initials)]
    close = alike(wanted, same_word, 0.0) or alike(as_initials, by_initials, 0.0)
    # tables with long names make any two of their keys look alike
    similar = [known for known in candidates if alike(word, [_leaf(known)], 0.5)]
    close = close or alike(wanted, similar, 0.75)
    close = close or [known for known in candidates if alike(word, [_leaf(known)], 0.75)]
    if not close and len(word) > 3:
        leaves = [(known, _leaf(known)) for known in candidates]
        close = [known for known, leaf in leaves if word in leaf or leaf in word]
    return close[0] if close else None


def _initials(word: str) -> str:
    """Return "lr" for "learning_rate"; "" for a single word."""
    words = [piece for piece in word.replace("-", "_").split("_") if piece]
    return "".join(piece[0] for piece in words) if len(words) > 1 else ""


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
        return join_words([toml_repr(choice) for choice in typing.get_args(annotation)], "or")
    if origin in (typing.Union, types.UnionType):
        choices = [_allowed(choice, []) for choice in typing.get_args(annotation)]
        alike = [f"a list, each {choice}" for choice in choices]
        choices = ["a list of such" if choice in alike else choice for choice in choices]
        return ", or ".join(choices) if "a list of such" in choices else " or ".join(choices)
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
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        inner = [_key("", name, field) for name, field in annotation.model_fields.items()]
        return "a table of " + join_words([f"{key.leaf} ({key.allowed})" for key in inner])
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


# ------------------------------------------------------- mistakes in a spec, one line for each

_MOST_SHOWN = 20  # mistakes in one message


@dataclass(frozen=True)
class Origin:
    """The place that a value came from."""

    file: str
    line: int | None
    text: str  # "spec.toml:12", "--set train.steps=5", "default"


@dataclass(frozen=True)
class Mistake:
    source: Origin
    describe: Callable[[], str]  # called for those that are shown: a file of nonsense has thousands


@dataclass(frozen=True)
class Contradiction:
    """Values that are each allowed, but not together."""

    keys: tuple[str, ...]  # the first is the one that most likely wants changing
    text: str


def message(path: str, files: list[str], mistakes: list[Mistake]) -> str:
    """Return the mistakes as one message, in the order of `files` and lines; others come last."""
    order = {file: number for number, file in enumerate(dict.fromkeys(files)) if file}

    def position(mistake: Mistake) -> tuple[int, int]:
        return order.get(mistake.source.file, len(order)), mistake.source.line or 0

    mistakes = sorted(mistakes, key=position)
    lines = [f"{mistake.source.text}: {mistake.describe()}" for mistake in mistakes[:_MOST_SHOWN]]
    if len(mistakes) == 1:
        return lines[0]
    if len(mistakes) > _MOST_SHOWN:
        lines.append(f"... and {len(mistakes) - _MOST_SHOWN} more")
    return "\n  ".join([f"{len(mistakes)} mistakes in {printable(path)}:", *lines])


def not_allowed(name: str, value: Any) -> str:
    return f"{name} = {toml_repr(value)}: must be {keys()[name].allowed}"


def unknown(table: str, leaf: str, value: Any) -> str:
    """Describe a key or table that no spec has."""
    given = full_name(table, leaf)
    if given and given in tables():
        form = f"as [{given}], with its keys below"
        if isinstance(value, list):
            form = f"once, as [{given}], not [[{given}]]"
        return f"{given} = {toml_repr(value)}: {given} is a table: write it {form}"
    name = printable(given, 100)
    if isinstance(value, dict):
        known_tables = [known for known in tables() if known and (not table or "." in known)]
        known_tables += [] if table else ["sweep"]
        close = nearest(given, known_tables)
        if close:
            return f"[{name}]: unknown table; did you mean [{close}]?"
        if not table:
            return f"[{name}]: unknown table; the tables are {join_words(known_tables)}"
    close = nearest(given, [*keys(), "extends"])
    if close:
        return f"{name}: unknown key; did you mean {close}{_other_table(close, table)}?"
    known = f"the keys of [{table}] are" if table else "the keys above all tables are extends,"
    return f"{name}: unknown key; {known} {join_words(list(tables()[table]))}"


def no_such_key(name: str) -> str:
    if name and name in tables():
        names = [known for known in keys() if known.startswith(f"{name}.")]
        return f"{name} is a table; its keys are {join_words(names)}"
    close = nearest(name, keys())
    hint = f"did you mean {close}?" if close else "hpczero spec prints them all"
    return f"{printable(name, 100)} is no key of the spec; {hint}"


def _other_table(name: str, table: str) -> str:
    """Return where a key stands, if not in this table."""
    its_table = name.rpartition(".")[0]
    if its_table == table:
        return ""
    return f" (under [{its_table}])" if its_table else " (above all tables)"
