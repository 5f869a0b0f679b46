"""The tracker of track.callback = "package.module:function": a function of the user's."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hpczero.errors import InputError
from hpczero.track.item import Item


def function_of(name: str) -> Callable[[Mapping[str, Any]], object]:
    """Import the function that track.callback names."""
    package, _, leaf = name.partition(":")
    try:
        function = getattr(importlib.import_module(package), leaf, None)
    except ImportError as error:
        raise InputError(
            f"{package} cannot be imported ({error}); is it installed, or in PYTHONPATH?"
        ) from error
    if not callable(function):
        raise InputError(f"{package} has no function {leaf}")
    made: Callable[[Mapping[str, Any]], object] = function
    return made


class Callback:
    """Calls the function with each line of metrics.jsonl, memory.jsonl and events.jsonl."""

    def __init__(self, name: str) -> None:
        self._function = function_of(name)

    def write(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.kind != "from":
                when = datetime.fromtimestamp(item.time, UTC).isoformat(timespec="milliseconds")
                self._function({"time": when, **item.values})

    def close(self) -> None:
        """Do nothing: the function has had its last line."""

    def give_up(self) -> None:
        """Do nothing: the thread ends with the rank."""
