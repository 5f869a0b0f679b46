"""A table [sweep]: the runs that it makes, their names, and its mistakes."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.errors import InputError
from hpczero.spec.keys import Origin, keys
from hpczero.spec.load import load, load_sweep, toml_value
from hpczero.spec.schema import Spec
from hpczero.spec.sweep import Drawn, Entry, Setting, Span, Sweep, differing, value_word
from hpczero.spec.table import NAME
from tests.support.specs import Write, refusal

HERE = Origin("spec.toml", 1, "spec.toml:1")
SCALARS = st.one_of(
    st.integers(-(10**6), 10**15), st.floats(allow_nan=False), st.text(max_size=40), st.booleans()
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=4))
KEYS = sorted(set(keys()) - {"name", "output", "batch.site", "seed"})


def distinct(values: list[Any]) -> list[Any]:
    """Leave out values that a key would take for the same."""
    first: dict[str, Any] = {}
    for value in values:
        first.setdefault(value_word(value), value)
    return list(first.values())


GRIDS = st.dictionaries(
    st.sampled_from(KEYS), st.lists(VALUES, min_size=1, max_size=4).map(distinct), max_size=3
)


def sweep_of(grid: dict[str, list[Any]], **parts: Any) -> Sweep:
    choices = {
        key: tuple(Setting(key, value, HERE) for value in values) for key, values in grid.items()
    }
    return Sweep(grid=choices, **parts)


def by_name(sweep: Sweep, name: str = "gpt", seed: int = 1) -> dict[str, dict[str, Any]]:
    return {run.name: run.differs for run in sweep.runs(name, seed)}


@settings(max_examples=200, deadline=None)
@given(GRIDS, st.integers(1, 3), st.text("gpt._-0", min_size=1, max_size=100))
def test_names_are_unique_and_fit_files(grid: dict[str, list[Any]], seeds: int, name: str) -> None:
    name = "g" + name[1:]
    sweep = sweep_of(grid, seeds=tuple(Setting("seed", seed, HERE) for seed in range(seeds)))
    runs = sweep.runs(name, 1)
    count = seeds
    for values in grid.values():
        count *= len(values)
    assert len({run.name for run in runs}) == len(runs) == count
    assert all(re.fullmatch(NAME, run.name) for run in runs)
    assert [run.number for run in runs] == list(range(count))


@settings(max_examples=100, deadline=None)
@given(GRIDS, VALUES, st.randoms())
def test_a_run_keeps_its_name_when_the_sweep_grows_or_is_written_in_another_order(
    grid: dict[str, list[Any]], more: Any, order: Any
) -> None:
    before = by_name(sweep_of(grid))
    turned = list(grid.items())
    order.shuffle(turned)
    assert by_name(sweep_of(dict(turned))) == before
    larger = {key: distinct([*values, more]) for key, values in grid.items()}
    assert before.items() <= by_name(sweep_of(larger)).items()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 2**63 - 1))
def test_draws_stay_when_there_are_more_of_them(draws: int, more: int, seed: int) -> None:
    among = {
        "optimizer.lr": Drawn(Span(1e-4, 1e-2, log=True), HERE),
        "model.layers": Drawn(Span(2, 9, whole=True), HERE),
        "schedule.name": Drawn(("wsd", "cosine"), HERE),
    }
    first = Sweep(random=among, draws=draws).runs("gpt", seed)
    assert Sweep(random=among, draws=draws + more).runs("gpt", seed)[:draws] == first
    assert len({run.name for run in first}) == draws, "none is drawn twice"
    for run in first:
        assert 1e-4 <= run.differs["optimizer.lr"] <= 1e-2
        assert run.differs["model.layers"] in range(2, 10)
        assert isinstance(run.differs["model.layers"], int)
    alone = Sweep(random={"optimizer.lr": among["optimizer.lr"]}, draws=draws).runs("gpt", seed)
    rates = [run.differs["optimizer.lr"] for run in alone]
    together = [run.differs["optimizer.lr"] for run in first]
    moved = sum(one != other for one, other in zip(rates, together, strict=True))
    assert moved <= 2, "keys move each other where a draw repeats an earlier one alone"


def test_draws_cover_their_span_by_its_logarithm() -> None:
    among = {"optimizer.lr": Drawn(Span(1e-4, 1e-2, log=True), HERE)}
    rates = [run.differs["optimizer.lr"] for run in Sweep(random=among, draws=400).runs("x", 3)]
    assert 150 < sum(rate < 1e-3 for rate in rates) < 250
    plain = {"optimizer.lr": Drawn(Span(1e-4, 1e-2), HERE)}
    rates = [run.differs["optimizer.lr"] for run in Sweep(random=plain, draws=400).runs("x", 3)]
    assert sum(rate < 1e-3 for rate in rates) < 80


@pytest.mark.parametrize("log", [False, True])
def test_a_span_of_whole_numbers_has_both_its_ends(log: bool) -> None:
    span = Span(1, 3, log=log, whole=True)
    assert {span.at(number / 100) for number in range(100)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("optimizer.lr", 1e-3, "lr0.001"),
        ("optimizer.lr", 1.0, "lr1"),
        ("optimizer.lr", 1e20, "lr1e20"),
        ("train.precision", "bf16", "precision_bf16"),
        ("optimizer.name", "muon", "optimizer.name_muon"),
        ("optimizer.betas", [0.9, 0.95], "betas0.9_0.95"),
        ("model.tied_embeddings", True, "tied_embeddings_true"),
        ("data.source", "/scratch/texts/books.h5", "source_books.h5_"),
        ("seed", 3, "seed3"),
        ("batch.modules", ["gcc"], "modules_gcc_"),
    ],
)
def test_a_name_says_what_differs(key: str, value: Any, part: str) -> None:
    (name,) = by_name(sweep_of({key: [value]}))
    assert name.startswith(f"gpt-{part}")
    assert name == f"gpt-{part}" or len(name) == len(f"gpt-{part}") + 6


def test_a_label_stands_for_the_settings_of_its_table() -> None:
    wide = Entry((Setting("model.hidden", 512, HERE), Setting("model.heads", 8, HERE)), "wide")
    deep = Entry((Setting("model.layers", 9, HERE),))
    sweep = sweep_of({"optimizer.lr": [1e-3]}, entries=(wide, deep))
    assert list(by_name(sweep)) == ["gpt-wide-lr0.001", "gpt-layers9-lr0.001"]


SPEC = """
name = "gpt"
output = "$SCRATCH/runs"
data.source = "synthetic"
model = { layers = 2, hidden = 32, heads = 2, seq_len = 32 }

