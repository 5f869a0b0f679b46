"""From TOML files to a `Spec`, with the origin of every value and all mistakes at once.

Precedence, lowest first: defaults, the profile of the site, the chain of `extends`, the spec, each
`--set`. Tables merge, arrays replace.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpczero.errors import InputError
from hpczero.spec import site_profile
from hpczero.spec.keys import (
    Key,
    Mistake,
    Origin,
    entries,
    flat,
    full_name,
    keys,
    message,
    not_allowed,
    table_description,
    tables,
    unknown,
)
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Spec
from hpczero.spec.sweep import SweepRun
from hpczero.spec.sweep_table import Given, take_sweep
from hpczero.spec.table import Role, Table
from hpczero.spec.toml import Layer, read_layers
from hpczero.text import printable

__all__ = [
    *("Difference", "GivenValue", "Loaded", "LoadedSweep", "Origin"),
    *("differences", "load", "load_sweep", "to_toml"),
]

DEFAULT = Origin("", None, "default")


@dataclass(frozen=True)
class GivenValue:
    """A value of a key, and where it came from."""

    value: Any
    source: Origin


@dataclass(frozen=True)
class Loaded:
    """A spec, and the history of each key: "train.steps" -> its values, the default first."""

    spec: Spec
    history: dict[str, tuple[GivenValue, ...]]

    @property
    def sources(self) -> dict[str, Origin]:
        return {key: given[-1].source for key, given in self.history.items()}


@dataclass(frozen=True)
class Difference:
    key: str
    old: Any
    new: Any
    role: Role

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} there, {self.new!r} now"


@dataclass(frozen=True)
class LoadedSweep:
    """A spec with a table [sweep]: its runs, each with a spec of its own."""

    name: str
    output: str  # the folder of the runs' folders, as specs write it
    at_once: int  # runs that are started at the same time; 0: any number
    runs: tuple[tuple[SweepRun, Loaded], ...]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a spec, its parents, its site's profile and `overrides` ("train.steps=5").

    InputError lists every mistake found in them. Of a sweep it is the run that sweep.run names.
    """
    layers, mistakes, sweep = _read(path, overrides)
    if sweep is None:
        return _merge(str(path), layers, mistakes)
    if sweep.run is None:
        one = f"one of them: --set sweep.run=NAME, or its number (hpczero check {path} lists them)"
        raise InputError(f"{printable(str(path))} is a sweep of several runs, and this takes {one}")
    return _load_runs(path, layers, mistakes, sweep).runs[0][1]


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> LoadedSweep | None:
    """Read all runs of a sweep; None if the spec has no [sweep], or sweep.run names one of it."""
    layers, mistakes, sweep = _read(path, overrides)
    if sweep is None or sweep.run is not None:
        return None
    return _load_runs(path, layers, mistakes, sweep)


def _read(
    path: str | Path, overrides: Sequence[str]
) -> tuple[list[Layer], list[Mistake], Given | None]:
    layers, mistakes = read_layers(path, overrides)
    sweep = take_sweep(layers)
    return [*site_profile.layers(layers), *layers], mistakes, sweep


def _load_runs(
    path: str | Path, layers: list[Layer], mistakes: list[Mistake], given: Given
) -> LoadedSweep:
    """Return the sweep, of which the given run alone is checked if there is one.

    Each run is checked as any spec is; what is wrong with several of them is said once.
    """
    base, wrong = _base(layers)
    mistakes = [*mistakes, *given.mistakes, *wrong]
    folder = f"{base.output}/{base.name}"
    runs = []
    if given.mistakes:
        mistakes += _merged(layers)[1]  # what else is wrong with the spec is told beside it
    for run in [] if given.mistakes else given.runs(base.name, base.seed):
        own = [Layer.of_value(one.key, one.value, one.source) for one in run.settings]
        place = Layer({"name": run.name, "output": folder}, name="[sweep]")
        loaded, wrong = _merged([*layers, *own, place])
        runs.append((run, loaded))
        mistakes += wrong
    if mistakes:
        once = {(one.source.text, one.describe()): one for one in mistakes}
        files = [layer.file for layer in layers]
        raise InputError(message(str(path), files, list(once.values())))
    return LoadedSweep(base.name, folder, given.sweep.at_once, tuple(runs))


