"""On which line of a TOML text each key stands (tomllib reads the values, but does not say where they stood).

`locate` never fails on text that is not TOML: its answer is then worth as much as the text before the first mistake. It refuses text
that is nested deeper than any spec, before a recursive or quadratic parser gets to see it.
"""

import re
import tomllib

DEEPEST = 32  # parts of a key, and brackets within brackets

_TOKEN = re.compile(
    r"""
      (?P<newline> \n )
    | (?P<blank>   [ \t\r]+ | \#[^\n]* )
    | (?P<string>  \"{3} (?: \\. | [^\\] )*? \"{3} \"{0,2}    # several lines; up to two quotes may stand before the closing three
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


def locate(text: str) -> dict[tuple[str, ...], int]:
    """("train", "steps") -> the line where it first stands, for tables and keys alike; keys inside arrays have no place of their own."""
    scan = _Scan()
    position, line = 0, 1
    while token := _TOKEN.match(text, position):
        scan.see(token.lastgroup or "", token.group(), line)
        line += token.group().count("\n")
        position = token.end()
    return scan.lines


class _Scan:
    """Reads token by token: either a key is being read (`key` is the list of its parts) or a value (`key` is None)."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, ...], int] = {}
        self.key: list[str] | None = []
        self.after_dot = False
        self.path: tuple[str, ...] | None = ()  # of the value being read; None inside an array
        # what encloses the place: an opening bracket (none for the document) and the path of the table (None inside an array)
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
        if self.key is None or (self.key and not self.after_dot):  # two words in a row are no key: not TOML
            return
        self.key.append(name)
        self.after_dot = False
        if len(self.key) > DEEPEST:
            raise TooDeep(line)

    def _enter(self, table: tuple[str, ...] | None, line: int) -> tuple[str, ...] | None:
        """The key is complete: notes its line and that of the tables that it opens on the way."""
        parts, self.key = tuple(self.key or ()), None
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
