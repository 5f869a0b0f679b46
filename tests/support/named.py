"""The slow ranks that each verb names, and the cause that it gives."""

import html
import json
import re
from pathlib import Path

from tests.support.launch import hpczero, launch

_SAID = re.compile(r"Rank (\d+) on \S+ is slow: .*?The cause: (.*?)\.")
_TAG = re.compile(r"<[^>]*>")


def named_by(run: Path) -> dict[str, list[tuple[int, str]]]:
    """Return for each verb the ranks that it calls slow, with the cause in words."""
    page = run.with_name("x.html")
    blamed = _words("blame", str(run))
    _words("report", str(run), "-o", str(page))
    seen = _words("top", str(run), "--once")
    told = {"blame": blamed, "top": seen, "report": html.unescape(_TAG.sub(" ", page.read_text()))}
    return {verb: _named(words) for verb, words in told.items()}


def slow_as_data(run: Path) -> list[tuple[int, str]]:
    """Return the ranks that `blame --json` calls slow, with the cause's name."""
    slow = json.loads(_words("blame", str(run), "--json"))["slow"]
    return [(one["rank"], one["cause"]) for one in slow]


def _named(words: str) -> list[tuple[int, str]]:
    return [(int(rank), why) for rank, why in _SAID.findall(" ".join(words.split()))]


def _words(*arguments: str) -> str:
    done = launch(hpczero(*arguments), 120)
    assert (done.code, done.err) == (0, ""), done
    return done.out
