"""`hpczero top` of run folders without a job of ranks that answer."""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hpczero.comm import live, node_file
from hpczero.comm.live import Onlooker
from hpczero.comm.node_file import NodeFile
from hpczero.commands import top as top_verb
from hpczero.commands.top import top
from hpczero.commands.top_facts import Facts, Viewer
from hpczero.errors import InputError
from hpczero.lock import RunLock
from tests.support.looked_at import BAD, LATE, facts, state
from tests.support.run_files import BEGAN, ranks_on, write_rank_times, write_run
from tests.support.run_folders import made, stopped_at_once


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
    assert data["memory"]["step"] == 37, "the last that was measured"


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
        for at in range(1, 13)
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


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Path]:
    """A run of two ranks of which this process holds the lock."""
    events = [{"event": "start", "time": 0, "ranks": ranks_on("n1", "n1")}]
    run = write_run(tmp_path / "r", [{"step": 1, "time": 10, "loss": 2.0}], events)
    with RunLock(run):
        yield run


def test_who_may_not_ask_sees_what_is_recorded(
    living: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (living / "watch").mkdir()
    (living / "watch" / "asked").symlink_to("/dev/null")
    said = told(living, capsys)
    assert "ranks: what they do now cannot be asked for:" in said
    assert "asked:itisalink" in "".join(said.split())  # wherever lines are broken
    states = {0: state(waited=30.0), 1: replace(LATE, idle=40.0)}
    path = node_file.path_of(living / "watch", 0)
    node_file.write(path, NodeFile(BEGAN + 40, "quiet", states, {}), 0)
    said = told(living, capsys)
    assert "2 ranks: as recorded 0 s ago; what they do now cannot be asked for:" in said
    assert "rank 1 on n1: computing" in said
    assert "Rank 1 on n1 is behind" in said


def test_the_answers_of_ranks_are_shown(
    living: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = living / "watch"
    folder.mkdir()
    (folder / "asked").touch()

    times = count(5)

    def answer(onlooker: Onlooker) -> str:
        file = NodeFile(next(times), "", {0: state(waited=0.01), 1: LATE}, {})
        node_file.write(live.path_of(folder, 0), file, 0)
        return ""

    monkeypatch.setattr(Onlooker, "ask", answer)
    said = told(living, capsys)
    assert "2 ranks: seen 0 s ago" in said
    assert "rank 0 on n1: waiting for rank 1 in all_reduce along data\n" in said
    assert "behind" not in said, "a short wait is none"
    data = json.loads(told(living, capsys, json=True))
    assert [one["waits_for"] for one in data["ranks"]] == [[1], []]


def test_of_one_rank_alone_its_steps_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [{"event": "start", "time": 0, "ranks": ranks_on("n1")}]
    run = write_run(tmp_path / "r", [], events)
    with RunLock(run):
        assert "ranks: of one rank alone no more is known" in told(run, capsys)


def test_a_job_that_does_not_answer_is_waited_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock says that it runs, and nobody reads the question."""
    looks = []

    class Silent(Viewer):
        def facts(self) -> Facts:
            looks.append(1)
            return facts(complete=False, seen="none has answered for 20 s")

    monkeypatch.setattr(top_verb, "Viewer", Silent)
    monkeypatch.setattr(top_verb, "_PATIENCE", 0.2)
    monkeypatch.setattr(top_verb, "_POLL", 0.05)
    assert "ranks: none has answered for 20 s" in told(made(tmp_path), capsys)
    assert len(looks) > 1
