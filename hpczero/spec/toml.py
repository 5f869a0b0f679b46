"""The layers of a spec as they are read: the chain of `extends`, the spec itself, each `--set`.

`key_lines` tells on which line of a TOML text each key stands: tomllib reads the values, but does
not say where they stood. It never fails on text that is not TOML: its answer is then worth as much
as the text before the first mistake. It refuses text that is nested deeper than any spec, before a
recursive or quadratic parser gets to see it.
"""

import os
import re
import stat
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpczero import safe_files
from hpczero.errors import InputError
from hpczero.spec.keys import Mistake, Origin, keys, tables
from hpczero.text import printable, toml_repr

_LARGEST_FILE = 100_000  # bytes: many times those of any spec
_LONG_NUMBER = re.compile(r"[\d_]{4300,}")
_POSITION = re.compile(r" ?\(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True)
class Layer:
    """The tables of a file, a `--set` or another source, and where they stand."""

    tree: dict[str, Any]
    file: str = ""
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    option: str = ""  # the text after --set
    name: str = ""  # of a source that is neither

    @classmethod
    def of_value(cls, key: str, value: Any, source: Origin) -> "Layer":
        """Return a layer of one value, which came from another place."""
        path = tuple(key.split("."))
        tree = value
        for part in reversed(path):
            tree = {part: tree}
        if not source.file:
            return cls(tree, name=source.text)
        return cls(tree, source.file, {path: source.line} if source.line else {})

    def source(self, *path: str) -> Origin:
        if self.name:
            return Origin("", None, self.name)
        if not self.file:
            return Origin("", None, f"--set {printable(self.option, 80)}")
        outwards = (path[:end] for end in range(len(path), 0, -1))
        line = next((self.lines[part] for part in outwards if part in self.lines), None)
        return Origin(self.file, line, printable(self.file) + (f":{line}" if line else ""))


def read_layers(path: str | Path, overrides: Sequence[str]) -> tuple[list[Layer], list[Mistake]]:
    """Read the spec with its parents, and the options of `--set`; return layers and mistakes.

    A mistake that hides the rest of its file raises InputError; the others are returned, so that
    they are all reported at once.
    """
    layers, mistakes = _read_chain(str(path))
    for option in overrides:
        read = _read_option(option)
        if isinstance(read, Layer):
            layers.append(read)
        else:
            mistakes.append(read)
    return layers, mistakes


def _read_chain(path: str) -> tuple[list[Layer], list[Mistake]]:
    """Read the file and its parents, the furthest first."""
    layers: list[Layer] = []
    seen: list[str] = []
    while True:
        layer = read_file(path)
        layers.insert(0, layer)
        seen.append(os.path.realpath(path))
        if "extends" not in layer.tree:
            return layers, []
        parent, problem = _parent(path, layer.tree.pop("extends"))
        if not problem and os.path.realpath(parent) in seen:
            turns = [os.path.basename(file) for file in [*seen, os.path.realpath(parent)]]
            problem = "these files extend each other in a circle: " + printable(" -> ".join(turns))
        if problem:
            return layers, [Mistake(layer.source("extends"), partial(str, problem))]
        path = parent


def _parent(child: str, value: Any) -> tuple[str, str]:
    """Return the path of the file that `child` extends, and a problem with it ("": none)."""
    if not isinstance(value, str) or not value or "\0" in value:
        return "", f"extends = {toml_repr(value)}: must be the path of one other spec"
    parent = os.path.join(os.path.dirname(child), value)
    problem = _unreadable(parent)
    return parent, problem and f"extends = {toml_repr(value)}: {printable(parent)} {problem}"


def _unreadable(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be read: {_reason(error)}"
    if stat.S_ISREG(mode):
        return ""
    return "is a folder, not a file" if stat.S_ISDIR(mode) else "is not a regular file"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_file(path: str) -> Layer:
    name = printable(path)
    if problem := _unreadable(path):
        raise InputError(f"{name} {problem}")
    content = read_limited(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"byte {error.start + 1} of the file"
        raise InputError(f"{name}:{line}: not UTF-8 text, as TOML must be ({where})") from None
    return _parse(path, text)


def read_limited(path: str, what: str = "spec") -> bytes:
    """Return the content of a plain file; InputError if it is something else, or too large."""
    name = printable(path)
    try:
        with os.fdopen(safe_files.open_to_read(Path(path)), "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {_reason(error)}") from None
    if len(content) > _LARGEST_FILE:
        raise InputError(f"{name} is no {what}: it is larger than {_LARGEST_FILE:,} bytes")
    return content


def _parse(path: str, text: str) -> Layer:
    name = printable(path)
    try:
        lines = key_lines(text)
        return Layer(tomllib.loads(text), path, lines)
    except TooDeep as error:
        raise InputError(f"{name}:{error.line}: {error}") from None
    except ValueError as error:  # tomllib's own, and those of int() and datetime that pass it
        raise InputError(f"{name}:{_syntax_problem(text, str(error))}") from None


def _syntax_problem(text: str, problem: str) -> str:
    """Return tomllib's message after the line; it quotes nothing of the file but a key's name."""
    if position := _POSITION.search(problem):
        line = int(position[1]) if position[1] else text.count("\n") + 1
        return f"{line}: not valid TOML: {printable(problem[: position.start()], 100)}"
    number = _LONG_NUMBER.search(text)
    line = text.count("\n", 0, number.start() if number else 0) + 1
    return f"{line}: not valid TOML: a number of too many digits"


def _read_option(option: str) -> Layer | Mistake:
    """Read `section.key=value` as a layer; the value is TOML, or else the text as it stands."""
    name, equals, text = option.partition("=")
    name = name.strip()
    source = Layer({}, option=option).source()
    if not equals or not name.partition(".")[0]:
        return Mistake(source, lambda: "must be SECTION.KEY=VALUE, as in --set train.steps=100")
    if name == "extends":
        return Mistake(source, lambda: "extends can only be set in a file")
    value = _option_value(text)
    known = keys().get(name)
    if known and known.is_text and not isinstance(value, str):
        value = text
    *path, leaf = name.split(".")
    if len(path) > 1 and ".".join(path) not in tables():
        return Layer({name: value}, option=option)
    tree = {leaf: value}
    for part in reversed(path):
        tree = {part: tree}
    return Layer(tree, option=option)


def _option_value(text: str) -> Any:
    try:
        key_lines(f"value = {text}")
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


# ------------------------------------------------------------------------------- lines of the keys

DEEPEST = 32  # parts of a key, and brackets within brackets

_TOKEN = re.compile(
    r"""
      (?P<newline> \n )
    | (?P<blank>   [ \t\r]+ | \#[^\n]* )
    # several lines; up to two quotes may stand before the closing three
    | (?P<string>  \"{3} (?: \\. | [^\\] )*? \"{3} \"{0,2}
                 | '{3} .*? '{3} '{0,2}
                 | "(?!"") (?: \\. | [^"\\\n] )* "
                 | '(?!'') [^'\n]* ' )
    | (?P<mark>    [][{}=,.] )
    | (?P<bare>    [^\s\[\]{}=,."'#]+ )
    """,
    re.VERBOSE | re.DOTALL,
)


class TooDeep(ValueError):
    def __init__(self, line: int) -> None:
        super().__init__(f"keys or brackets nested more than {DEEPEST} deep")
        self.line = line


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return ("train", "steps") -> the line where it first stands, for tables and keys alike.

    Keys inside arrays have no line of their own.
    """
    scan = _Scan()
    position = 0
    line = 1
    while token := _TOKEN.match(text, position):
        scan.see(token.lastgroup or "", token.group(), line)
        line += token.group().count("\n")
        position = token.end()
    return scan.lines


class _Scan:
    """Read token by token: a key (`key` is the list of its parts) or a value (`key` is None)."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, ...], int] = {}
        self.key: list[str] | None = []
        self.after_dot = False
        self.path: tuple[str, ...] | None = ()  # of the value being read; None inside an array
        # enclosing brackets ("" for the document) and the path of their table (None: an array)
        self.around: list[tuple[str, tuple[str, ...] | None]] = [("", ())]

    def see(self, kind: str, token: str, line: int) -> None:
        if kind == "newline":
            if len(self.around) == 1:
                self.key = []
        elif kind == "blank":
            pass
        elif self.key is None:
            self._value(kind, token, line)
        elif kind != "mark":
            self._name(_unquoted(token) if kind == "string" else token, line)
        elif token == ".":
            self.after_dot = True
        elif token == "=":
            self.path = self._enter(self.around[-1][1], line)
        elif token == "]":  # the end of a table's header
            self.around = [("", self._enter((), line))]
        elif token == "}":  # of an inline table that is empty
            self._close()

    def _name(self, name: str, line: int) -> None:
        if self.key is None or (self.key and not self.after_dot):  # two words in a row: not TOML
            return
        self.key.append(name)
        self.after_dot = False
        if len(self.key) > DEEPEST:
            raise TooDeep(line)

    def _enter(self, table: tuple[str, ...] | None, line: int) -> tuple[str, ...] | None:
        """Complete the key: note its line and that of the tables that it opens on the way."""
        parts = tuple(self.key or ())
        self.key = None
        if table is None:
            return None
        path = table + parts
        if len(path) > 2 * DEEPEST:
            raise TooDeep(line)
        for end in range(len(table) + 1, len(path) + 1):
            self.lines.setdefault(path[:end], line)
        return path

    def _value(self, kind: str, token: str, line: int) -> None:
        if kind != "mark":
            return
        if token in "[{":
            self.around.append((token, self.path if token == "{" else None))
            if token == "[":
                self.path = None
            else:
                self.key = []
            if len(self.around) > DEEPEST:
                raise TooDeep(line)
        elif token in "]}":
            self._close()
        elif token == "," and self.around[-1][0] == "{":
            self.key = []

    def _close(self) -> None:
        self.key = None
        if len(self.around) > 1:
            self.around.pop()


def _unquoted(token: str) -> str:
    try:
        return str(tomllib.loads(f"key = {token}")["key"])
    except ValueError:
        return token
