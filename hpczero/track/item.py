"""An item of what trackers get, and its figures and words: pure functions of a run's lines."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["metrics", "memory", "event", "from"]

_NAMES = {  # of a line of metrics -> the trackers' name
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "loss_scale": "loss_scale",
    "tokens_per_second": "tokens_per_second",
    "step_seconds": "seconds/step",
    "data_seconds": "seconds/data",
    "comm_seconds": "seconds/comm",
    "compute_seconds": "seconds/compute",
    "validation_loss": "validation/loss",
}
_LONGEST_NAME = 100
_LONGEST_TEXT = 2000


@dataclass(frozen=True)
class Item:
    """A line of the run directory; "from": the steps from `step` on are computed (again)."""

    kind: Kind
    step: int
    time: float  # seconds since 1970
    values: Mapping[str, Any]
    tokens: int = 0  # of all steps up to this one; 0: not known

    @property
    def event(self) -> str:
        return str(self.values.get("event", "")) if self.kind == "event" else ""


@dataclass(frozen=True)
class RunFacts:
    """The facts that a tracker has of a run before its first item."""

    folder: str  # of the run
    began: float  # when this job did, in seconds since 1970
    name: str
    project: str
    tables: Mapping[str, Any]  # of the resolved spec
    changed: Mapping[str, Any]  # its keys that are not the default, by their full names
    toml: str  # its text


def figures(item: Item) -> dict[str, float]:
    """Return the figures of a line by the name that trackers show; none of an event."""
    if item.kind == "memory":
        held = _number(item.values.get("held"))
        return {} if held is None else {"memory/held_bytes": held}
    if item.kind != "metrics":
        return {}
    found = {shown: _number(item.values.get(name)) for name, shown in _NAMES.items()}
    found["tokens"] = float(item.tokens) or None
    losses = item.values.get("validation_losses")
    for source, loss in losses.items() if isinstance(losses, Mapping) else ():
        found[f"validation/{plain_name(str(source))}"] = _number(loss)
    return {name: value for name, value in found.items() if value is not None}


def text(item: Item) -> str:
    """Return an event in one line: "save: step 20, bytes 1024"."""
    values = {name: value for name, value in item.values.items() if name != "event"}
    if set(values) == {"what"}:
        return _shortened(f"{item.event}: {values['what']}")
    shown = (f"{name} {_in_words(value)}" for name, value in values.items())
    return _shortened(f"{item.event}: {', '.join(shown)}")


def plain_name(name: str) -> str:
    """Return a name as every tracker takes it: letters, digits, "_", "-" and "."."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._")
    return plain[-_LONGEST_NAME:] or "_"


def tokens_of(values: Mapping[str, Any]) -> int:
    """Return the tokens of a line of metrics, as far as it says them."""
    return int(_number(values.get("tokens")) or 0)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _shortened(words: str) -> str:
    """Return the text in one line, and without control characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in words)
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 4] + " ..."
