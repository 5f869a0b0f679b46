"""The lines that a run directory has of earlier steps and jobs, as items.

The directory drops the lines of steps that are computed again. A tracker that cannot take back
what it has begins anew, with these lines: it then has no step twice.
"""

import heapq
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from hpczero import safe_files
from hpczero.track.item import Item, Kind, tokens_of


def earlier_lines(folder: Path, step: int) -> Iterator[Item]:
    """Return the lines of metrics and memory of the steps before this one, in their order."""
    both = [_lines(folder, "memory"), _lines(folder, "metrics")]
    tokens = 0
    for item in heapq.merge(*both, key=attrgetter("step")):
        if 0 < item.step < step:
            tokens += tokens_of(item.values) if item.kind == "metrics" else 0
            yield replace(item, tokens=tokens)


def earlier_events(folder: Path, until: float) -> Iterator[Item]:
    """Return the events before this moment."""
    return (item for item in _lines(folder, "event") if item.time <= until)


def _lines(folder: Path, kind: Kind) -> Iterator[Item]:
    name = "events.jsonl" if kind == "event" else f"{kind}.jsonl"
    try:
        file = safe_files.open_to_read(folder / name)
    except OSError:
        return
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                values = json.loads(line)
                when = datetime.fromisoformat(values.pop("time")).timestamp()
                step = values.get("step", 0)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # cut short by a kill, or not ours
            if type(step) is int:
                yield Item(kind, step, when, values)
