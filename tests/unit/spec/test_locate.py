"""The locator agrees with tomllib on which keys there are, and with the writer of the text on
where they stand.
"""

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.spec.toml import DEEPEST, TooDeep, key_lines

EVERYTHING = '''# a comment with [brackets] = "and" 'quotes'
top = 1 # = 2
"quoted key" = """
first
[not.a.table] = 1
""\\" still """"
'literal' = \'\'\'
a = 1
\'\'\'\'
dotted . "k=e#y" . 'x' = 2021-01-01 07:32:00

  [ table . "sub.table" ]
"esc\\u0061ped" = [ # an array
  1, # one
  "]", [2, 3],
  {inner = 1, deep = {a = 2}},
]
inline = { a = 1, b.c = "}", "d e" = { f = [ {g = 1} ] , h = 2 }, i = {} }
1.5 = 3.25
empty = ""
literal_empty = \'\'
-_9 = -inf
[[many]]
x = 1
[[many]]
x = 2
[last]
windows = 1\r
end = 2'''


def paths(tree: dict[str, Any], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set()
    for name, value in tree.items():
        found.add((*above, name))
        if isinstance(value, dict):
            found |= paths(value, (*above, name))
    return found


def test_everything_that_toml_has() -> None:
    lines = key_lines(EVERYTHING)
    assert set(lines) - {("many", "x")} == paths(tomllib.loads(EVERYTHING))
    expected = {
        ("top",): 2,
        ("quoted key",): 3,
        ("literal",): 7,
        ("dotted",): 10,
        ("dotted", "k=e#y", "x"): 10,
        ("table", "sub.table"): 12,
        ("table", "sub.table", "escaped"): 13,
        ("table", "sub.table", "inline"): 18,
        ("table", "sub.table", "inline", "b", "c"): 18,
        ("table", "sub.table", "inline", "d e", "h"): 18,
        ("table", "sub.table", "1", "5"): 19,
        ("table", "sub.table", "-_9"): 22,
        ("many",): 23,
        ("last", "windows"): 28,
        ("last", "end"): 29,
    }
    assert {path: lines[path] for path in expected} == expected


NAMES = st.sampled_from(
    [
        "a",
        "b",
        "train",
        "x-1",
        "0",
        "with space",
        "do.t",
        'qu"ote',
        "é",
        "#",
        "=",
        "[",
        "line\nend",
        "",
    ]
)
TEXTS = st.text(alphabet="ab\"'\\#=[]{},.\n\u00e9 ", max_size=12)


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def key_text(name: str) -> str:
    return name if name.replace("-", "").isalnum() and name.isascii() else quoted(name)


@st.composite
def value_texts(draw: st.DrawFn, depth: int = 2) -> str:
    """A value in any of the ways in which TOML writes it."""
    kinds = ["number", "basic", "several lines", "literal lines"] + (
        ["array", "inline"] if depth else []
    )
    kind, text = draw(st.sampled_from(kinds)), draw(TEXTS)
    if kind == "number":
        return draw(
            st.sampled_from(
                ["1", "-2.5", "true", "0x1f", "1e-3", "1979-05-27 07:32:00Z", "inf", "07:32:00.5"]
            )
        )
    if kind == "basic":
        return quoted(text)
    if kind == "several lines":
        ending = draw(st.sampled_from(["", '"', '""', " \\\n  "]))
        return (
            '"""'
            + text.replace("\\", "\\\\").replace('"""', "").replace('"', '\\"')
            + ending
            + '"""'
        )
    if kind == "literal lines":
        return "'''" + text.replace("'", "") + draw(st.sampled_from(["", "'", "''"])) + "'''"
    if kind == "array":
        items = draw(st.lists(value_texts(depth=depth - 1), max_size=3))
        gap = draw(st.sampled_from([" ", "\n", " # ] , '''\n"]))
        return "[" + gap + f",{gap}".join(items) + gap + "]"
    pairs = draw(
        st.lists(
            st.tuples(NAMES, value_texts(depth=depth - 1)),
            max_size=3,
            unique_by=lambda pair: pair[0],
        )
    )
    return "{ " + ", ".join(f"{key_text(name)} = {value}" for name, value in pairs) + " }"


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[tuple[str, ...], int]]:
    """A document, and the line of each key that stands at the start of a line."""
    lines: list[str] = []
    where: dict[tuple[str, ...], int] = {}
    for table in [None, *draw(st.lists(NAMES, max_size=3, unique=True))]:
        if table is not None:
            lines += [draw(st.sampled_from(["", "# [c] = '"])), f" [ {key_text(table)} ] # ]"]
            where.setdefault((table,), len(lines))
        for name in draw(st.lists(NAMES, max_size=3, unique=True)):
            where.setdefault((name,) if table is None else (table, name), len(lines) + 1)
            lines += (
                f"{key_text(name)} = {draw(value_texts())}{draw(st.sampled_from(['', ' # x = [']))}"
            ).split("\n")
    return "\n".join(lines), where


@settings(max_examples=250, deadline=None, derandomize=True)
@given(documents())
def test_agrees_with_tomllib(document: tuple[str, dict[tuple[str, ...], int]]) -> None:
    text, where = document
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # a table of the name of a key above
        key_lines(text)
        return
    lines = key_lines(text)
    assert set(lines) == paths(tree)
    assert {path: lines[path] for path in where} == where


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.text(alphabet="ab=[]{},.\"'\\#\n\r \t\x00é", max_size=60))
def test_any_text_is_read_without_a_failure(text: str) -> None:
    lines = key_lines(text)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert paths(tree) <= set(lines)


def test_an_unfinished_string_ends_the_search() -> None:
    for quotes in ('"', "'", '"""', "'''"):
        assert key_lines(f"a = 1\nb = {quotes}\nc = 3") == {("a",): 1, ("b",): 2}


@pytest.mark.parametrize(
    "text",
    [
        "\n" + ".".join("a" * (DEEPEST + 1)) + " = 1",
        "\n[" + "a." * 40_000 + "a]",
        "\nx = " + "[" * 50_000 + "]" * 50_000,
        "\nx = " + "{a = " * 20_000 + "1" + "}" * 20_000,
    ],
)
def test_nesting_that_no_spec_has_is_refused(text: str) -> None:
    with pytest.raises(TooDeep) as caught:
        key_lines(text)
    assert caught.value.line == 2