def _base(layers: list[Layer]) -> tuple[Spec, list[Mistake]]:
    """Return the spec without its sweep, and the mistakes in what its runs' names are made of."""
    history, _ = _history(layers)
    last = {key: given[-1] for key, given in history.items() if len(given) > 1}
    spec, invalid = _validate({key: given.value for key, given in last.items()})
    return spec, [
        Mistake(last[key].source, partial(not_allowed, key, last[key].value))
        for key in invalid
        if key in ("name", "seed", "output")
    ]


def from_dict(tree: Mapping[str, Any]) -> Loaded:
    """Return the spec that a file with these tables would make."""
    return _merge("the spec", [Layer(dict(tree), name="the dictionary given")], [])


def differences(old: Spec, new: Spec) -> list[Difference]:
    before = flat(old)
    after = flat(new)
    return [
        Difference(name, before[name], after[name], key.role)
        for name, key in keys().items()
        if before[name] != after[name]
    ]


def _merge(name: str, layers: list[Layer], mistakes: list[Mistake]) -> Loaded:
    loaded, wrong = _merged(layers)
    if mistakes or wrong:
        raise InputError(message(name, [layer.file for layer in layers], [*mistakes, *wrong]))
    return loaded


def _merged(layers: list[Layer]) -> tuple[Loaded, list[Mistake]]:
    """Return the spec that the layers make, and the mistakes in them."""
    history, unknown_keys = _history(layers)
    last = {key: given[-1] for key, given in history.items() if len(given) > 1}
    spec, invalid = _validate({key: given.value for key, given in last.items()})
    mistakes = unknown_keys + [
        Mistake(last[key].source, partial(not_allowed, key, last[key].value)) for key in invalid
    ]
    stated = [key for key in last if key not in invalid]
    mistakes += _contradictions(spec, history, stated, certain=not mistakes)
    return Loaded(spec, {key: tuple(given) for key, given in history.items()}), mistakes


def _history(layers: list[Layer]) -> tuple[dict[str, list[GivenValue]], list[Mistake]]:
    """Return the values of each key, the default first, and the keys that no spec has."""
    history = {name: [GivenValue(key.default, DEFAULT)] for name, key in keys().items()}
    mistakes = []
    for layer in layers:
        for table, leaf, value in entries(layer.tree):
            source = layer.source(*(table.split(".") if table else ()), leaf)
            key = tables()[table].get(leaf)
            if key is None:
                mistakes.append(Mistake(source, partial(unknown, table, leaf, value)))
                continue
            before = history[key.name][-1].value
            if isinstance(before, dict) and isinstance(value, dict):
                value = {**before, **value}
            history[key.name].append(GivenValue(value, source))
    return history, mistakes


def _validate(values: dict[str, Any]) -> tuple[Spec, list[str]]:
    """Return the spec that the values make, and the keys whose value is not allowed.

    The spec has the default of such a key.
    """
    try:
        return Spec.model_validate(tree_of(values)), []
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    invalid = list(dict.fromkeys(_key_at(problem["loc"]) for problem in problems))
    spec, _ = _validate({name: value for name, value in values.items() if name not in invalid})
    return spec, invalid


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of "train.steps" -> value."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, leaf = name.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = value
    return tree


def _key_at(location: tuple[int | str, ...]) -> str:
    """Return the key in whose value pydantic found a problem."""
    names = accumulate(map(str, location), full_name)
    return next(name for name in names if name in keys())


def _contradictions(
    spec: Spec, history: dict[str, list[GivenValue]], stated: list[str], certain: bool
) -> list[Mistake]:
    """Return the contradictions of keys; `stated` are those that have an allowed value.

    Next to other mistakes (not `certain`), only stated values count: a default may stand in for
    a value that is not allowed.
    """
    mistakes = []
    for contradiction in contradictions(spec):
        given = [name for name in contradiction.keys if name in stated]
        if not (certain and given) and len(given) < len(contradiction.keys):
            continue
        last = {name: history[name][-1].source for name in contradiction.keys}
        source = last.pop(given[0])
        others = [f"{name}: {other.text}" for name, other in last.items()]
        where = f" ({', '.join(others)})" if others else ""
        mistakes.append(Mistake(source, partial(str, contradiction.text + where)))
    return mistakes


