"""From slots to words, without MPI."""

import time

from hpczero.comm.status import (
    SLOT,
    Operation,
    RankState,
    Signature,
    Status,
    WaitPoint,
    identity,
    read,
)
from hpczero.comm.verdict import (
    ABSENT,
    DIFFERENT,
    HERE,
    STARTED,
    UNKNOWN,
    Question,
    account,
    cause,
    headline,
    judge,
    suspects,
)

GROUP = "77"


def state(
    *started: tuple[int, int], waited: float | None = 5.0, waits_in: str = "somewhere"
) -> RankState:
    """`started`: (number, code)."""
    return RankState(
        1,
        1,
        1,
        3,
        9.0,
        waited,
        waits_in,
        {GROUP: [Operation(number, code, f"operation {code}") for number, code in started]},
    )


def question(*started: tuple[int, int], ranks: int = 4, **more: object) -> Question:
    ours = [Operation(number, code, f"operation {code}") for number, code in started]
    number = more.pop("number", ours[-1].number)
    return Question("the place", 0, range(ranks), GROUP, "data", number, ours, **more)  # type: ignore[arg-type]


def test_each_other_rank_is_judged_by_what_it_has_started() -> None:
    states = {1: state((5, 10), (6, 11)), 2: state((5, 10)), 3: state((5, 10), (6, 12))}
    assert judge(question((5, 10), (6, 11)), states) == {1: HERE, 2: ABSENT, 3: DIFFERENT}


def test_a_rank_that_has_gone_on_has_come() -> None:
    assert judge(question((6, 11), ranks=2), {1: state((9, 1), (10, 2))}) == {1: HERE}


def test_an_operation_that_is_not_remembered_any_more_is_judged_by_its_number() -> None:
    """The rank waits for the first of many that it has started in one go."""
    asked = question((7, 11), (8, 11), ranks=5, number=3)
    stopped, gone_on = state((2, 10), waited=None), state((7, 11), (8, 11))
    judged = judge(asked, {1: stopped, 2: gone_on, 3: state(), 4: state((3, 11), waited=None)})
    assert judged == {1: ABSENT, 2: HERE, 3: ABSENT, 4: STARTED}
    nothing = Question("the place", 0, range(3), GROUP, "data", 3)
    assert judge(nothing, {1: stopped, 2: gone_on}) == {1: ABSENT, 2: HERE}


def test_ranks_that_parted_before_what_is_remembered_are_told_apart() -> None:
    def after(history: int) -> RankState:
        done = [Operation(number, 10, "operation 10", history + number) for number in (98, 99)]
        return RankState(1, 1, 1, 3, 9.0, 5.0, "somewhere", {GROUP: done})

    asked = Question("there", 0, range(3), GROUP, "data", 99, after(500).started[GROUP])
    states = {1: after(500), 2: after(700)}
    judged = judge(asked, states)
    assert judged == {1: HERE, 2: DIFFERENT}
    assert suspects(asked, judged, states, []) == [2]
    lines = account(asked, judged, states, dict.fromkeys(range(3), "host"), {})
    assert "an operation before number 98 along data was not the same there and here" in lines[1]


def test_the_rank_that_the_others_wait_for_is_the_suspect() -> None:
    asked = question((6, 11), ranks=4)
    here, busy = state((6, 11)), state((5, 10), waited=None)
    own = {0: state((6, 11), waits_in="the place")}

    def suspected(
        first: RankState, second: RankState, third: RankState, gone: tuple[int, ...] = ()
    ) -> list[int]:
        states = own | {1: first, 2: second, 3: third}
        return suspects(asked, judge(asked, states), states, gone)

    assert suspected(here, here, busy) == [3]
    assert suspected(here, here, state((6, 12))) == [3], "it has started something else"
    assert suspected(here, busy, here, gone=(3,)) == [3], "its process has ended"
    elsewhere = state((5, 10), waits_in="close (number 3 along world)")
    there = state((6, 11), waits_in="the place")
    assert suspected(there, there, elsewhere) == [3]
    assert suspected(elsewhere, elsewhere, elsewhere) == [0], "that asks, where nobody else is"
    assert suspected(there, elsewhere, elsewhere) == [], "two against two"
    assert suspected(there, there, there) == []


def test_of_two_ranks_the_one_that_is_where_no_other_rank_is_is_suspected() -> None:
    asked = Question("send 1 to rank 0", 2, [0])
    away = state(waits_in="all_reduce (number 7 along data)")
    states = {0: away, 1: away, 2: state(waits_in="send 1 to rank 0")}
    assert suspects(asked, judge(asked, states), states, []) == [2]
    assert suspects(asked, {0: ABSENT}, {0: away, 2: states[2]}, []) == []


def test_a_rank_of_another_group_that_waits_for_nothing_is_suspected() -> None:
    """Rank 0 waits for 1, which waits along another axis for 5."""
    asked = question((6, 11), ranks=2)
    along_tensor = state((5, 10), waits_in="all_reduce (number 2 along tensor)")
    states = {0: state((6, 11)), 1: along_tensor, 5: state(waited=None)}
    assert suspects(asked, judge(asked, states), states, []) == [5]
    assert cause([5], {5: "node7"}) == ["  most likely the cause: rank 5 on node7"]
    assert cause([], {}) == []


