"""Which rank is behind, from states of ranks made by hand."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpczero.comm import node_file, verdict
from hpczero.comm.node_file import NodeFile
from hpczero.comm.status import Operation, RankState
from hpczero.commands.blame import Finding, blame, find, states_of
from hpczero.runs.record import Run, read_run
from tests.support.run_files import BEGAN, ranks_on, write_rank_times, write_run

GROUP = "77"
AT = BEGAN + 500
HOSTS = "n1", "n1", "n2", "n2"


def state(
    number: int = 7, *, waited: float | None = 30.0, code: int = 5, axis: str = "data"
) -> RankState:
    """Return a rank that has started operations up to this number, and waits in the last one."""
    started = [Operation(at, 5, "all_reduce", 9) for at in range(1, number)]
    started.append(Operation(number, code, f"operation {code}", 4 + code))
    words = f"operation {code} (number {number} along {axis})" if waited is not None else ""
    return RankState(1, 1, 1, 12, 40.0, waited, words, {GROUP: started}, GROUP, number, axis)


WAITS, LATE, OTHER = state(), state(6, waited=None), state(code=6)


def run_of(folder: Path, *hosts: str) -> Run:
    events = [{"event": "start", "time": 0, "ranks": ranks_on(*(hosts or HOSTS))}]
    return read_run(write_run(folder / "r", [], events))


def found(run: Run, states: Mapping[int, RankState], **more: Any) -> Finding:
    return find(
        run, [NodeFile(**{"at": AT, "reason": "quiet", "stacks": {}, **more}, states=states)]
    )


def test_a_rank_that_has_not_come_is_named_with_axis_and_operation(tmp_path: Path) -> None:
    states = {0: WAITS, 1: WAITS, 2: LATE, 3: WAITS}
    one = found(run_of(tmp_path), states, stacks={2: "in sleep", 0: "in wait", 1: "in wait"})
    assert one.ranks == [2]
    assert one.words == (
        "Rank 2 on n2 is behind in step 12: it has been in no operation for 40 s. For it ranks 0, "
        "1, 3 waited for 30 s in operation 5 (number 7 along data). (quiet)"
    )
    assert "  not come: rank 2 on n2: step 12; in no operation for 40.0 s" in one.details[1]
    assert list(one.stacks) == [2, 0]
    assert one.at == AT


def test_no_reason_is_told_where_none_was_written(tmp_path: Path) -> None:
    run, states = run_of(tmp_path), {0: WAITS, 1: WAITS, 2: LATE, 3: WAITS}
    assert found(run, states, reason="").words.endswith("along data).")
    assert found(run, {0: LATE, 1: LATE}, reason="").words.endswith("for 40 s).")


def test_a_rank_in_another_operation_is_named(tmp_path: Path) -> None:
    one = found(run_of(tmp_path), {0: WAITS, 1: OTHER, 2: WAITS, 3: WAITS})
    assert one.ranks == [1]
    assert "Rank 1 on n1 is behind in step 12: it waits elsewhere" in one.words
    assert any("number 7 along data is operation 6 there" in line for line in one.details)


def test_a_difference_tells_more_than_a_longer_wait(tmp_path: Path) -> None:
    """Rank 3 waits in a group of its own with rank 2, longer than the others."""
    longer = replace(WAITS, started={"1": []}, group="1", waited=90.0, axis="tensor")
    one = found(run_of(tmp_path), {0: WAITS, 1: OTHER, 2: WAITS, 3: longer})
    assert one.ranks == [1]


@pytest.mark.parametrize("note", [verdict.STOPPED, verdict.ENDED])
def test_a_rank_whose_process_stands_still_is_named(tmp_path: Path, note: str) -> None:
    states = {0: WAITS, 1: LATE, 2: LATE, 3: WAITS}
    one = found(run_of(tmp_path), states, notes={2: note})
    assert one.ranks == [2]
    assert f"Rank 2 on n2 is behind in step 12: {note}." in one.words


def test_a_rank_whose_node_wrote_nothing_is_named_where_all_others_wait(tmp_path: Path) -> None:
    one = found(run_of(tmp_path), {0: WAITS, 1: WAITS, 2: WAITS})
    assert one.ranks == [3]
    assert "Rank 3 on n2 is behind, or has ended: its node has recorded nothing" in one.words
    late = found(run_of(tmp_path), {0: WAITS, 1: LATE, 2: WAITS})
    assert late.ranks == [1], "what is known counts more than what is not"
    other = found(run_of(tmp_path), {0: WAITS, 1: OTHER, 2: WAITS})
    assert other.ranks == [1]


def test_states_of_nodes_are_brought_to_one_time(tmp_path: Path) -> None:
    """Rank 2 was seen earlier: in no operation then, and since."""
    busy = replace(LATE, idle=5.0)
    files = [
        NodeFile(AT - 60, "asked", {2: busy, 3: WAITS}, {}),
        NodeFile(AT, "quiet", {0: WAITS, 1: WAITS}, {}),
    ]
    one = find(run_of(tmp_path), files)
    assert one.ranks == [2]
    assert "in no operation for 65 s" in one.words
    assert one.words.endswith(
        "waited for 90 s in operation 5 (number 7 along data). (asked and quiet)"
    )


def test_ranks_that_do_not_wait(tmp_path: Path) -> None:
    one = found(run_of(tmp_path), dict.fromkeys(range(4), LATE))
    assert one.ranks == []
    assert one.words.startswith("No rank waits for another one: rank 0 (step 12, in no operation")


def test_all_wait_in_the_same_operation(tmp_path: Path) -> None:
    one = found(run_of(tmp_path), dict.fromkeys(range(4), WAITS))
    assert one.ranks == []
    assert one.words.startswith("Nobody is behind, as far as is known: ranks 0, 1, 2, 3 waited")


def test_ranks_that_wait_outside_of_groups(tmp_path: Path) -> None:
    making = RankState(1, 1, 1, -1, 9.0, 20.0, "making group tensor")
    busy = RankState(1, 1, 1, -1, 21.0, None, "")
    one = found(run_of(tmp_path), {0: making, 1: making, 2: making, 3: busy})
    assert one.ranks == [3]
    assert "waited for 20 s in making group tensor" in one.words


@pytest.mark.parametrize(
    "states",
    [
        {0: WAITS},
        {0: replace(WAITS, started={})},
        {0: replace(WAITS, number=10**30), 1: WAITS},
        {-5: WAITS, 10**40: LATE},
        {0: replace(WAITS, waited=-1e11), 1: replace(WAITS, waits_in="", group="")},
        {0: replace(WAITS, waits_in="a"), 1: replace(WAITS, waits_in="b", group="x")},
        {0: replace(OTHER, group="1"), 1: WAITS, 2: WAITS},
    ],
)
@pytest.mark.parametrize("hosts", [("n1",), HOSTS])
def test_odd_states_raise_nothing(
    tmp_path: Path, states: dict[int, RankState], hosts: tuple[str, ...]
) -> None:
    for noted in ({}, dict.fromkeys(states, verdict.ENDED)):
        one = found(run_of(tmp_path, *hosts), states, notes=noted)
        assert one.words


def test_of_many_ranks_some_are_told(tmp_path: Path) -> None:
    states = {rank: LATE if rank < 30 else WAITS for rank in range(1000)}
    one = found(run_of(tmp_path, *["n"] * 1000), states)
    assert len(one.ranks) == 30
    assert len(one.words) < 1000
    assert "For them ranks 30, 31, 32, 33, 34 and 965 more waited" in one.words


def told(run: Run, capsys: pytest.CaptureFixture[str], **options: bool) -> str:
    assert blame(Namespace(run=str(run.path), json=options.get("json", False))) == 0
    return capsys.readouterr().out


def test_the_newest_job_counts_not_what_an_earlier_one_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    states = {0: WAITS, 1: LATE}
    for node, at in ((0, BEGAN + 9), (1, BEGAN - 100)):
        path = node_file.path_of(run.path / "watch", node)
        node_file.write(path, NodeFile(at, f"node {node}", {node: states[node]}, {}), 0)
    (run.path / "watch" / "node-0002.json").write_text("{")
    assert [file.reason for file in states_of(run)] == ["node 0"]
    assert "(node 0)" in told(run, capsys)


def test_a_run_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path)
    assert told(run, capsys).startswith("no rank is behind: ")
    assert json.loads(told(run, capsys, json=True)) == {"stuck": None, "slow": []}
    (run.path / "watch").write_text("no folder")
    assert told(run, capsys).startswith("no rank is behind: ")


def test_nothing_of_a_stranger_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "\x1b[2J\r\x07\u202e"
    states = {
        0: replace(WAITS, waits_in=bad, axis=bad, started={bad: [Operation(7, 1, bad)]}, group=bad),
        1: replace(LATE, started={bad: [Operation(6, 1, bad)]}),
        2: replace(WAITS, waits_in=bad * 2),
    }
    run = run_of(tmp_path, bad, bad, bad)
    rows = [
        (at, at, [{"step": 1.0, "data": 0.9 * (rank == 1)} for rank in range(3)])
        for at in range(1, 13)
    ]
    write_rank_times(run.path, 3, *rows)
    file = NodeFile(AT, bad, states, {1: f"{bad}\n\n{bad}"}, {1: bad, 2: bad})
    node_file.write(node_file.path_of(run.path / "watch", 0), file, 0)
    said = told(run, capsys)
    assert "Rank 1 on " in said
    assert "is slow: in steps 1 to 12" in said
    assert all(line.isprintable() for line in said.splitlines() if line)
    assert told(run, capsys, json=True).isascii()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_that_has_gone_on_since_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], goes_on: bool
) -> None:
    events: list[dict[str, Any]] = [{"event": "start", "time": 0, "ranks": ranks_on(*HOSTS)}]
    events += [{"event": "stop", "time": 509}] if goes_on else []
    run = read_run(write_run(tmp_path / "r", [], events))
    file = NodeFile(AT, "quiet", {0: WAITS, 1: LATE}, {})
    node_file.write(node_file.path_of(run.path / "watch", 0), file, 0)
    assert ("ago; the run has gone on since." in told(run, capsys)) == goes_on


def test_the_main_threads_stack_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    stack = 'Thread 0x1:\n  File "reader.py"\n\nCurrent thread 0x2:\n  File "loop.py"\n'
    file = NodeFile(AT, "quiet", {0: WAITS, 1: LATE}, {1: stack})
    node_file.write(node_file.path_of(run.path / "watch", 0), file, 0)
    said = told(run, capsys)
    assert 'stacks of rank 1:\nCurrent thread 0x2:\n  File "loop.py"\n' in said
    assert "reader.py" not in said
