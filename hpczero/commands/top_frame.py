"""A frame of `hpczero top`: facts of a run as lines that fit a terminal (pure)."""

import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from hpczero.commands.jobs import figures_of
from hpczero.commands.top_facts import Facts
from hpczero.commands.top_ranks import folds
from hpczero.report.terminal import chart, has_braille, points
from hpczero.runs.columns import TIME, seconds_of
from hpczero.runs.curves import curve
from hpczero.text import (
    format_age,
    format_count,
    format_duration,
    format_loss,
    format_memory,
    log_value,
    printable,
)

NARROWEST = 40
_MOST_FOLDS, _MOST_SLOW = 16, 3
_CURVE = 4  # lines
_MOST_EVENTS = 8
_LONGEST_NAME = 80
_ENDS_WITH = 6  # events at least, in a terminal that is too low for all


def frame(facts: Facts, width: int, height: int | None, encoding: str) -> list[str]:
    """Return the lines of a frame; `height` None: as many as there are to show."""
    width = max(NARROWEST, width)
    fine = has_braille(encoding)
    head = [*_progress(facts, width, fine), *_ranks(facts, width, height), *_words(facts, width)]
    curve_ = _curve(facts, width, encoding)
    events = _events(facts)
    if height is not None:
        room = height - len(head)
        if room < len(curve_) + min(len(events), _ENDS_WITH):
            curve_ = []
        events = events[: max(0, room - len(curve_))]
    lines = [
        _cut(_encodable(printable(line), encoding), width) for line in [*head, *curve_, *events]
    ]
    return lines if height is None else lines[:height]


def _progress(facts: Facts, width: int, fine: bool) -> Iterator[str]:
    progress = facts.progress
    reason = f" ({printable(progress.reason, 400)})" if progress.reason else ""
    yield from _wrapped(
        f"{printable(progress.run.name, _LONGEST_NAME)}: {progress.state}{reason}", width
    )
    share = min(1.0, progress.step / progress.steps) if progress.steps else 0.0
    words = (
        f"step {progress.step:,} of {progress.steps:,} ({share:.{0 if share in (0, 1) else 1}%})"
    )
    figures = figures_of(progress)
    if figures.left not in ("", "?"):
        words += f", {figures.left} left"
    if progress.job_seconds_left is not None and progress.state in ("running", "STALLED"):
        words += f", its job has {format_duration(progress.job_seconds_left)}"
    if progress.state not in ("running", "STALLED") and progress.age_seconds is not None:
        words += f", last written {format_age(progress.age_seconds)} ago"
    yield from _wrapped(words, width)
    full = round(share * (width - 2))
    yield f"[{('█' if fine else '#') * full}{('░' if fine else '.') * (width - 2 - full)}]"
    parts = [f"loss {figures.loss}"]
    if progress.validation_loss is not None:
        parts.append(f"validation {format_loss(progress.validation_loss)}")
    parts.append(f"{figures.speed} tokens/s")
    if progress.seconds_per_step is not None:
        parts.append(f"{progress.seconds_per_step:.3g} s a step")
    parts.append(f"saved step {figures.saved}" if figures.saved else "nothing saved yet")
    yield from _wrapped(", ".join(parts), width)