[sweep]
seeds = 2

[sweep.grid]
"optimizer.lr" = [1e-3, 2e-3]
schedule.warmup_steps = [0, 10]
"""


def test_runs_are_ordinary_specs(write: Write) -> None:
    sweep = load_sweep(write(SPEC))
    assert sweep
    assert len(sweep.runs) == 8
    for run, loaded in sweep.runs:
        spec = loaded.spec
        assert (spec.name, spec.output) == (run.name, "$SCRATCH/runs/gpt")
        assert spec.optimizer.lr == run.differs["optimizer.lr"]
        assert spec.seed == run.differs["seed"]
        assert loaded.sources["optimizer.lr"].text.endswith("spec.toml:11")
    assert [loaded.spec.seed for _, loaded in sweep.runs[:2]] == [1, 2]


def test_quoted_and_nested_keys_are_the_same(write: Write) -> None:
    quoted = (
        '[sweep.grid]\n"optimizer.lr" = [1e-3]\n[sweep.random]\n"train.steps" = {low=1, high=9}'
    )
    nested = "[sweep.grid.optimizer]\nlr = [1e-3]\n[sweep.random]\ntrain.steps = {low=1, high=9}"
    text = "[sweep]\nruns = 3\n"
    first, second = (
        load_sweep(write(text + tables, f"{number}.toml"))
        for number, tables in enumerate((quoted, nested))
    )
    assert first
    assert second
    assert [run.name for run, _ in first.runs] == [run.name for run, _ in second.runs]
    assert len(first.runs) == 3


@pytest.mark.parametrize("wanted", ["3", "gpt-lr0.001-warmup_steps10-seed2"])
def test_one_run_is_a_spec_for_any_verb(write: Write, wanted: str) -> None:
    spec = load(write(SPEC), [f"sweep.run={wanted}"]).spec
    assert spec.name == "gpt-lr0.001-warmup_steps10-seed2"
    assert load(write(SPEC), [f"sweep.run={spec.name[4:]}"]).spec == spec


def test_a_task_of_an_array_takes_its_run(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(SPEC)
    assert "neither SLURM_ARRAY_TASK_ID nor PBS_ARRAY_INDEX" in refusal(path, "sweep.run=task")
    for variable in ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "5")
            assert load(path, ["sweep.run=task"]).spec.name == "gpt-lr0.002-warmup_steps0-seed2"


def test_a_whole_sweep_is_no_spec(write: Write) -> None:
    told = refusal(write(SPEC))
    assert "is a sweep of several runs" in told
    assert "--set sweep.run=NAME" in told


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("grid = { 'optimizer.rate' = [1] }", "optimizer.rate is no key of the spec"),
        ("grid = { 'optimizer.lr' = 1e-3 }", "must be a list of values"),
        ("grid = { 'optimizer.lr' = [1e-3, 0.001] }", "has 0.001 twice"),
        ("grid = { 'optimizer.lr' = [1e-3, 'x'] }", 'optimizer.lr = "x": must be a number'),
        ("grid = { name = ['a'] }", "name cannot differ"),
        ("grid = { output = ['a'] }", "output cannot differ"),
        ("grid = { 'batch.site' = ['a'] }", "batch.site cannot differ"),
        ("grid = [1]", "must be a table of keys"),
        ("random = { 'optimizer.lr' = {low = 1, high = 2} }", "needs sweep.runs"),
        ("runs = 3", "give both"),
        ("runs = 3\nrandom = { 'optimizer.lr' = {low = 2, high = 1} }", "low must be less"),
        ("runs = 3\nrandom = { 'optimizer.lr' = {low = 0, high = 1, log = true} }", "more than 0"),
        ("runs = 3\nrandom = { 'optimizer.lr' = {low = 0} }", "must be {low = A, high = B}"),
        ("runs = 9\nrandom = { 'train.steps' = {low = 1, high = 2} }", "set the same"),
        ("seeds = 0", "must be a number up to 1,000"),
        ("seeds = 2\ngrid = { seed = [1] }", "seed is set by sweep.grid and sweep.seeds"),
        ("list = [{ 'train.steps' = 1 }]\ngrid = { 'train.steps' = [1] }", "sweep.list and"),
        ("list = [{}]", "table 1 sets nothing"),
        ("list = [{ name = 'a/b' }]", "must be at most 100 letters"),
        ("list = [{ 'train.steps' = 3 }, { train.steps = 3 }]", "set the same"),
        ("list = 3", "each as [[sweep.list]]"),
        ("at_once = 0\nseeds = 2", "must be a whole number >= 1"),
        ("of = 3\nseeds = 2", "[sweep] has grid, list, random"),
        ("", "[sweep] says nothing"),
        ("run = []\nseeds = 2", "must be a run's name or number"),
        ("run = 9\nseeds = 2", "with the numbers 0 to 1"),
    ],
)
def test_a_mistake_is_told_with_the_way_out(write: Write, table: str, told: str) -> None:
    path = write(f"[sweep]\n{table}\n")
    read = load if table.startswith("run = 9") else load_sweep
    with pytest.raises(InputError) as caught:
        read(path)
    assert told in str(caught.value)
    assert "spec.toml:" in str(caught.value) or "[sweep]" in str(caught.value) or "run = 9" in table


def test_all_mistakes_of_all_runs_at_once_and_each_once(write: Write) -> None:
    text = SPEC.replace("[0, 10]", "[0, 10, 10_000]") + "\n[train]\nsteps = 100\nprecision = 7\n"
    told = refusal(write(text), "sweep.run=0")
    assert "train.precision = 7" in told
    with pytest.raises(InputError) as caught:
        load_sweep(write(text))
    assert str(caught.value).count("train.precision = 7") == 1
    assert "schedule.warmup_steps = 10000 is more than train.steps = 100" in str(caught.value)
    assert "2 mistakes" in str(caught.value)


def test_there_is_a_most_of_runs(write: Write) -> None:
    text = (
        "[sweep]\nseeds = 100\ngrid = { 'train.steps' = [" + "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] }"
    )
    with pytest.raises(InputError, match=r"make 1,100 runs; a sweep has at most 1,000"):
        load_sweep(write(text))
    text = "[sweep]\nruns = 1_000_000_000\nrandom = { 'optimizer.lr' = {low = 0, high = 1.0} }"
    with pytest.raises(InputError, match="at most 1,000"):
        load_sweep(write(text))


def test_a_value_from_the_command_line_is_not_overwritten_in_silence(write: Write) -> None:
    path = write(SPEC)
    with pytest.raises(InputError, match=r"the sweep sets optimizer\.lr itself"):
        load_sweep(path, ["optimizer.lr=5e-4"])
    sweep = load_sweep(path, ["seed=7", "name=other", "train.steps=50"])
    assert sweep
    assert sweep.runs[0][1].spec.seed == 7
    assert sweep.runs[0][0].name == "other-lr0.001-warmup_steps0-seed7"


def test_tables_of_several_files_merge(write: Write) -> None:
    write(SPEC, "base.toml")
    text = 'extends = "base.toml"\n[sweep]\nseeds = [5]\ngrid = { "optimizer.lr" = [4e-3] }\n'
    sweep = load_sweep(write(text))
    assert sweep
    assert [run.name for run, _ in sweep.runs] == [
        "gpt-lr0.004-warmup_steps0-seed5",
        "gpt-lr0.004-warmup_steps10-seed5",
    ]


def test_what_differs_is_read_from_the_specs_themselves() -> None:
    first = Spec(name="a", output="x", seed=3)
    second = Spec(name="b", output="y", seed=3, train={"steps": 7})  # type: ignore[arg-type]
    assert differing({"a": first, "b": second}) == {
        "a": {"train.steps": first.train.steps},
        "b": {"train.steps": 7},
    }
    assert differing({"a": first}) == {"a": {}}


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    [*KEYS[:20], "grid", "list", "random", "runs", "seeds", "low", "high", "name"]
                ),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=12,
    )
)
def test_whatever_the_table_says_there_are_runs_or_one_message(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(f"sweep = {toml_value(value)}\n", "utf-8", "surrogatepass")
    message = ""
    sweep = None
    try:
        sweep = load_sweep(path)
    except InputError as error:
        message = str(error)
    assert bool(message) != bool(sweep)
    assert all(one.isprintable() or one == "\n" for one in message)
    assert not sweep or all(loaded.spec.name == run.name for run, loaded in sweep.runs)
