"""Whatever a file says, reading it gives a Spec or one clear InputError: never anything else,
and nothing a terminal would act on.
"""

import contextlib
import datetime
import io
import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpczero.commands.check import check
from hpczero.errors import InputError
from hpczero.spec.keys import flat, keys, tables
from hpczero.spec.load import load, to_start_from, to_toml
from hpczero.spec.schema import Spec

TEXTS = [
    to_toml(Spec()),
    to_start_from({"name": "fuzz"}),
    'extends = "other.toml"\n[train]\nsteps = 3\n',
]
PIECES = [
    *"[]{}=.,#\"'\\\n\r\t \x00\x1b\x7f\u0085\u202e\ufeff\U0001f600",
    *("[[", "]]", '"""', "'''", "\r\n", "[train]", "[[model]]", "[train.steps]"),
    *("a.b.c = 1", "train.steps = 7", "extends = '.'", '\\u001b[31m'),
    *("nan", "-inf", "1e999", "-1", "0", "9" * 30, "9" * 5000, "0x" + "f" * 300),
    *("true", "1979-05-27T07:32:00Z", "24:00:00", "{x = 1}"),
    *("[" * 500, "{a = " * 300, "a." * 3000, "é" * 50, "\x1b]0;title\x07"),
]  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-2, 20),
    st.integers(),
    st.sampled_from([2**31, 2**53, 2**63, 10**15, 10**16, 10**400, -(10**30)]),
    st.floats(),
)
SCALARS = st.one_of(
    NUMBERS,
    st.booleans(),
    st.text(max_size=20),
    st.sampled_from(
        [
            "auto",
            "wsd",
            "constant",
            "fp16",
            "stdlib",
            "other.toml",
            "x" * 5000,
            "\x1b[31m",
            "a\x00b",
            "../..",
            "data,tensor",
        ]
    ),
    st.dates(),
    st.datetimes(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=2)
    ),
    max_leaves=4,
)
WORDS = st.sampled_from(
    [
        word
        for name in [*keys(), *tables(), "extends", "zero.stage", "train.stesp"]
        for word in (name, *name.split("."))
    ]
)


@st.composite
def mutated_text(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 2, 10, 100, 2000])))
        kind = draw(st.sampled_from(["insert", "characters", "repeat", "move"]))
        if kind == "insert":
            text = text[:start] + draw(st.sampled_from(PIECES)) + text[end:]
        elif kind == "characters":
            text = text[:start] + draw(st.text(max_size=5)) + text[end:]
        elif kind == "repeat":
            text = text[:end] + text[start:]
        else:
            text = text[:start] + text[end:] + text[start:end]
    return text


@st.composite
def mutated_structure(draw: st.DrawFn) -> str:
    """Keys with other values, other names, in other tables; tables as values and the other way
    round.
    """
    tree = dict(draw(st.sampled_from([flat(Spec()), {}])))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        name = draw(WORDS | st.sampled_from(list(keys())) | st.text(max_size=10))
        if draw(st.booleans()):
            tree.pop(name, None)
            name = draw(WORDS)
        tree[name] = draw(st.integers(0, 9) | st.sampled_from(list(flat(Spec()).values())) | VALUES)
    quoted = draw(st.sampled_from([False, False, True]))  # a quoted "train.steps" is no key
    return "\n".join(
        f"{json.dumps(name) if quoted else name} = {toml(value)}" for name, value in tree.items()
    )


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(name)} = {toml(inner)}" for name, inner in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, datetime.date):
        return value.isoformat()
    return json.dumps(value) if isinstance(value, bool | str) else repr(value)


OPTIONS = st.lists(
    st.builds("{}={}".format, WORDS, VALUES.map(toml)) | st.text(max_size=20), max_size=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "other.toml").write_text("[schedule]\nwarmup_steps = 2\n")
    return folder


def outcome(path: Path, options: Namespace) -> str:
    """Read it by the loader and by the verb, which must agree, and return the outcome."""
    said = io.StringIO()
    try:
        spec = load(path, options.overrides).spec
    except InputError as error:
        with pytest.raises(InputError):
            check(options)
        shown = str(error)
        kind = "refused"
    else:
        assert isinstance(spec, Spec)
        kind = "accepted"
        try:
            with contextlib.redirect_stdout(said):
                check(options)
        except InputError as error:  # the ranks do not fit
            said.write(str(error))
        shown = said.getvalue()
    assert all(line.isprintable() for line in shown.split("\n")), ascii(shown)
    # --json repeats every key, what the file says of it, and where; all else is cut to its terminal
    said_of_keys = len(path.read_bytes()) + len(list(keys())) * len(f"{path}")
    if kind == "refused" or not options.json:
        said_of_keys = 0
    assert 0 < len(shown) < 20_000 + said_of_keys
    return kind


@pytest.mark.parametrize("examples", [250, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_specs(folder: Path, examples: int) -> None:
    """Always the same ones."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        text=mutated_text() | mutated_structure(),
        overrides=st.just([]) | OPTIONS,
        explain=st.none() | WORDS,
        ranks=st.none() | st.integers(-1, 40),
        as_json=st.booleans(),
    )
    def read(
        text: str, overrides: list[str], explain: str | None, ranks: int | None, as_json: bool
    ) -> None:
        path = folder / "spec.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        options = Namespace(
            spec=str(path),
            overrides=overrides,
            explain=explain,
            ranks=ranks,
            ranks_per_node=None,
            json=as_json,
        )
        outcomes[outcome(path, options)] += 1

    read()
    assert outcomes["accepted"] > examples // 40, outcomes
    assert outcomes["refused"] > examples // 2, outcomes


def test_files_of_any_bytes(folder: Path) -> None:
    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(st.binary(max_size=200))
    def read(content: bytes) -> None:
        path = folder / "bytes.toml"
        path.write_bytes(content)
        with contextlib.suppress(InputError):
            load(path)

    read()