# The reference of every key, printed from the schema, and specs as TOML text.
#
# The reference is printed as text, as the page docs/spec.md and as data. TOML is written for the
# resolved copy that a run keeps, and for the commented spec to start from.
ROLES = {
    "identity": "a change makes it another run: refused on resume",
    "changeable": "a run may resume with another value; the change is logged",
    "site": "says where things lie and how the job is started, not what is computed",
}
_EXTENDS = (
    '`extends = "base.toml"` names one other spec, relative to the file that says so.\n'
    "Its values hold where this one says nothing."
)
_INTRODUCTION = f"""# The job spec

<!-- Printed by `hpczero spec --markdown` from the tables in hpczero/spec: edit those, not this. -->

A job is one TOML file. Every key has a default, so that a spec says only what is special about the
job. Unknown keys, wrong types and values that contradict each other are errors, all reported at
once, with file and line.

{_EXTENDS}
Tables merge, arrays replace. The first of these that names a key decides: `--set section.key=value`
on the command line, the spec, what it extends, the profile of the site, the default.
`hpczero check SPEC --explain section.key` prints where a value comes from.

A table `[sweep]` (`grid`, `list`, `random`, `runs`, `seeds`, `at_once`, `run`) makes several runs
of one spec, each checked as a spec of its own ([sweeps.md](sweeps.md)).

The role of a key says what a change means for a run that already exists:

"""


def as_text() -> str:
    extends = _EXTENDS.replace("`", "").replace("\n", "\n    ")
    lines = [f'extends = ""  (no default)\n    {extends}']
    for table, its_keys in tables().items():
        lines.append(f"\n[{table}]  {table_description(table)}" if table else "")
        for key in its_keys.values():
            lines.append(f"{key.leaf} = {toml_value(key.default)}  ({key.role})")
            lines.append(f"    {key.description}: {key.allowed}")
    roles = [f"{role}: {meaning}" for role, meaning in ROLES.items()]
    return "\n".join([*lines, "", *roles])


def as_markdown() -> str:
    page = _INTRODUCTION
    page += "".join(f"- `{role}`: {meaning}\n" for role, meaning in ROLES.items())
    for table, its_keys in tables().items():
        title = f"[{table}]" if table else "Above all tables"
        page += f"\n## {title}\n\n{table_description(table)}\n\n"
        page += "| key | default | allowed | role | meaning |\n|---|---|---|---|---|\n"
        page += "".join(_row(key) for key in its_keys.values())
    return page.rstrip("\n")


def _row(key: Key) -> str:
    default = toml_value(key.default)
    cells = [f"`{key.leaf}`", f"`{default}`", key.allowed, key.role, key.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def as_data() -> list[dict[str, Any]]:
    return [
        {
            "key": key.name,
            "default": key.default,
            "allowed": key.allowed,
            "role": key.role,
            "description": key.description,
        }
        for its_keys in tables().values()
        for key in its_keys.values()
    ]


# --------------------------------------------------------------------------------- specs as TOML

_UNSAFE = {code: f"\\u{code:04x}" for code in [*range(0x7F, 0xA0), 0x2028, 0x2029]}


def to_toml(spec: Spec) -> str:
    """Return every key with its value; reading it gives an equal spec."""
    values = flat(spec)
    sections = []
    for table, its_keys in tables().items():
        lines = [f"[{table}]"] if table else []
        lines += [f"{key.leaf} = {toml_value(values[key.name])}" for key in its_keys.values()]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def to_start_from(values: Mapping[str, Any]) -> str:
    """Return a spec with every key explained; keys whose role is `site` are commented out.

    `values`: of keys that do not have their defaults.
    """
    sections = []
    for table, its_keys in tables().items():
        lines = [f"# {table_description(table)}", *([f"[{table}]"] if table else [])]
        for key in its_keys.values():
            value = values.get(key.name, key.default)
            start = "# " if key.role == "site" else ""
            setting = f"{start}{key.leaf} = {toml_value(value)}"
            choices = f": {key.allowed}" if key.is_choice else ""
            lines.append(f"{setting:<34} # {key.description}{choices}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def toml_value(value: Any) -> str:
    """Write a boolean, number or text, or a list or table of these, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).translate(_UNSAFE)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Table):
        value = value.model_dump()
    if isinstance(value, dict):
        entries = [f"{toml_value(str(name))} = {toml_value(item)}" for name, item in value.items()]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    raise TypeError(f"no TOML for {type(value).__name__}")
