"""From TOML to a `Spec`: layers are merged, every value remembers where it came from, all mistakes are reported at once (design §3).

Precedence, lowest first: defaults, the profile of the site, the chain of `extends`, the spec, each `--set`. Tables merge, arrays replace.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpczero.errors import InputError
from hpczero.spec import site_profile
from hpczero.spec.keys import Mistake, Origin, flat, keys, message, not_allowed, tables, unknown
from hpczero.spec.reference import to_toml
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Role, Spec
from hpczero.spec.toml import Layer, read_layers

__all__ = ["Difference", "Given", "Loaded", "Origin", "differences", "load", "to_toml"]

DEFAULT = Origin("", None, "default")


@dataclass(frozen=True)
class Given:
    value: Any
    source: Origin


@dataclass(frozen=True)
class Loaded:
    spec: Spec
    history: dict[
        str, tuple[Given, ...]
    ]  # "train.steps" -> what each layer said, the default first

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


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    layers, mistakes = read_layers(path, overrides)
    return _judged(str(path), [*site_profile.layers(layers), *layers], mistakes)


def from_dict(tree: Mapping[str, Any]) -> Loaded:
    """The spec that a file with these tables would make."""
    return _judged("the spec", [Layer(dict(tree), name="the dictionary given")], [])


def _judged(name: str, layers: list[Layer], mistakes: list[Mistake]) -> Loaded:
    history = {name: [Given(key.default, DEFAULT)] for name, key in keys().items()}
    for layer in layers:
        for table, leaf, value in _entries(layer):
            if key := tables()[table].get(leaf):
                before = history[key.name][-1].value
                whole = (
                    {**before, **value}
                    if isinstance(before, dict) and isinstance(value, dict)
                    else value
                )
                history[key.name].append(Given(whole, layer.source(*_path(table, leaf))))
            else:
                mistakes.append(
                    Mistake(layer.source(*_path(table, leaf)), partial(unknown, table, leaf, value))
                )
    spec, invalid = _validate(
        {name: given[-1].value for name, given in history.items() if len(given) > 1}
    )
    mistakes += [
        Mistake(history[name][-1].source, partial(not_allowed, name, history[name][-1].value))
        for name in invalid
    ]
    mistakes += _contradictions(spec, history, invalid, certain=not mistakes)
    if mistakes:
        raise InputError(message(name, [layer.file for layer in layers], mistakes))
    return Loaded(spec, {name: tuple(given) for name, given in history.items()})


def differences(old: Spec, new: Spec) -> list[Difference]:
    before, after = flat(old), flat(new)
    return [
        Difference(name, before[name], after[name], key.role)
        for name, key in keys().items()
        if before[name] != after[name]
    ]


def _entries(layer: Layer) -> Iterator[tuple[str, str, Any]]:
    """(table, key, value); table is "" for what stands above all tables, and for what should have been a table and is none."""
    for name, value in layer.tree.items():
        if name and name in tables() and isinstance(value, dict):
            yield from ((name, leaf, inner) for leaf, inner in value.items())
        else:
            yield "", name, value


def _path(table: str, leaf: str) -> tuple[str, ...]:
    return (table, leaf) if table else (leaf,)


def _validate(values: dict[str, Any]) -> tuple[Spec, list[str]]:
    """The spec that the values make, and the keys whose value is not allowed (the spec then has their default)."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        table, _, leaf = name.rpartition(".")
        (tree.setdefault(table, {}) if table else tree)[leaf] = value
    try:
        return Spec.model_validate(tree), []
    except ValidationError as error:
        found = [
            ".".join(map(str, problem["loc"][:2]))
            for problem in error.errors(
                include_url=False, include_input=False, include_context=False
            )
        ]
    invalid = list(dict.fromkeys(found))
    return _validate({name: value for name, value in values.items() if name not in invalid})[
        0
    ], invalid


def _contradictions(
    spec: Spec, history: dict[str, list[Given]], invalid: list[str], certain: bool
) -> list[Mistake]:
    """Where other mistakes are, only what was really given is held against each other, not defaults that stand in for it."""
    found = []
    for contradiction in contradictions(spec):
        given = [
            name for name in contradiction.keys if len(history[name]) > 1 and name not in invalid
        ]
        if not (certain and given) and len(given) < len(contradiction.keys):
            continue
        rest = [
            f"{name}: {history[name][-1].source.text}"
            for name in contradiction.keys
            if name != given[0]
        ]
        where = f" ({', '.join(rest)})" if rest else ""
        found.append(
            Mistake(history[given[0]][-1].source, partial(str, contradiction.text + where))
        )
    return found
