"""TOML -> Spec: layers, sources, and mistakes that say where, what, and what would be right."""

import os
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.errors import InputError
from hpczero.spec.keys import flat, keys
from hpczero.spec.load import differences, load, to_toml, toml_value
from hpczero.spec.rules import contradictions, unavailable, without_effect
from hpczero.spec.schema import Model, Parallel, Spec

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the folder that the test runs in."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "spec.toml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(path, overrides)
    return str(caught.value)


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


def test_all_mistakes_at_once_each_with_its_line(write: Write) -> None:
    write("train.steps = 10\ncomm = 3\noptimizer.betas = [0.9, 2]\n", "base.toml")
    path = write(
        """extends = "base.toml"
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
    )
    assert refusal(path).splitlines() == [
        "12 mistakes in spec.toml:",
        "  base.toml:2: comm = 3: comm is a table: write it as [comm], with its keys below",
        (
            "  base.toml:3: optimizer.betas = [0.9, 2]: must be a list of 2 numbers, each a "
            "number >= 0 and < 1"
        ),
        "  spec.toml:2: nmae: unknown key; did you mean name?",
        "  spec.toml:4: train.stesp: unknown key; did you mean train.steps?",
        "  spec.toml:5: train.layers: unknown key; did you mean model.layers (under [model])?",
        "  spec.toml:6: train.micro_batch = 0: must be a whole number from 1 to 1_000_000",
        '  spec.toml:7: train.precision = "fp64": must be "bf16", "fp16" or "fp32"',
        (
            "  spec.toml:10: data.source = 3: must be text (not empty, at most 4096 characters, "
            "no control characters)"
        ),
        (
            "  spec.toml:12: schedule.warmup_steps = 500 is more than train.steps = 10: at most "
            "10, or more steps (train.steps: base.toml:1)"
        ),
        (
            "  spec.toml:13: model = an array of tables: model is a table: write it once, as "
            "[model], not [[model]]"
        ),
        "  spec.toml:14: [qqq]: unknown table; the tables are model, data, train, optimizer, "
        "schedule, parallel, zero, comm, checkpoint, paths"
        " and batch",
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "schedule.warmup_steps = 101",
            "schedule.warmup_steps = 101 is more than train.steps = 100",
        ),
        (
            "train.steps = 5\nschedule = {name = 'wsd', warmup_steps = 3, decay_steps = 3}",
            "make 6, more than train.steps = 5",
        ),
        (
            "schedule.decay_steps = 5",
            'schedule.decay_steps = 5 is for "wsd" only, and schedule.name = "cosine"',
        ),
        ("schedule.min_lr = 1", "schedule.min_lr = 1.0 is more than optimizer.lr = 0.0003"),
        (
            "schedule = {name = 'constant', min_lr = 1e-5}",
            'schedule.min_lr = 1e-05, but schedule.name = "constant"',
        ),
        (
            "train = {eval_every = 5, eval_batches = 0}",
            "train.eval_batches = 0 means no evaluation, train.eval_every = 5",
        ),
        ("data.validation_fraction = 0", "leaves no text for train.eval_batches = 8"),
        ("model = {heads = 16, hidden = 8}", "model.heads = 16 is more than model.hidden = 8"),
        (
            "parallel.order = 'data'\nparallel.tensor = 2",
            'parallel.order = "data": must name each axis once',
        ),
        ("checkpoint.weights_only = true", 'checkpoint.resume = "auto" names no checkpoint'),
    ],
)
def test_contradictions_show_all_numbers(write: Write, text: str, expected: str) -> None:
    message = refusal(write(text))
    assert expected in message
    assert message.startswith("spec.toml:")
    assert "mistakes" not in message


def test_defaults_that_stand_in_for_mistakes_contradict_nothing(write: Write) -> None:
    message = refusal(write("[train]\nstepz = 1000\n[schedule]\nwarmup_steps = 500"))
    assert message == "spec.toml:2: train.stepz: unknown key; did you mean train.steps?"
    message = refusal(write("[train]\nsteps = '1000'\n[schedule]\nwarmup_steps = 500"))
    assert "warmup" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "parallel.tensor = 8\nmodel.heads = 6",
            "parallel.tensor = 8 is more than model.heads = 6, and every tensor rank needs a head: "
            "parallel.tensor = 4, 2 or 1 (for the same ranks), at most 6, or at least "
            "model.heads = 8",
        ),
        (
            "parallel = {tensor = 6, sequence_parallel = true}\nmodel = {seq_len = 4, heads = 6}",
            "parallel.tensor = 6 ranks cannot share model.seq_len = 4 positions "
            "(parallel.sequence_parallel = true): "
            "parallel.tensor = 3, 2 or 1 (for the same ranks), at most 4, or "
            "parallel.sequence_parallel = false",
        ),
        (
            "parallel.pipeline = 12\nmodel.layers = 7",
            "parallel.pipeline = 12 is more than the 9 layers of the model (model.layers = "
            "7, and those before and after them): "
            "parallel.pipeline = 6, 4, 3 or 2 (for the same ranks), at most 9, or at least "
            "model.layers = 10",
        ),
        (
            "parallel = {pipeline = 4, schedule = 'interleaved', chunks = 3}\nmodel.layers = 7",
            "parallel.pipeline = 4 x parallel.chunks = 3 makes 12 parts, more than the 9 "
            "layers of the model (model.layers = 7, "
            "and those before and after them): parallel.pipeline = 2 or 1 (for the same "
            "ranks), at most 3, or parallel.chunks = 2 or less, "
            "or at least model.layers = 10",
        ),
        (
            "parallel = {pipeline = 2, chunks = 2}",
            'parallel.chunks = 2 is for "interleaved" only, and parallel.schedule = "1f1b"',
        ),
        (
            "parallel = {pipeline = 2, schedule = 'interleaved'}",
            'parallel.schedule = "interleaved" is for several parallel.chunks on a stage',
        ),
    ],
)
def test_layouts_that_the_model_cannot_have(write: Write, text: str, expected: str) -> None:
    message = refusal(write(text))
    assert expected in message
    assert "mistakes" not in message


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(tensor=6),
        Parallel(pipeline=9),
        Parallel(pipeline=3, chunks=3, schedule="interleaved"),
        Parallel(tensor=5, sequence_parallel=True),
    ],
)
def test_layouts_at_the_model_s_limits(parallel: Parallel) -> None:
    model = Model(heads=6, layers=7, seq_len=5)
    assert contradictions(Spec(parallel=parallel, model=model)) == []
    assert (
        contradictions(
            Spec(
                parallel=parallel,
                model=model.model_copy(update={"heads": 5, "layers": 6, "seq_len": 4}),
            )
        )
        != []
    )
    assert (
        contradictions(
            Spec(parallel=parallel, model=Model(family="some.module:factory", seq_len=5))
        )
        == []
    ), "its heads and layers are not known"


def test_what_has_no_effect_on_one_rank_or_one_stage_is_said() -> None:
    notes = without_effect(Spec(parallel=Parallel(sequence_parallel=True, schedule="gpipe")))
    assert [note.partition(" has no effect with ")[::2] for note in notes] == [
        (
            "parallel.sequence_parallel = true",
            "parallel.tensor = 1: there is nobody to share the sequence with",
        ),
        ('parallel.schedule = "gpipe"', "parallel.pipeline = 1: there is one stage"),
    ]
    assert (
        without_effect(
            Spec(parallel=Parallel(tensor=2, sequence_parallel=True, pipeline=2, schedule="gpipe"))
        )
        == []
    )


def test_what_cannot_run_yet_loads_and_is_named(write: Write) -> None:
    spec = load(write("parallel = {tensor = 2, pipeline = 3}")).spec
    assert unavailable(spec) == unavailable(Spec()) == []
    own = Spec(
        model=Model(family="package.module:factory"), parallel=Parallel(tensor=2, pipeline=3)
    )
    assert [text.split(" with ")[0] for text in unavailable(own)] == ["parallel.tensor = 2"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_written_as_toml_on_one_line(text: str) -> None:
    written = toml_value(text)
    assert tomllib.loads(f"value = {written}") == {"value": text}
    assert written.splitlines() == [written]
    assert not any(unicodedata.category(character) == "Cc" for character in written)


SPECS = st.builds(
    lambda seed, output, source, lr, betas, eps, steps: Spec().model_copy(
        update={
            "seed": seed,
            "output": output,
            "data": Spec().data.model_copy(update={"source": source}),
            "train": Spec().train.model_copy(update={"steps": steps}),
            "optimizer": Spec().optimizer.model_copy(update={"lr": lr, "betas": betas, "eps": eps}),
        }
    ),
    seed=st.integers(0, 2**63 - 1),
    output=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30),
    source=st.text("ab\"\\'# \u2028é𝄞", min_size=1, max_size=30),
    lr=st.floats(0, exclude_min=True, allow_infinity=False),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    eps=st.floats(0, 1, exclude_min=True),
    steps=st.integers(1, 10**15),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(spec=SPECS)
def test_the_resolved_copy_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, spec: Spec
) -> None:
    text = to_toml(spec)
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_text(text, encoding="utf-8")
    loaded = load(path)
    assert loaded.spec == spec
    assert all(source.line for source in loaded.sources.values()), "the copy holds every key"
    assert to_toml(loaded.spec) == text


def test_differences_name_key_values_and_role(write: Write) -> None:
    old, new = load(write("")).spec, load(write("seed = 2\ntrain.steps = 5\noutput = 'x'")).spec
    assert differences(old, old) == []
    assert [(d.key, d.old, d.new, d.role) for d in differences(old, new)] == [
        ("seed", 1, 2, "identity"),
        ("output", "runs", "x", "site"),
        ("train.steps", 100, 5, "changeable"),
    ]
