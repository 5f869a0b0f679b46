"""Frames of `hpczero top`: from facts made by hand, and of run folders without a job."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpczero.batch.run_status import Progress
from hpczero.comm import node_file, verdict
from hpczero.comm.node_file import NodeFile
from hpczero.comm.status import Operation, RankState
from hpczero.commands import top as top_verb
from hpczero.commands.blame import Finding
from hpczero.commands.top import top
from hpczero.commands.top_facts import Facts, Losses, Memory, Viewer
from hpczero.commands.top_frame import columns_of, frame
from hpczero.commands.top_ranks import RankNow, folds, ranges, ranks_now
from hpczero.errors import InputError
from hpczero.runs.stragglers import Straggler
from tests.support.run_files import BEGAN, moment, ranks_on, write_rank_times, write_run
from tests.support.run_folders import made, stopped_at_once

BAD = "\x1b[2J\x1b]0;x\x07\r\u202e\x9b31m"
NOW = 5000.0
HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def progress(**more: Any) -> Progress:
    known: dict[str, Any] = {
        "run": Path("/runs/four"),
        "state": "running",
        "reason": "",
        "step": 250,
        "steps": 1000,
        "loss": 2.5,
        "seconds_per_step": 0.2,
        "tokens_per_second": 10_000.0,
        "seconds_left": 150.0,
        "job_seconds_left": None,
        "last_save": 200,
        "node_hours": 0.0,
    }
    return Progress(**(known | more))


def facts(**more: Any) -> Facts:
    known: dict[str, Any] = {
        "progress": progress(),
        "ranks": [],
        "seen": "seen 1 s ago",
        "fresh": True,
        "behind": None,
        "slow": [],
        "memory": None,
        "events": [],
        "steps": np.arange(1.0, 251.0),
        "losses": 5 / np.sqrt(np.arange(1.0, 251.0)),
    }
    return Facts(**(known | more))


def state(
    number: int = 7, *, waited: float | None = 3.0, group: str = "77", **more: Any
) -> RankState:
    """Return a rank that has started operations up to this number, and waits in the last one."""
    started = {group: [Operation(at, 5, "all_reduce", 9) for at in range(1, number + 1)]}
    words = f"all_reduce of 64 bytes (number {number} along data)" if waited is not None else ""
    place = words, started, group, number, "data"
    return replace(RankState(1, 1, 1, 12, 4.0, waited, *place), **more)


LATE = state(6, waited=None)


def of(states: Mapping[int, RankState], **more: Any) -> list[RankNow]:
    file = NodeFile(NOW, "live", states, {}, **more)
    return ranks_now([file], dict.fromkeys(states, "n"), NOW, 10.0)


def words(states: Mapping[int, RankState], **more: Any) -> list[str]:
    return [f"{fold.who}: {fold.words}" for fold in folds(of(states, **more))]


# -- ranks ----------------------------------------------------------------------------------------


def test_the_others_wait_for_the_rank_that_computes() -> None:
    assert words({0: state(), 1: state(), 2: LATE, 3: state()}) == [
        "rank 2: computing",
        "ranks 0-1, 3: waiting for rank 2 in all_reduce along data for 3 s",
    ]


def test_each_part_of_a_run_has_a_word() -> None:
    states = {
        0: replace(LATE, doing="data"),
        1: replace(LATE, doing="evaluation"),
        2: state(doing="save"),
        3: replace(LATE, step=-1),
        4: replace(LATE, doing="anything else"),
    }
    assert sorted(words(states)) == [
        "rank 0: loading data",
        "rank 1: evaluating",
        "rank 2: saving, waiting for ranks 0-1, 3-4 in all_reduce along data for 3 s",
        "rank 3: starting",
        "rank 4: computing",
    ]


def test_what_is_amiss_with_a_process_comes_first() -> None:
    states = {0: state(), 1: LATE, 2: LATE, 3: LATE, 4: state()}
    notes = {1: verdict.STOPPED, 2: verdict.ENDED, 3: "its process waits for a disk"}
    assert words(states, notes=notes) == [
        "rank 1: stopped",
        "rank 2: ended",
        "rank 3: waiting for a disk or a file server",
        "ranks 0, 4: waiting for ranks 1-3 in all_reduce along data for 3 s",
    ]


def test_whoever_has_started_an_operation_and_computes_is_waited_for() -> None:
    assert words({0: state(), 1: state(waited=None)}) == [
        "rank 0: waiting for rank 1 in all_reduce along data for 3 s",
        "rank 1: computing",
    ]


def test_groups_of_one_axis_are_told_together() -> None:
    states = {rank: (LATE if rank == 5 else state(group=str(rank // 4))) for rank in range(8)}
    states[5] = state(6, waited=None, group="1")
    assert words(states) == [
        "rank 5: computing",
        "ranks 0-4, 6-7: waiting for rank 5 in all_reduce along data for 3 s",
    ]


def test_a_short_wait_has_no_duration_and_one_outside_of_groups_no_ranks() -> None:
    making = RankState(1, 1, 1, 3, 0.0, 0.4, "making group tensor")
    assert words({0: making, 1: LATE}) == [
        "rank 0: waiting in making group tensor",
        "rank 1: computing",
    ]


def test_ranks_of_a_node_that_says_nothing_are_silent() -> None:
    files = [
        NodeFile(NOW, "live", {0: state(), 1: state()}, {}),
        NodeFile(NOW - 60, "live", {2: LATE}, {}),
    ]
    found = ranks_now(files, HOSTS, NOW, 10.0)
    assert [one.state for one in found] == ["waiting", "waiting", "silent", "silent"]
    assert [one.seconds for one in found][2:] == [60.0, None]
    told = [f"{fold.who}: {fold.words}" for fold in folds(found)]
    assert told[0] == "ranks 2-3: silent for 1 min"
    assert ranks_now([], HOSTS, NOW, 10.0) == []


def test_many_ranks_are_folded_into_ranges() -> None:
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert ranges(range(0, 1000, 2)) == "0, 2, 4, 6, 8, 10, …, 998"
    states = {rank: state(group=str(rank // 8)) for rank in range(1000)}
    states[500] = state(6, waited=None, group=str(500 // 8))
    shown = frame(facts(ranks=of(states)), 80, 30, "utf-8")
    at = next(number for number, line in enumerate(shown) if "1,000 ranks: seen 1 s ago" in line)
    assert shown[at + 1].startswith("  rank 500 on n: computing")
    assert shown[at + 2].startswith("  ranks 0-499, 501-999 (999): waiting for rank 500 in")


@pytest.mark.parametrize(
    "states",
    [
        {0: replace(state(), number=10**30), 1: state()},
        {-5: state(), 10**40: LATE},
        {0: replace(state(), waited=-1e11), 1: replace(state(), waits_in="", group="")},
        {0: replace(state(), started={}), 1: replace(LATE, idle=-1e11)},
    ],
)
def test_odd_states_raise_nothing(states: dict[int, RankState]) -> None:
    shown = facts(ranks=of(states, resident={0: -5, 7: 10**30}))
    assert frame(shown, 80, None, "utf-8")
    assert json.dumps(shown.as_data())


# -- frames ---------------------------------------------------------------------------------------


FULL = facts(
    progress=progress(job_seconds_left=3600.0, validation_loss=2.75),
    ranks=of({0: state(), 1: state(), 2: LATE}, resident={0: 900_000_000, 2: 1_200_000_000}),
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


# -- run folders ----------------------------------------------------------------------------------


def told(run: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    wanted = {"run": str(run), "json": False, "once": True, "every": 2.0} | options
    assert top(Namespace(**wanted)) == 0
    return capsys.readouterr().out


def test_a_run_that_has_ended_shows_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path)
    said = told(run, capsys)
    assert said.startswith("made: finished\nstep 40 of 40 (100%), last written ")
    assert 'stop state=finished step=40 reason="all steps done"' in said
    assert "Rank 2 on node1 is slow" in said
    assert "asked" not in said
    assert not (run / "watch").exists(), "nothing is asked of it"
    data = json.loads(told(run, capsys, json=True))
    assert (data["state"], data["step"], data["ranks"], data["behind"]) == (
        "finished",
        40,
        [],
        None,
    )
    assert [one["rank"] for one in data["slow"]] == [2]


def test_a_run_that_stopped_before_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(stopped_at_once(tmp_path), capsys)
    assert said.startswith("stopped: stopped\nstep 0 of 40 (0%)")
    assert "stop state=stopped step=0 reason=SIGTERM" in said


def test_a_job_that_was_killed_in_a_hang_shows_who_was_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [{"event": "start", "time": 0, "ranks": ranks_on("n1", "n1")}]
    metrics = [{"step": 1, "time": 10, "loss": 2.0, "step_seconds": 1.0}]
    run = write_run(tmp_path / "r", metrics, events)
    path = node_file.path_of(run / "watch", 0)
    states = {0: state(waited=30.0), 1: replace(LATE, idle=40.0)}
    node_file.write(path, NodeFile(BEGAN + 40, "quiet", states, {}), 0)
    said = told(run, capsys)
    assert "r: failed (it ended without a word" in said
    assert "Rank 1 on n1 is behind in step 12" in " ".join(said.split())
    node_file.write(path, NodeFile(BEGAN + 5, "quiet", states, {}), 0)
    assert "is behind" not in told(run, capsys), "steps were done since"


def test_nothing_of_a_stranger_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        {"event": "start", "time": 0, "ranks": ranks_on(BAD, BAD, BAD)},
        {"event": BAD, BAD: BAD, "time": 1},
    ]
    run = write_run(tmp_path / "r", [{"step": 1, "time": 2, "loss": 1.0}], events)
    rows = [
        (at, at, [{"step": 1.0, "data": 0.9 * (rank == 1)} for rank in range(3)])
        for at in range(1, 9)
    ]
    write_rank_times(run, 3, *rows)
    bad = replace(state(waited=30.0), waits_in=BAD, axis=BAD)
    file = NodeFile(BEGAN + 40, BAD, {0: bad, 1: LATE}, {}, {1: BAD})
    node_file.write(node_file.path_of(run / "watch", 0), file, 0)
    (run / "memory.jsonl").write_text(json.dumps({"step": 1, "rank": 0, "host": BAD, "held": 5}))
    said = told(run, capsys)
    assert "Rank 1 on " in said
    assert all(line.isprintable() for line in said.splitlines())
    assert told(run, capsys, json=True).isascii()


@pytest.mark.parametrize("content", ["", "{", "[]", "9" * 5000, '{"step": 1}\n' * 5, "\0" * 50])
def test_damaged_files_are_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    run = write_run(tmp_path / "r", [], [])
    for name in ("metrics", "events", "memory"):
        (run / f"{name}.jsonl").write_text(content)
    for name in ("summary.json", "spec.toml"):
        (run / name).write_text(content)
    (run / "watch").write_text(content)
    assert told(run, capsys).startswith("r: ")
    assert json.loads(told(run, capsys, json=True))["ranks"] == []


@pytest.mark.parametrize("every", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_time_between_frames_that_cannot_be(tmp_path: Path, every: float) -> None:
    with pytest.raises(InputError, match="give a time between"):
        top(Namespace(run=str(made(tmp_path)), json=False, once=True, every=every))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run"):
        top(Namespace(run=str(tmp_path), json=False, once=True, every=2.0))


def test_a_job_that_does_not_answer_is_waited_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock says that it runs, and nobody reads the question."""
    looks = []

    class Silent(Viewer):
        def facts(self) -> Facts:
            looks.append(1)
            return facts(fresh=False, seen="none has answered for 20 s")

    monkeypatch.setattr(top_verb, "Viewer", Silent)
    monkeypatch.setattr(top_verb, "_PATIENCE", 0.2)
    monkeypatch.setattr(top_verb, "_POLL", 0.05)
    assert "ranks: none has answered for 20 s" in told(made(tmp_path), capsys)
    assert len(looks) > 1


