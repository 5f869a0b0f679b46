"""TOML -> Spec: layers, sources, and messages that say where a mistake is and what is right."""

import os
from pathlib import Path

import pytest

from hpczero.spec.keys import flat, keys
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from tests.support.specs import Write, refusal


def test_an_empty_file_is_all_defaults(write: Write) -> None:
    loaded = load(write(""))
    assert loaded.spec == Spec()
    assert {source.text for source in loaded.sources.values()} == {"default"}
    assert loaded.sources.keys() == keys().keys()


def test_precedence_and_where_values_come_from(write: Write) -> None:
    write(
        "seed = 2\n[train]\nsteps = 10\nlog_every = 2\n[optimizer]\nbetas = [0.5, 0.6]\n",
        "base/root.toml",
    )
    write('extends = "root.toml"\ntrain.steps = 20\ntrain.eval_every = 5', "base/middle.toml")
    path = write(
        'extends = "base/middle.toml"\n[train]\nsteps = 30\n[optimizer]\nbetas = [0.1, 0.2]'
    )
    loaded = load(path, ["train.steps=40", "train.steps=50", "model={hidden = 8, heads = 2}"])
    spec = loaded.spec
    assert (spec.seed, spec.train.steps, spec.train.log_every, spec.train.eval_every) == (
        2,
        50,
        2,
        5,
    )
    assert spec.optimizer.betas == (0.1, 0.2)
    assert (spec.model.hidden, spec.model.heads) == (8, 2)
    said = [(given.value, given.source.text) for given in loaded.history["train.steps"]]
    assert said == [
        (100, "default"),
        (10, "base/root.toml:3"),
        (20, "base/middle.toml:2"),
        (30, "spec.toml:3"),
        (40, "--set train.steps=40"),
        (50, "--set train.steps=50"),
    ]
    assert (loaded.sources["train.log_every"].file, loaded.sources["train.log_every"].line) == (
        "base/root.toml",
        4,
    )
    assert loaded.sources["model.hidden"].text == "--set model={hidden = 8, heads = 2}"


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("seed=3", "seed", 3),
        ("train.precision=fp32", "train.precision", "fp32"),
        ('train.precision="fp32"', "train.precision", "fp32"),
        ("name=2024", "name", "2024"),
        ("name='quoted'", "name", "quoted"),
        ("data.source=/a b=c.h5", "data.source", "/a b=c.h5"),
        ("paths.cache=", "paths.cache", ""),
        ("batch.walltime=12:00:00", "batch.walltime", "12:00:00"),
        ("optimizer.betas=[0, 0.5]", "optimizer.betas", (0.0, 0.5)),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("model.tied_embeddings=false", "model.tied_embeddings", False),
        (" train.steps = 7", "train.steps", 7),
    ],
)
def test_set_reads_toml_or_else_text(write: Write, option: str, key: str, value: object) -> None:
    found = flat(load(write(""), [option]).spec)[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("train.steps", "--set train.steps: must be SECTION.KEY=VALUE"),
        ("=3", "--set =3: must be SECTION.KEY=VALUE"),
        (".=3", "--set .=3: must be SECTION.KEY=VALUE"),
        (".steps=3", "--set .steps=3: must be SECTION.KEY=VALUE"),
        ("train.stesp=3", "did you mean train.steps?"),
        (
            "train.steps=many",
            '--set train.steps=many: train.steps = "many": must be a whole number',
        ),
        ("train.steps=1\nseed = 5", 'train.steps = "1\\nseed = 5": must be a whole number'),
        ("train=3", "train is a table"),
        ("train.steps.more=3", "unknown key"),
        ("train.=3", "unknown key"),
        ("extends=other.toml", "extends can only be set in a file"),
    ],
)
def test_set_mistakes(write: Write, option: str, expected: str) -> None:
    assert expected in refusal(write(""), option)


MISTAKES = """extends = "base.toml"
nmae = "x"
[train]
stesp = 1
layers = 3
micro_batch = 0
precision = '''
fp64'''
[data]
source = 3
[schedule]
warmup_steps = 500
[[model]]
[qqq]
[optimiser]
"""


