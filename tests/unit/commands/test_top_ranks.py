"""Ranks: their doings, and whom they wait for, from states made by hand."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hpczero.comm import verdict
from hpczero.comm.node_file import NodeFile
from hpczero.comm.status import RankState
from hpczero.commands.top_frame import frame
from hpczero.commands.top_ranks import folds, ranges, ranks_now
from tests.support.looked_at import HOSTS, LATE, NOW, facts, ranks_of, state


def words(states: Mapping[int, RankState], **more: Any) -> list[str]:
    return [f"{fold.who}: {fold.words}" for fold in folds(ranks_of(states, **more))]


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
        NodeFile(NOW, "", {0: state(), 1: state()}, {}),
        NodeFile(NOW - 60, "", {2: LATE}, {}),
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
    shown = frame(facts(ranks=ranks_of(states)), 80, 30, "utf-8")
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
    shown = facts(ranks=ranks_of(states, resident={0: -5, 7: 10**30}))
    assert frame(shown, 80, None, "utf-8")
    assert json.dumps(shown.as_data())
