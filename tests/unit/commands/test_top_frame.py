"""Frames of `hpczero top` from facts made by hand: they fit, and nothing of a stranger acts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpczero.commands.blame import Finding
from hpczero.commands.top_facts import Memory
from hpczero.commands.top_frame import columns_of, frame
from hpczero.runs.stragglers import Straggler
from tests.support.looked_at import BAD, LATE, facts, progress, ranks_of, state
from tests.support.run_files import moment

FULL = facts(
    progress=progress(job_seconds_left=3600.0, validation_loss=2.75),
    ranks=ranks_of({0: state(), 1: state(), 2: LATE}, resident={0: 900_000_000, 2: 1_200_000_000}),
    behind=Finding([2], "Rank 2 on n2 is behind."),
    slow=[Straggler(3, "n2", "compute", 0.1, 0.5, 1, 200)],
    memory=Memory(120, 2, "n2", 8e8, 9e8),
    events=[{"time": moment(10 * at), "event": "save", "step": 50 * at} for at in range(1, 5)],
)


def test_a_frame_has_all_that_was_asked_for() -> None:
    text = "\n".join(frame(FULL, 100, 60, "utf-8"))
    for wanted in (
        "four: running",
        "step 250 of 1,000 (25.0%), 0:02:30 left, its job has 1:00:00",
        "loss 2.5000, validation 2.7500, 1e+04 tokens/s, 0.2 s a step, saved step 200",
        "3 ranks: seen 1 s ago",
        "  rank 2 on n: computing",
        "  ranks 0-1: waiting for rank 2 in all_reduce along data for 3 s",
        "Rank 2 on n2 is behind.",
        "Rank 3 on n2 is slow",
        "memory: processes have 900.0 MB to 1.2 GB (rank 2); the fullest, rank 2 held 800.0 MB in ",
        "planned 900.0 MB",
        "save step=200",
        "    5.0000 │",
    ):
        assert wanted in text, text
    assert text.index("step=200") < text.index("step=150"), "the newest event is seen first"


@pytest.mark.parametrize(
    ("slow", "words"), [(4, "1 more rank is slow."), (7, "4 more ranks are slow."), (3, "")]
)
def test_of_many_slow_ranks_some_are_counted(slow: int, words: str) -> None:
    text = "\n".join(frame(replace(FULL, slow=[*FULL.slow] * slow), 100, None, "utf-8"))
    assert text.count("is slow in") + text.count("is slow:") == 3
    assert words in text
    assert words or "more rank" not in text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("width", [40, 41, 60, 80, 99, 200])
@pytest.mark.parametrize("height", [5, 12, 24, 60, None])
def test_a_frame_fits(width: int, height: int | None, encoding: str) -> None:
    named = replace(FULL, progress=progress(run=Path("/runs/学習" * 30), reason="ü" * 300))
    for shown in (FULL, named):
        lines = frame(shown, width, height, encoding)
        assert max(sum(map(columns_of, line)) for line in lines) <= width
        assert height is None or len(lines) <= height
        assert all(line.encode(encoding) or not line for line in lines)


def test_a_low_terminal_shows_ranks_rather_than_the_curve() -> None:
    assert "⠀" not in (low := "".join(frame(FULL, 80, 14, "utf-8")))
    assert "rank 2" in low
    assert "│" not in low
    assert "│" in "".join(frame(FULL, 80, 60, "utf-8"))


def test_names_of_strangers_do_nothing() -> None:
    ranks = [replace(one, host=BAD, waits_in=BAD, axis="") for one in FULL.ranks]
    memory = Memory(1, 1, "n", 1.0, 1.0)
    events = [{BAD: BAD, "event": BAD, "time": BAD, "n": 10**5000, "x": float("inf")}] * 3
    shown = replace(
        FULL,
        progress=progress(run=Path(f"/runs/{BAD}"), reason=BAD, last_lines=[BAD], state="failed"),
        ranks=ranks,
        seen=BAD,
        memory=memory,
        events=events,
    )
    for width in (40, 200):
        for line in frame(shown, width, None, "utf-8"):
            assert line.isprintable(), ascii(line)


def test_nothing_is_known() -> None:
    nothing = np.array([])
    empty = progress(
        state="new", step=0, steps=0, loss=None, seconds_per_step=None, tokens_per_second=None,
        seconds_left=None, last_save=None,
    )  # fmt: skip
    lines = frame(facts(progress=empty, seen="", steps=nothing, losses=nothing), 80, 24, "utf-8")
    assert lines[:2] == ["four: new", "step 0 of 0 (0%)"]
    assert lines[3:] == ["loss ?, ? tokens/s, nothing saved yet"]


def test_losses_that_are_no_numbers_leave_no_curve() -> None:
    shown = facts(losses=np.full(250, np.nan))
    assert not any("│" in line for line in frame(shown, 80, 40, "utf-8"))
