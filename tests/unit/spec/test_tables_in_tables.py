"""Tables inside of others, as [optimizer.outer]: all ways to write them, all pages of them."""

import json
import tomllib
from argparse import Namespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.commands.check import check
from hpczero.errors import InputError
from hpczero.spec import site_profile
from hpczero.spec.keys import entries, flat, keys, no_such_key, table_description, tables
from hpczero.spec.load import (
    as_data,
    as_markdown,
    as_text,
    differences,
    from_dict,
    load,
    to_start_from,
    to_toml,
)
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import Optimizer, Spec
from hpczero.spec.toml import Layer
from tests.support.specs import Write, refusal

REPLICAS = "zero.shard_ranks=node"  # what local steps need
OUTER = ["every", "begin", "lr", "momentum", "fragments", "precision"]


def test_a_table_has_its_full_name_and_follows_the_one_that_it_is_in() -> None:
    names = list(tables())
    assert names.index("optimizer.outer") == names.index("optimizer") + 1
    assert list(tables()["optimizer.outer"]) == OUTER
    assert "outer" not in tables()["optimizer"]
    key = keys()["optimizer.outer.every"]
    assert (key.table, key.leaf, key.name) == ("optimizer.outer", "every", "optimizer.outer.every")
    assert flat(Spec())["optimizer.outer.lr"] == 0.7
    assert not [name for name in keys() if name in tables()]


@pytest.mark.parametrize(
    "text",
    [
        "[optimizer]\nlr = 1e-3\n[optimizer.outer]\nevery = 50\nlr = 0.5",
        "[optimizer.outer]\nevery = 50\nlr = 0.5\n[optimizer]\nlr = 1e-3",
        "[optimizer]\nlr = 1e-3\nouter = { every = 50, lr = 0.5 }",
        "[optimizer]\nlr = 1e-3\nouter.every = 50\nouter.lr = 0.5",
        "optimizer.lr = 1e-3\noptimizer.outer.every = 50\noptimizer.outer.lr = 0.5",
        "optimizer = { lr = 1e-3, outer = { every = 50, lr = 0.5 } }",
        'optimizer = { lr = 1e-3, outer.every = 50, "outer".lr = 0.5 }',
    ],
)
def test_every_way_of_toml(write: Write, text: str) -> None:
    spec = load(write(text + "\n"), [REPLICAS]).spec
    assert spec.optimizer == Optimizer(lr=1e-3, outer=Outer(every=50, lr=0.5))


def test_the_command_line_sets_a_key_or_several(write: Write) -> None:
    path = write("zero.shard_ranks = 'node'")
    loaded = load(path, ["optimizer.outer.every=50", "optimizer.outer.precision=int4"])
    assert loaded.spec.optimizer.outer == Outer(every=50, precision="int4")
    source = loaded.sources["optimizer.outer.every"].text
    assert source == "--set optimizer.outer.every=50"
    by_table = load(path, ["optimizer.outer={ every = 50, fragments = 5 }"]).spec
    assert by_table.optimizer.outer == Outer(every=50, fragments=5)
    whole = load(path, ["optimizer={ lr = 1e-3, outer = { every = 50 } }"]).spec
    assert whole.optimizer == Optimizer(lr=1e-3, outer=Outer(every=50))


def test_a_dictionary_sets_them_too() -> None:
    tree = {"zero": {"shard_ranks": 2}, "optimizer": {"outer": {"every": 50}}}
    assert from_dict(tree).spec.optimizer == Optimizer(outer=Outer(every=50))
    with pytest.raises(InputError, match=r"given: optimizer\.outer\.evry: unknown"):
        from_dict({"optimizer": {"outer": {"evry": 50}}})