def test_all_mistakes_at_once_each_with_its_line(write: Write) -> None:
    write("train.steps = 10\ncomm = 3\noptimizer.betas = [0.9, 2]\n", "base.toml")
    path = write(MISTAKES)
    assert refusal(path).splitlines() == [
        "12 mistakes in spec.toml:",
        "  base.toml:2: comm = 3: comm is a table: write it as [comm], with its keys below",
        (
            "  base.toml:3: optimizer.betas = [0.9, 2]: must be a list of 2 numbers, "
            "each a number >= 0 and < 1"
        ),
        "  spec.toml:2: nmae: unknown key; did you mean name?",
        "  spec.toml:4: train.stesp: unknown key; did you mean train.steps?",
        "  spec.toml:5: train.layers: unknown key; did you mean model.layers (under [model])?",
        "  spec.toml:6: train.micro_batch = 0: must be a whole number from 1 to 1_000_000",
        '  spec.toml:7: train.precision = "fp64": must be "bf16", "fp16" or "fp32"',
        (
            "  spec.toml:10: data.source = 3: "
            "must be text (not empty, at most 4096 characters, no control characters)"
        ),
        (
            "  spec.toml:12: schedule.warmup_steps = 500 is more than train.steps = 10: "
            "at most 10, or more steps (train.steps: base.toml:1)"
        ),
        (
            "  spec.toml:13: model = an array of tables: model is a table: "
            "write it once, as [model], not [[model]]"
        ),
        (
            "  spec.toml:14: [qqq]: unknown table; the tables are model, model.attention, data, "
            "train, optimizer, optimizer.outer, schedule, parallel, zero, memory, comm, "
            "checkpoint, track, paths, batch and sweep"
        ),
        "  spec.toml:15: [optimiser]: unknown table; did you mean [optimizer]?",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps = 3", "spec.toml:1: steps: unknown key; did you mean train.steps (under [train])?"),
        (
            "[model]\nextends = 'x'",
            "spec.toml:2: model.extends: unknown key; did you mean extends (above all tables)?",
        ),
        ("[train]\nwarmup = 1", "did you mean schedule.warmup_steps (under [schedule])?"),
        ("[train]\nqqq = 1", "the keys of [train] are steps, global_batch,"),
        ("qqq = 1", "the keys above all tables are extends, name, seed and output"),
        ('"train.steps" = 5', "train.steps: unknown key"),
        ("[train.steps]\nx = 1", "spec.toml:1: train.steps = a table: must be a whole number"),
        ("seed = {a = 1}", "seed = a table: must be a whole number"),
        ("[[seed]]", "seed = an array of tables: must be a whole number"),
        ("[train]\nsteps = true", "spec.toml:2: train.steps = true: must be a whole number"),
        ("[train]\nsteps = 3.0", "train.steps = 3.0: must be a whole number"),
        ("[train]\nsteps = 1979-05-27", "train.steps = 1979-05-27: must be a whole number"),
        ("optimizer.lr = nan", "optimizer.lr = nan: must be a number > 0"),
        ("optimizer.lr = inf", "optimizer.lr = inf: must be a number > 0"),
        ("optimizer.lr = true", "optimizer.lr = true: must be a number > 0"),
        (
            f"optimizer.lr = 1{'0' * 400}",
            "optimizer.lr = a whole number of 1329 bits: must be a number > 0",
        ),
        (
            f"train.steps = 0x{'f' * 8000}",
            "train.steps = a whole number of 32000 bits: must be a whole number",
        ),
        ("optimizer.betas = [0.9]", "optimizer.betas = [0.9]: must be a list of 2 numbers"),
        (
            "optimizer.betas = [0.9, [[[1]]]]",
            "optimizer.betas = [0.9, […]]: must be a list of 2 numbers",
        ),
        ('name = "a/b"', 'name = "a/b": must be text (at most 100 letters, digits'),
        ('output = "a\\u0000b"', 'output = "a\\x00b": must be text'),
        (
            'parallel.order = "data,\\u001b[31m"',
            'parallel.order = "data,\\x1b[31m": must name each axis once',
        ),
    ],
)
def test_a_mistake_says_where_what_and_what_is_right(
    write: Write, text: str, expected: str
) -> None:
    message = refusal(write(text))
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps = 1\n= 2", "spec.toml:2: not valid TOML: Invalid"),
        ("a = [\n1,\n", "spec.toml:3: not valid TOML: "),
        ("[train]\nsteps = 1\nsteps = 2", "spec.toml:3: not valid TOML: Cannot overwrite a value"),
        ("x = 1\ny = " + "9" * 5000, "spec.toml:2: not valid TOML: a number of too many digits"),
        ("x = 1\ny = " + "[" * 50_000, "spec.toml:2: keys or brackets nested more than 32 deep"),
        (
            "x = 1\n" + "a." * 40_000 + "a = 1",
            "spec.toml:2: keys or brackets nested more than 32 deep",
        ),
        ("# x\n" + "plain words " * 50, "spec.toml:2: not valid TOML: Expected '=' after a key"),
        (b"# \xff", "spec.toml:1: not UTF-8 text"),
        (b"x = 1\n\x00", "spec.toml:2: not valid TOML"),
        (b"\x7fELF\x02\x01\x01\x00" + bytes(range(256)), "spec.toml:"),
        ("#" * 100_001, "spec.toml is no spec: it is larger than 100,000 bytes"),
    ],
)
def test_what_is_not_toml_is_said_with_its_line(
    write: Write, text: str | bytes, expected: str
) -> None:
    message = refusal(write(text))
    assert message.startswith(expected)
    assert message.isprintable()