def test_a_rank_that_left_an_operation_under_way_is_told_apart_from_one_that_waits() -> None:
    asked = question((6, 11), ranks=3)
    states = {1: state((6, 11), waited=None), 2: state((6, 11))}
    judged = judge(asked, states)
    assert judged == {1: STARTED, 2: HERE}
    lines = account(
        asked, judged, states, dict.fromkeys(range(3), "host"), {2: "its process is stopped"}
    )
    assert lines[0] == "  waiting in it: ranks 0 2"
    assert "rank 1 on host: step 3; in no operation for 9.0 s" in lines[1]
    assert lines[2] == "  rank 2 on host: its process is stopped"


def test_an_earlier_operation_that_did_not_fit_is_found() -> None:
    assert judge(question((5, 10), (6, 11), ranks=2), {1: state((5, 99), (6, 11))}) == {
        1: DIFFERENT
    }


def test_who_has_started_nothing_there_and_who_is_not_heard_of() -> None:
    nothing = RankState(1, 1, 1, -1, 9.0, None, "", {})
    assert judge(question((1, 10), ranks=3), {1: nothing}) == {1: ABSENT, 2: UNKNOWN}


def test_missing_ranks_that_are_known_are_believed() -> None:
    assert judge(question((1, 1), ranks=3, missing={2}), {}) == {1: HERE, 2: ABSENT}


def test_outside_of_groups_a_rank_has_come_if_it_waits_at_the_same_place() -> None:
    here, there = state(waits_in="making group data"), state(waits_in="making group tensor")
    working = state(waited=None, waits_in="making group data")
    asked = Question("making group data", 0, range(4))
    assert judge(asked, {1: here, 2: there, 3: working}) == {1: HERE, 2: ABSENT, 3: ABSENT}


def test_the_headline_says_what_is_wrong() -> None:
    assert "same operation" in headline({1: DIFFERENT, 2: ABSENT}, 3.0)
    assert headline({1: HERE, 2: ABSENT}, 3.0) == "after 3.0 s a rank did not come"
    assert "all have come" in headline({1: HERE}, 3.0)
    assert "has not ended" in headline({1: HERE, 2: UNKNOWN}, 3.0)


def test_ranks_that_run_different_layers_hear_what_to_do() -> None:
    def advice(place: str, theirs: RankState) -> bool:
        ours = [Operation(6, 11, "operation 11")]
        asked = Question(place, 0, range(2), GROUP, "data", 6, ours)
        lines = account(
            asked, judge(asked, {1: theirs}), {1: theirs}, dict.fromkeys(range(2), "host"), {}
        )
        return "at zero.stage = 2 they need not" in lines[-1]

    gather, plain = "all_gather blocks.2 of 8 bytes", "all_gather of 8 bytes"
    assert advice(gather, state((6, 12), waits_in="all_gather blocks.3 of 8 bytes"))
    assert advice(gather, state((5, 10), waits_in="reduce_scatter of 8 bytes"))
    assert advice("reduce_scatter of 8 bytes", state((5, 10), waits_in=gather))
    assert not advice(gather, state((5, 10), waited=None, waits_in="")), "it computes, or has ended"
    assert not advice(gather, state((6, 11), waits_in=gather))
    assert not advice(plain, state((6, 12), waits_in=plain))


def test_many_ranks_are_not_all_told_about() -> None:
    asked = question((6, 11), ranks=1000)
    states = {rank: state((6, 11)) if rank % 2 else state((5, 1)) for rank in range(1000)}
    lines = account(
        asked,
        judge(asked, states),
        states,
        dict.fromkeys(range(1000), "host"),
        {2: "its process has ended"},
    )
    assert len(lines) == 10
    assert lines[0] == "  waiting in it: ranks 0 1 3 5 7 9 11 13 15 17 19 21 23 25 … 999"
    assert (
        "rank 2 on host: step 3; its process has ended; started last along data: operation 1 "
        "(number 5)"
    ) in lines[1]
    assert lines[-1].startswith("  not come: 491 more: ranks 18 20")


def test_what_is_written_to_a_slot_is_read_from_it() -> None:
    status = Status()
    slot = memoryview(bytearray(SLOT))
    entry = status.enter("data", [0, 3])
    signature = Signature.of("all_reduce", "sum", "of 40 bytes of float32")
    status.started(entry, 1, signature)
    status.move_to(slot)
    for number in range(2, 100):
        status.started(entry, number, signature)
    status.at_step(5)
    status.begin_wait(WaitPoint(signature.label, entry, 99))
    seen = read(slot, time.monotonic() + 10)
    assert (seen.step, seen.waits_in) == (
        5,
        "all_reduce sum of 40 bytes of float32 (number 99 along data)",
    )
    assert seen.waited is not None
    assert 10 <= seen.waited < 11
    operations = seen.started[str(identity("data", [0, 3], 1))]
    assert [operation.number for operation in operations] == list(range(36, 100))
    assert len({operation.history for operation in operations}) == 64
    assert read(slot, time.monotonic(), whole=False).waits_in == seen.waits_in
    status.end_wait()
    assert read(slot, time.monotonic()).waited is None
    status.leave(entry)
    assert read(slot, time.monotonic()).started == {}


def test_a_group_made_again_is_another_group() -> None:
    status = Status()
    first = status.group_at(status.enter("data", [0, 1]))
    second = status.group_at(status.enter("data", [0, 1]))
    assert first[0] == second[0] == "data"
    assert first[1] != second[1]


def test_labels_of_any_length_fit() -> None:
    status = Status()
    long = Signature.of("all_reduce", "x" * 200)
    status.started(status.enter("a" * 100, [0]), 1, long)
    with status.waiting("y" * 200, [0]):
        assert read(status.slot, 0.0).waits_in == "y" * 64
    longer = Signature.of("all_reduce", "x" * 200 + "1")
    assert long.label == longer.label
    assert long.code != longer.code