def test_a_spec_and_what_it_extends_are_joined_key_by_key(write: Write) -> None:
    write("[optimizer]\nlr = 1e-3\n[optimizer.outer]\nevery = 10\nlr = 0.5\n", "base.toml")
    path = write('extends = "base.toml"\n[optimizer.outer]\nevery = 20\nfragments = 2\n')
    loaded = load(path, [REPLICAS, "optimizer.outer.every=40"])
    expected = Outer(every=40, lr=0.5, fragments=2)
    assert loaded.spec.optimizer == Optimizer(lr=1e-3, outer=expected)
    said = [(given.value, given.source.text) for given in loaded.history["optimizer.outer.every"]]
    assert said == [
        (0, "default"),
        (10, "base.toml:4"),
        (20, "spec.toml:3"),
        (40, "--set optimizer.outer.every=40"),
    ]
    assert loaded.sources["optimizer.outer.lr"].text == "base.toml:5"
    assert loaded.sources["optimizer.outer.momentum"].text == "default"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[optimizer]\nouter = 5",
            "spec.toml:2: optimizer.outer = 5: optimizer.outer is a table: "
            "write it as [optimizer.outer], with its keys below",
        ),
        (
            "\n[[optimizer.outer]]\nevery = 5",
            "spec.toml:2: optimizer.outer = an array of tables: optimizer.outer is a table: "
            "write it once, as [optimizer.outer], not [[optimizer.outer]]",
        ),
        (
            "seed = 1\n[optimizer.outter]\nevery = 5",
            "spec.toml:2: [optimizer.outter]: unknown table; did you mean [optimizer.outer]?",
        ),
        (
            "[outer]\nevery = 5",
            "spec.toml:1: [outer]: unknown table; did you mean [optimizer.outer]?",
        ),
        (
            "[train.outer]\nevery = 5",
            "spec.toml:1: [train.outer]: unknown table; did you mean [optimizer.outer]?",
        ),
        (
            "[optimizer.outer]\nevery = 5\nevry = 5",
            "spec.toml:3: optimizer.outer.evry: unknown key; did you mean optimizer.outer.every?",
        ),
        (
            "[optimizer.outer]\nqqq = 5",
            "spec.toml:2: optimizer.outer.qqq: unknown key; the keys of [optimizer.outer] are "
            "every, begin, lr, momentum, fragments and precision",
        ),
        (
            "[optimizer]\nfragments = 2",
            "spec.toml:2: optimizer.fragments: unknown key; "
            "did you mean optimizer.outer.fragments (under [optimizer.outer])?",
        ),
        (
            "[optimizer.outer]\nweight_decay = 0.1",
            "spec.toml:2: optimizer.outer.weight_decay: unknown key; "
            "did you mean optimizer.weight_decay (under [optimizer])?",
        ),
        (
            "[optimizer.outer]\n\nevery = -1",
            "spec.toml:3: optimizer.outer.every = -1: must be a whole number from 0 to 10**15",
        ),
        (
            "[optimizer]\nlr = 1.0\nouter = { lr = 1, momentum = 1.0 }",
            "spec.toml:3: optimizer.outer.momentum = 1.0: must be a number >= 0 and < 1",
        ),
        (
            "[optimizer.outer.every]\nx = 1",
            "spec.toml:1: optimizer.outer.every = a table: must be a whole number",
        ),
        (
            '"optimizer.outer" = { every = 1 }',
            "spec.toml:1: optimizer.outer = a table: optimizer.outer is a table: "
            "write it as [optimizer.outer], with its keys below",
        ),
        (
            '[optimizer]\n"outer.every" = 1',
            "spec.toml:2: optimizer.outer.every: unknown key; "
            "did you mean optimizer.outer.every (under [optimizer.outer])?",
        ),
        ('"optimizer.outer.every" = 1', "did you mean optimizer.outer.every (under [opt"),
    ],
)
def test_a_mistake_says_where_what_and_what_is_right(
    write: Write, text: str, expected: str
) -> None:
    message = refusal(write(text))
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("optimizer.outer=5", "optimizer.outer is a table: write it as [optimizer.outer]"),
        ("optimizer.outer.every=x", 'optimizer.outer.every = "x": must be a whole number'),
        (
            "optimizer.outer.evry=5",
            "unknown key; did you mean optimizer.outer.every?",
        ),
        ("optimizer.outter.every=5", "did you mean optimizer.outer.every (under [optimizer.outer]"),
        ("optimizer.outer.=5", "optimizer.outer.: unknown key"),
        ("optimizer.outer.every.x=5", "optimizer.outer.every.x: unknown key"),
        ("optimizer..every=5", "optimizer..every: unknown key"),
    ],
)
def test_mistakes_of_the_command_line(write: Write, option: str, expected: str) -> None:
    message = refusal(write(""), option)
    assert message.startswith(f"--set {option}: ")
    assert expected in message