def test_a_byte_order_mark_and_windows_lines_are_read(write: Write) -> None:
    loaded = load(write(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n"))
    assert (loaded.spec.train.steps, loaded.sources["train.steps"].line) == (3, 2)


def test_what_is_no_readable_file(write: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal("missing.toml") == "missing.toml does not exist"
    assert refusal(".") == ". is a folder, not a file"
    assert refusal("pipe") == "pipe is not a regular file"
    assert "cannot be read" in refusal("a\0b")
    assert "cannot be read" in refusal(write("") + "/x")
    assert "\x1b" not in refusal("\x1b[31mred")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"missing.toml"', 'spec.toml:2: extends = "missing.toml": missing.toml does not exist'),
        ('"."', 'spec.toml:2: extends = ".": . is a folder, not a file'),
        ('"/dev/null"', "is not a regular file"),
        ('""', 'extends = "": must be the path of one other spec'),
        ('"a\\u0000"', "must be the path of one other spec"),
        (
            '["a.toml", "b.toml"]',
            'extends = ["a.toml", "b.toml"]: must be the path of one other spec',
        ),
        ("{}", "extends = a table: must be the path of one other spec"),
        (
            '"spec.toml"',
            "spec.toml:2: these files extend each other in a circle: spec.toml -> spec.toml",
        ),
    ],
)
def test_a_parent_that_cannot_be(write: Write, value: str, expected: str) -> None:
    assert expected in refusal(write(f"\nextends = {value}"))


def test_a_circle_is_seen_through_links(write: Write, tmp_path: Path) -> None:
    write('extends = "link.toml"', "a.toml")
    (tmp_path / "link.toml").symlink_to("a.toml")
    path = write('extends = "a.toml"')
    assert (
        refusal(path)
        == "a.toml:1: these files extend each other in a circle: spec.toml -> a.toml -> a.toml"
    )


def test_nothing_of_a_foreign_file_is_shown(write: Write) -> None:
    write("root:$6$secret:19000:0:99999\nother:$6$hidden", "shadow")
    message = refusal(write('extends = "shadow"'))
    assert message.startswith("shadow:1: not valid TOML")
    assert not any(word in message for word in ("root", "secret", "hidden"))
    write('password = "secret"\n[keys]\nold = "hidden"', "shadow")
    assert not any(word in refusal("spec.toml") for word in ("secret", "hidden"))


def test_thousands_of_mistakes_are_cut_short(write: Write) -> None:
    lines = refusal(
        write("\n".join(f"key{number} = {number}" for number in range(3000)))
    ).splitlines()
    assert lines[0] == "3000 mistakes in spec.toml:"
    assert len(lines) == 22
    assert lines[-1].strip() == "... and 2980 more"


def test_mistakes_of_the_command_line_come_last(write: Write) -> None:
    said = refusal(write("[train]\nsteps = -1\n[model]\nheads = 0"), "optimizer.lr=-3", "seed=x")
    of_file = [said.index(key) for key in ("train.steps", "model.heads")]
    assert max(of_file) < min(said.index(key) for key in ("optimizer.lr", "seed"))


def test_tables_of_one_key_are_joined_and_the_later_entry_wins(write: Write) -> None:
    write('batch.env = { A = "parent", B = "parent", C = "parent" }', "base.toml")
    path = write('extends = "base.toml"\nbatch.env = { B = "spec", C = "spec" }')
    loaded = load(path, ['batch.env={ C = "option" }'])
    assert loaded.spec.batch.env == {"A": "parent", "B": "spec", "C": "option"}
