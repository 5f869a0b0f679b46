"""Read the table [sweep] from the layers of a spec, with all mistakes at once.

Of several files and `--set` that have one, the last that says a part decides; the keys of `grid`
and `random` merge, as tables do.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpczero import env
from hpczero.errors import InputError
from hpczero.spec.keys import Mistake, Origin, entries, full_name, keys, no_such_key
from hpczero.spec.sweep import MOST, Drawn, Entry, Setting, Span, Sweep, SweepRun, value_word
from hpczero.spec.table import LARGEST, NAME, PATTERNS
from hpczero.spec.toml import Layer
from hpczero.text import first_few, format_count, join_words, printable, toml_repr

_PARTS = ("grid", "list", "random", "runs", "seeds", "at_once", "run")
_TASK = "task"  # sweep.run: the number of this task of an array
_MAY_NOT_DIFFER = {
    "name": "a run's name is made of what it sets (a table of [[sweep.list]] may have a name)",
    "output": "the runs of a sweep lie in one folder",
    "batch.site": "a site's profile holds for the whole sweep",
}


@dataclass(frozen=True)
class Given:
    """The layers' words: the sweep, the run that is wanted of it, and the mistakes."""

    sweep: Sweep
    run: str | int | None = None  # name or number of one run, or "task"; None: all
    mistakes: list[Mistake] = field(default_factory=list)

    def runs(self, name: str, seed: int) -> list[SweepRun]:
        """Return the runs, or the one that is wanted; `name`, `seed`: of the spec.

        InputError: two runs have the same name, or there is no such run.
        """
        runs = self.sweep.runs(name, seed)
        names = Counter(run.name for run in runs)
        if twice := [run_name for run_name, count in names.items() if count > 1]:
            raise InputError(
                f"[sweep] has runs that set the same: {first_few(twice)}; "
                "leave one of them out, or ask for fewer runs"
            )
        if self.run is None:
            return runs
        wanted = env.array_task() if self.run == _TASK else self.run
        if wanted is None:
            raise InputError(
                'sweep.run = "task" is the number of a task, and this is none of an array: '
                f"neither {' nor '.join(env.ARRAY_TASK)} is set"
            )
        for run in runs:
            if wanted in (run.number, str(run.number), run.name, run.name[len(name) + 1 :]):
                return [run]
        names_of_all = first_few([run.name for run in runs])
        raise InputError(
            f"sweep.run = {toml_repr(wanted)}: the sweep has the runs {names_of_all}, "
            f"with the numbers 0 to {len(runs) - 1}"
        )


def take_sweep(layers: Sequence[Layer]) -> Given | None:
    """Take the tables [sweep] out of the layers; return None if there are none."""
    parts: dict[str, Any] = {}
    places: dict[tuple[str, ...], _Placed] = {}
    mistakes: list[Mistake] = []
    found = False
    for layer in layers:
        if "sweep" not in layer.tree:
            continue
        found = True
        table = layer.tree.pop("sweep")
        if not isinstance(table, dict):
            text = f"sweep = {toml_repr(table)}: sweep is a table: write it as [sweep]"
            mistakes.append(Mistake(layer.source("sweep"), partial(str, text)))
            continue
        for part, value in table.items():
            if part in ("grid", "random") and isinstance(value, dict):
                flat = dict(_settings(value, is_value=partial(_is_choice, part)))
                parts.setdefault(part, {})
                parts[part] |= {key: value for key, (_, value) in flat.items()}
                places |= {(part, key): _Placed(layer, path) for key, (path, _) in flat.items()}
            else:
                parts[part] = value
                places[part,] = _Placed(layer, ())
    if not found:
        return None
    reader = _Reader(parts, {at: place.source(at[0]) for at, place in places.items()}, mistakes)
    reader.refuse_overridden([layer for layer in layers if layer.option])
    seeds = [layer.tree["seed"] for layer in layers if _is_whole(layer.tree.get("seed"))]
    return reader.given(seeds[-1] if seeds else keys()["seed"].default)


@dataclass(frozen=True)
class _Placed:
    layer: Layer
    path: tuple[str, ...]

    def source(self, part: str) -> Origin:
        return self.layer.source("sweep", part, *self.path)


def _is_choice(part: str, value: Any) -> bool:
    """Return True for what stands behind a key, False for a table with more keys."""
    if part == "random" and isinstance(value, dict):
        return not any(isinstance(inner, dict | list) for inner in value.values())
    return not isinstance(value, dict)


