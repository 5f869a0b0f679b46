"""Groups of parameters, by patterns of their names (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hpczero.errors import InputError
from hpczero.text import matches_nothing


def first_matches(patterns: Iterable[str], names: Sequence[str], what: str) -> dict[str, str]:
    """Return name -> the first of the patterns that matches it.

    "*" stands for any letters, dots among them. InputError for a pattern that matches no name, or
    only names that an earlier one has. `what` begins the message: the argument's name.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise InputError(f"{what}: {matches_nothing(pattern, names)}")
        new = [name for name in matching if name not in found]
        if not new:
            earlier = found[matching[0]]
            raise InputError(
                f"{what}: {pattern!r} has no effect, as the first match counts, and {earlier!r} "
                f"before it matches {matching[0]}: put it first"
            )
        found |= dict.fromkeys(new, pattern)
    return found


def options_by_name(
    groups: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """Return name -> the options of its group; a parameter in no group is left out."""
    matches = first_matches(groups, names, "groups")
    return {name: groups[pattern] for name, pattern in matches.items()}