def _ranks(facts: Facts, width: int, height: int | None) -> Iterator[str]:
    """Yield what the ranks do, as many lines as leave room for the rest."""
    if facts.seen:
        count = format_count(len(facts.ranks), "rank") if facts.ranks else "ranks"
        yield ""
        yield from _wrapped(f"{count}: {printable(facts.seen, 400)}", width)
    found = folds(facts.ranks)
    most = _MOST_FOLDS if height is None else max(1, min(_MOST_FOLDS, height // 3))
    for fold in found[:most]:
        host = f" on {printable(fold.host, 40)}" if fold.host else ""
        count = f" ({len(fold.ranks):,})" if len(fold.ranks) > 2 else ""
        yield from _wrapped(f"  {fold.who}{host}{count}: {fold.words}", width, "    ")
    if more := found[most:]:
        yield f"  {sum(len(fold.ranks) for fold in more):,} more ranks, in {len(more)} other states"


def _words(facts: Facts, width: int) -> Iterator[str]:
    """Yield who is behind, who is slow, and what is held in memory."""
    said = [facts.behind.words] if facts.behind else []
    said += [one.words for one in facts.slow[:_MOST_SLOW]]
    if (more := len(facts.slow) - _MOST_SLOW) > 0:
        said.append(f"{format_count(more, 'more rank')} {'is' if more == 1 else 'are'} slow.")
    said += filter(None, [_memory(facts)])
    for words in said:
        yield ""
        yield from _wrapped(printable(words, 2000), width)
    if facts.progress.last_lines:
        yield ""
        yield "the last lines of its log:"
        for line in facts.progress.last_lines:
            yield f"  {printable(line, 300)}"


def _memory(facts: Facts) -> str:
    sizes = {one.rank: one.resident for one in facts.ranks if one.resident}
    words = []
    if sizes:
        least, most = min(sizes.values()), max(sizes.values())
        fullest = max(sizes, key=lambda rank: sizes[rank])
        words.append(
            f"processes have {format_memory(least)} to {format_memory(most)} (rank {fullest})"
        )
    if memory := facts.memory:
        held = f"rank {memory.rank} held {format_memory(int(memory.held))} in step {memory.step:,}"
        planned = f", planned {format_memory(int(memory.predicted))}" if memory.predicted else ""
        words.append(f"the fullest, {held}{planned}")
    return f"memory: {'; '.join(words)}" if words else ""


def _curve(facts: Facts, width: int, encoding: str) -> list[str]:
    shown = curve(facts.steps, facts.losses, points(width, encoding))
    if len(shown) < 2:
        return []
    ends = float(facts.steps[0]), float(facts.steps[-1])
    return ["", *chart(shown, ends, width, _CURVE, encoding)]


def _events(facts: Facts) -> list[str]:
    last = [_event(event) for event in facts.events[-_MOST_EVENTS:]]
    return ["", "last events (UTC), the newest first:", *reversed(last)] if last else []


def _event(event: Mapping[str, Any]) -> str:
    when = seconds_of(event.get(TIME))
    at = datetime.fromtimestamp(when, UTC).strftime("%H:%M:%S") if isfinite(when) else "?"
    name = printable(str(event.get("event")), 30)
    plain = {
        key: value
        for key, value in event.items()
        if key not in ("event", TIME) and isinstance(value, str | int | float | bool)
    }
    told = [f"{printable(key, 40)}={printable(_value(value), 200)}" for key, value in plain.items()]
    return f"  {at} {name} {' '.join(told[:20])}".rstrip()


def _value(value: object) -> str:
    """Return a value of a log line; a whole number of JSON has any length."""
    if type(value) is int and abs(value) >= 10**18:
        return "a huge number"
    return log_value(value[:1000] if isinstance(value, str) else value)


# -- lines that fit -------------------------------------------------------------------------------


def _wrapped(words: str, width: int, indent: str = "") -> list[str]:
    begin = words[: len(words) - len(words.lstrip())]
    lines = textwrap.wrap(
        words.strip(),
        width,
        initial_indent=begin,
        subsequent_indent=indent or begin,
        break_on_hyphens=False,
    )
    return lines or [""]


def _encodable(line: str, encoding: str) -> str:
    """Return the line as the terminal will show it."""
    return line.encode(encoding, "backslashreplace").decode(encoding)


def _cut(line: str, width: int) -> str:
    """Return as much of a line as fits into so many columns; some letters take two."""
    room = width
    for at, letter in enumerate(line):
        room -= columns_of(letter)
        if room < 0:
            return line[:at]
    return line


def columns_of(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