def test_a_mistake_leaves_the_other_keys_of_the_table(write: Write) -> None:
    path = write("[optimizer.outer]\nevery = 0.5\nlr = -1.0\nfragments = 2\n[train]\nsteps = 0\n")
    assert [line.partition(" = ")[0] for line in refusal(path).splitlines()[1:]] == [
        "  spec.toml:2: optimizer.outer.every",
        "  spec.toml:3: optimizer.outer.lr",
        "  spec.toml:6: train.steps",
    ]


# ------------------------------------------------------------------------------- what is printed


def test_the_reference_has_the_table() -> None:
    assert "DiLoCo" in table_description("optimizer.outer")
    assert "\n## [optimizer.outer]\n" in as_markdown()
    assert "\n[optimizer.outer]  Local steps (DiLoCo)" in as_text()
    names = [entry["key"] for entry in as_data()]
    assert [name for name in names if "outer" in name] == [f"optimizer.outer.{k}" for k in OUTER]


def test_a_table_given_in_place_of_a_key_is_said() -> None:
    said = no_such_key("optimizer.outer")
    assert said.startswith("optimizer.outer is a table; its keys are optimizer.outer.every, ")
    assert "optimizer.lr" not in said
    both = no_such_key("optimizer")
    assert "optimizer.lr" in both
    assert "optimizer.outer.lr" in both
    assert no_such_key("optimizer.outer.evry").endswith("did you mean optimizer.outer.every?")


def test_explain(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("[optimizer.outer]\nevery = 50\n")
    options = Namespace(
        spec=path, overrides=[REPLICAS], explain="optimizer.outer.every", json=False, ranks=None
    )
    assert check(options) == 0
    said = capsys.readouterr().out
    assert said.startswith("optimizer.outer.every = 50\n")
    assert "from        spec.toml:2\n  instead of  0  (default)" in said
    options.json = True
    assert check(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["value"], told["source"]) == (50, "spec.toml:2")


SPECS = st.builds(
    lambda every, lr, momentum, precision: Spec(
        optimizer=Optimizer(outer=Outer(every=every, lr=lr, momentum=momentum, precision=precision))
    ),
    every=st.sampled_from([0, 1, 2, 50, 1000]),
    lr=st.floats(0, exclude_min=True, allow_infinity=False),
    momentum=st.floats(0, 1, exclude_max=True),
    precision=st.sampled_from(["fp32", "bf16", "int8", "int4"]),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(spec=SPECS)
def test_what_is_written_has_the_values(spec: Spec) -> None:
    assert Spec.model_validate_json(spec.model_dump_json()) == spec
    of_table = spec.optimizer.outer.model_dump()
    assert tomllib.loads(to_toml(spec))["optimizer"]["outer"] == of_table
    started = tomllib.loads(to_start_from(flat(spec)))
    assert started["optimizer"]["outer"] == of_table


def test_differences_have_the_full_name() -> None:
    other = Spec(optimizer=Optimizer(outer=Outer(every=50)))
    found = differences(Spec(), other)
    assert [(d.key, d.old, d.new, d.role) for d in found] == [
        ("optimizer.outer.every", 0, 50, "changeable")
    ]


# ---------------------------------------------------------------------- trees of other versions


def test_entries_go_as_deep_as_the_spec() -> None:
    tree = {
        "seed": 1,
        "batch": {"env": {"A": "x"}},
        "optimizer": {"lr": 1.0, "outer": {"every": 5, "x": {"y": 1}}, "inner": {"z": 1}},
        "qqq": {"a": 1},
        "optimizer.outer": {"every": 6},
    }
    assert list(entries(tree)) == [
        ("", "seed", 1),
        ("batch", "env", {"A": "x"}),
        ("optimizer", "lr", 1.0),
        ("optimizer.outer", "every", 5),
        ("optimizer.outer", "x", {"y": 1}),
        ("optimizer", "inner", {"z": 1}),
        ("", "qqq", {"a": 1}),
        ("", "optimizer.outer", {"every": 6}),
    ]


def test_a_site_s_profile_must_not_set_what_is_computed() -> None:
    tree = {"optimizer": {"outer": {"every": 5}}}
    assert site_profile._names(tree) == ["optimizer.outer.every"]
    assert not site_profile._may_set("optimizer.outer.every")


def test_a_spec_with_every_key_takes_nothing_from_the_site() -> None:
    whole = Layer(tomllib.loads(to_toml(Spec())))
    assert site_profile.layers([whole]) == []