def _settings(
    table: dict[str, Any],
    is_value: Callable[[Any], bool],
    before: tuple[str, ...] = (),
) -> Iterator[tuple[str, tuple[tuple[str, ...], Any]]]:
    """Yield key -> (its path, value): "optimizer.lr" may be quoted or stand in nested tables."""
    for name, value in table.items():
        path = (*before, name)
        key = ".".join(path)
        if key not in keys() and isinstance(value, dict) and not is_value(value):
            yield from _settings(value, is_value, path)
        else:
            yield key, (path, value)


@dataclass
class _Reader:
    parts: dict[str, Any]
    sources: dict[tuple[str, ...], Origin]
    mistakes: list[Mistake]

    def given(self, seed: int) -> Given:
        for part in self.parts:
            if part not in _PARTS:
                text = f"sweep.{printable(part, 60)}: [sweep] has {join_words(list(_PARTS))}"
                self._wrong(part, text)
        grid = self._grid()
        drawn = self._random()
        draws = self._count("runs", 0)
        if drawn and not draws and "runs" not in self.parts:
            self._wrong("random", "sweep.random needs sweep.runs, the number of draws")
        if draws and "random" not in self.parts:
            self._wrong("runs", "sweep.runs is the number of draws of [sweep.random]: give both")
        sweep = Sweep(
            entries=self._list(),
            grid=grid,
            random=drawn,
            draws=draws,
            seeds=self._seeds(seed),
            at_once=self._count("at_once", 0),
        )
        self._refuse_twice(sweep)
        if not sweep.sizes and not self.mistakes:
            origin = next(iter(self.sources.values()), Origin("", None, "[sweep]"))
            text = "[sweep] says nothing: give it grid, list, random or seeds"
            self.mistakes.append(Mistake(origin, partial(str, text)))
        return Given(sweep, self._run(), self.mistakes)

    def refuse_overridden(self, options: Sequence[Layer]) -> None:
        """Note each `--set` of a key that the sweep sets: the sweep would overwrite it."""
        swept = {key for part, *keys_in in self.sources for key in keys_in}
        tables = self.parts.get("list")
        for table in tables if isinstance(tables, list) else []:
            if isinstance(table, dict):
                swept |= {key for key, _ in _settings(table, lambda value: False)} - {"name"}
        swept |= {"seed"} if isinstance(self.parts.get("seeds"), list) else set()
        for layer in options:
            for table, leaf, _ in entries(layer.tree):
                key = full_name(table, leaf)
                if key in swept:
                    text = f"the sweep sets {key} itself: change it in [sweep]"
                    self.mistakes.append(Mistake(layer.source(), partial(str, text)))

    def _wrong(self, part: str, text: str, key: str = "") -> None:
        at = (part, key) if key else (part,)
        anywhere = (source for place, source in self.sources.items() if place[0] == part)
        source = self.sources.get(at) or next(anywhere, Origin("", None, "[sweep]"))
        self.mistakes.append(Mistake(source, partial(str, text)))

    def _may_be_set(self, part: str, key: str, at: str = "") -> bool:
        if key not in keys():
            self._wrong(part, f"sweep.{part}: {no_such_key(key)}", at)
        elif key in _MAY_NOT_DIFFER:
            self._wrong(part, f"sweep.{part}: {key} cannot differ: {_MAY_NOT_DIFFER[key]}", at)
        else:
            return True
        return False

    def _table(self, part: str) -> dict[str, Any]:
        table = self.parts.get(part, {})
        if isinstance(table, dict):
            return table
        self._wrong(part, f"sweep.{part} = {toml_repr(table)}: must be a table of keys")
        return {}

    def _grid(self) -> dict[str, tuple[Setting, ...]]:
        grid = {}
        for key, values in self._table("grid").items():
            if self._may_be_set("grid", key, key) and self._are_choices("grid", key, values):
                source = self.sources["grid", key]
                grid[key] = tuple(Setting(key, value, source) for value in values)
        return grid

    def _are_choices(self, part: str, key: str, values: Any) -> bool:
        name = f"sweep.{part}: {key} = {toml_repr(values)}"
        if not isinstance(values, list) or not values:
            self._wrong(part, f"{name}: must be a list of values", key)
            return False
        words = [value_word(value) for value in values[: MOST + 1]]
        if twice := [word for word in dict.fromkeys(words) if words.count(word) > 1]:
            self._wrong(part, f"{name}: has {printable(twice[0], 60)} twice", key)
        return not twice

    def _random(self) -> dict[str, Drawn]:
        drawn = {}
        for key, among in self._table("random").items():
            if not self._may_be_set("random", key, key):
                continue
            if isinstance(among, list):
                if self._are_choices("random", key, among):
                    drawn[key] = Drawn(tuple(among), self.sources["random", key])
            elif span := self._span(key, among):
                drawn[key] = Drawn(span, self.sources["random", key])
        return drawn

    def _span(self, key: str, among: Any) -> Span | None:
        """Return the span; it has whole numbers if both ends and the key's default are whole."""
        form = "must be {low = A, high = B}, also with log = true, or a list of values"
        name = f"sweep.random: {key} = {toml_repr(among)}"
        if not isinstance(among, dict) or not {"low", "high"} <= among.keys() <= _OF_A_SPAN:
            self._wrong("random", f"{name}: {form}", key)
            return None
        low, high, log = among["low"], among["high"], among.get("log", False)
        if not (_is_number(low) and _is_number(high) and isinstance(log, bool)):
            self._wrong("random", f"{name}: {form}", key)
        elif not low < high:
            self._wrong("random", f"{name}: low must be less than high", key)
        elif log and low <= 0:
            self._wrong("random", f"{name}: with log = true, low must be more than 0", key)
        else:
            whole = isinstance(low, int) and isinstance(high, int)
            return Span(low, high, log, whole and not isinstance(keys()[key].default, float))
        return None

    def _list(self) -> tuple[Entry, ...]:
        tables = self.parts.get("list", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self._wrong("list", "sweep.list: must be tables of settings, each as [[sweep.list]]")
            return ()
        return tuple(self._entry(number, table) for number, table in enumerate(tables, 1))

    def _entry(self, number: int, table: dict[str, Any]) -> Entry:
        source = self.sources["list",]
        label = table.get("name", "")
        if "name" in table and not (isinstance(label, str) and re.fullmatch(NAME, label)):
            text = f"the name {toml_repr(label)} of table {number} must be {PATTERNS[NAME]}"
            self._wrong("list", f"sweep.list: {text}")
            label = "x"
        settings = []
        for key, (_, value) in _settings(table, lambda value: False):
            if key != "name" and self._may_be_set("list", key):
                settings.append(Setting(key, value, source))
        if not settings and not label:
            text = f"sweep.list: table {number} sets nothing; one that is meant so has a name"
            self._wrong("list", text)
        return Entry(tuple(settings), label)

    def _seeds(self, seed: int) -> tuple[Setting, ...]:
        given = self.parts.get("seeds")
        if given is None:
            return ()
        if isinstance(given, list) and given:
            values = given if self._are_choices("seeds", "seed", given) else []
        elif _is_whole(given) and 1 <= given <= MOST:
            values = list(range(seed, seed + given))
        else:
            text = f"sweep.seeds = {toml_repr(given)}: must be a number up to {MOST:,}, or a list"
            self._wrong("seeds", text)
            return ()
        return tuple(Setting("seed", value, self.sources["seeds",]) for value in values)

    def _count(self, part: str, default: int) -> int:
        given = self.parts.get(part, default)
        if part in self.parts and not (_is_whole(given) and 1 <= given <= LARGEST):
            text = f"sweep.{part} = {toml_repr(given)}: must be a whole number >= 1"
            self._wrong(part, text)
            return default
        return int(given)

    def _run(self) -> str | int | None:
        run = self.parts.get("run")
        if run is None or _is_whole(run) or isinstance(run, str):
            return run
        self._wrong("run", f"sweep.run = {toml_repr(run)}: must be a run's name or number")
        return None

    def _refuse_twice(self, sweep: Sweep) -> None:
        given = sweep.keys
        for key in dict.fromkeys(key for key in given if given.count(key) > 1):
            parts = [part for part in ("list", "grid", "random") if self._sets(part, key)]
            parts += ["seeds"] if key == "seed" and sweep.seeds else []
            by = " and ".join(f"sweep.{part}" for part in parts)
            self._wrong(parts[-1], f"{key} is set by {by}: leave it to one of them", key)
        count = 1
        for size in sweep.sizes.values():
            count *= size
        if count > MOST:
            sizes = " x ".join(f"{size:,} ({part})" for part, size in sweep.sizes.items())
            text = f"{sizes} make {format_count(count, 'run')}; a sweep has at most {MOST:,}"
            self._wrong(next(iter(self.parts)), text)

    def _sets(self, part: str, key: str) -> bool:
        value = self.parts.get(part, {})
        if isinstance(value, list):
            return any(
                key in dict(_settings(table, lambda value: False))
                for table in value
                if isinstance(table, dict)
            )
        return isinstance(value, dict) and key in value


_OF_A_SPAN = {"low", "high", "log"}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
