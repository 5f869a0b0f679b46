"""Pages that are printed from the schema: the reference, the page in docs/, the spec to start
from.
"""

import tomllib
from pathlib import Path

import pytest

from hpczero.spec.keys import flat, keys, nearest, table_description, tables
from hpczero.spec.load import ROLES, as_data, as_markdown, as_text, load, to_start_from
from hpczero.spec.schema import Spec
from hpczero.text import printable, toml_repr
from tests.support.launch import CHECKOUT

PAGE = CHECKOUT / "docs" / "spec.md"


def test_the_page_in_docs_is_what_the_program_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown() + "\n", (
        "run: hpczero spec --markdown > docs/spec.md"
    )


def test_every_key_is_explained() -> None:
    assert len(keys()) == len(flat(Spec())) > 35
    for key in keys().values():
        assert key.description
        assert key.allowed
        assert key.role in ROLES
        assert f"`{key.leaf}`" in as_markdown()
        assert key.description in as_text()
    assert [entry["key"] for entry in as_data()] == list(keys())
    assert all(table_description(table) for table in tables())


def test_the_limits_in_words() -> None:
    allowed = {name: key.allowed for name, key in keys().items()}
    assert allowed["train.steps"] == "a whole number from 1 to 10**15"
    assert allowed["optimizer.lr"] == "a number > 0"
    assert allowed["model.dropout"] == "a number >= 0 and < 1"
    assert allowed["optimizer.betas"] == "a list of 2 numbers, each a number >= 0 and < 1"
    assert allowed["train.precision"] == '"bf16", "fp16" or "fp32"'
    assert allowed["model.tied_embeddings"] == "true or false"
    assert allowed["name"].startswith("text (at most 100 letters, digits")


def test_the_spec_to_start_from_is_valid_and_names_every_key(tmp_path: Path) -> None:
    text = to_start_from({"name": "mine"})
    path = tmp_path / "spec.toml"
    path.write_text(text)
    assert load(path).spec == Spec(name="mine")
    written = {
        name if not isinstance(value, dict) else "" for name, value in tomllib.loads(text).items()
    } - {""}
    assert written == {"name", "seed"}
    path.write_text(
        "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    )
    loaded = load(path)
    assert all(source.line for source in loaded.sources.values()), (
        "with the commented keys too, every key is there"
    )
    assert loaded.spec == Spec(name="mine")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train.stesp", "train.steps"),
        ("train.layers", "model.layers"),
        ("schedule.nmae", "schedule.name"),
        ("Train.Steps", "train.steps"),
        ("lr", "optimizer.lr"),
        ("optim.lr", "optimizer.lr"),
        ("warmup", "schedule.warmup_steps"),
        ("train.globalbatch", "train.global_batch"),
        ("optimizer.qqq", None),
        ("x", None),
        ("", None),
        ("z" * 100_000, None),
    ],
)
def test_the_nearest_key(name: str, meant: str | None) -> None:
    assert nearest(name, keys()) == meant


def test_values_as_messages_show_them() -> None:
    assert toml_repr('a"b\\c\x1b[31m\u202e\ud800') == '"a\\"b\\\\c\\x1b[31m\\u202e\\ud800"'
    assert len(toml_repr("x" * 10_000)) < 70
    assert len(toml_repr(list(range(10_000)))) < 70
    assert len(toml_repr([["x" * 1000] * 100] * 100)) < 100
    assert toml_repr(10**5000) == "a whole number of 16610 bits"
    assert toml_repr([True, 1.5, [1, 2]]) == "[true, 1.5, [1, 2]]"
    assert toml_repr([[[1]], ["x"]]) == "[[…], […]]"
    assert printable("a\tb\r\n") == "a\\tb\\r\\n"
