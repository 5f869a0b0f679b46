"""The file that a node's ranks write for other nodes, without MPI."""

import json
from pathlib import Path

import pytest

from hpczero.comm.status import RankState, Status
from hpczero.comm.watchdog import Member, Watch


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_nodes_file_is_written_by_a_rank_that_waits_not_by_one_that_is_stuck(
    rank: int, tmp_path: Path
) -> None:
    """Rank 0 computes for ever, and might not be able to; of those that wait it is the lowest."""
    states = {
        number: RankState(1, 1, 1, 3, 9.0, None if number == 0 else 5.0, "somewhere")
        for number in range(3)
    }
    watch = object.__new__(Watch)
    watch._seconds, watch._published, watch._rank, watch._node = 2.0, set(), rank, 0
    watch._folder = tmp_path / "watch"
    watch._asked, watch._rested, watch._longest = None, {}, 0.0
    watch._states_on_node = lambda whole=True: states
    watch._stacks_of = lambda ranks, states: {}
    watch._publish()
    written = watch._folder / "node-0000.json"
    assert written.exists() == (rank == 1)
    if rank == 1:
        assert set(json.loads(written.read_text())["states"]) == {"0", "1", "2"}


def test_what_an_earlier_job_left_does_not_keep_this_one_from_reporting(tmp_path: Path) -> None:
    for name in ("report", "node-0000.txt"):
        (tmp_path / name).touch()
    status = Status()
    member = Member(0, "here", 0)
    watch = Watch(status, member, [member], {0: status.slot}, 3600, tmp_path)
    try:
        assert not (tmp_path / "node-0000.txt").exists()
        assert [watch._is_first_node() for _ in range(2)] == [True, False]
    finally:
        watch.stop()
