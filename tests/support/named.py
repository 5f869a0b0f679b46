"""The slow ranks that each verb names, and the cause that it gives."""

import html
import re
from pathlib import Path

from tests.support.launch import hpczero, launch

_SAID = re.compile(r"Rank (\d+) on \S+ is slow: .*?The cause: (.*?)\.", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def named_by(run: Path) -> dict[str, list[tuple[int, str]]]:
    """Return for each verb the ranks that it calls slow, with the cause in words."""
    page = run.with_name("x.html")
    words = {"blame": _words("blame", str(run)), "report": ""}
    _words("report", str(run), "-o", str(page))
    words["report"] = html.unescape(_TAG.sub(" ", page.read_text()))
    return {verb: [(int(rank), why) for rank, why in _SAID.findall(said)] for verb, said in words.items()}


def _words(*arguments: str) -> str:
    done = launch(hpczero(*arguments), 120)
    assert (done.code, done.err) == (0, ""), done
    return done.out