# -- losses of a file that grows ------------------------------------------------------------------


def add(path: Path, steps: Sequence[int], mode: str = "a") -> None:
    with path.open(mode) as file:
        for step in steps:
            line = {"step": step, "loss": float(step), "time": moment(step)}
            file.write(json.dumps(line) + "\n")


def test_losses_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = Losses(path)
    losses.read()
    assert len(losses.steps) == 0
    add(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    losses.read()
    assert losses.steps.tolist() == [1, 2]
    with path.open("a") as file:
        file.write('ss": 9}\n')
    losses.read()
    assert losses.losses.tolist() == [1, 2, 9]
    add(path, [3, 4])
    losses.read()
    assert losses.losses.tolist() == [1, 2, 3, 4], "a step that came again counts once"
    assert losses.written == BEGAN + 4


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = Losses(path)
    add(path, range(1, 50))
    losses.read()
    add(tmp_path / "new", range(1, 20))
    (tmp_path / "new").rename(path)
    losses.read()
    assert losses.steps[-1] == 19


def test_of_a_long_file_the_newest_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.commands.top_facts._MOST", 1000)
    path = tmp_path / "metrics.jsonl"
    add(path, range(1, 500))
    losses = Losses(path)
    losses.read()
    assert 5 < len(losses.steps) < 20
    assert losses.steps[-1] == 499
