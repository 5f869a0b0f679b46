"""The simulator, against hand-made schedules, and against the longest path through the graph of
what needs what.
"""

import random
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.errors import HpczeroError
from hpczero.parallel.pipeline import schedule as schedules
from hpczero.parallel.pipeline.schedule import Action, Schedule, forward_only, schedule
from hpczero.parallel.pipeline.simulate import InvalidSchedule, Simulation, Times, simulate

KINDS = {"f": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def actions(*stages: str) -> list[list[Action]]:
    """f0 forward of micro-batch 0; B3 backward; a second chunk is marked by '."""
    return [
        [
            Action(KINDS[word[0]], word.count("'"), int(word[1:].rstrip("'")))
            for word in stage.split()
        ]
        for stage in stages
    ]


def complaint(found: Schedule, chunks: int, micro_batches: int) -> str:
    with pytest.raises(InvalidSchedule) as error:
        simulate(found, chunks, micro_batches)
    return str(error.value)


def test_two_stages_by_hand() -> None:
    times = Times({"forward": [1, 2], "backward": [2, 4]}, transfers=[0.5])
    found = simulate(actions("f0 f1 B0 B1", "f0 B0 f1 B1"), 1, 2, times)
    assert [
        [(interval.begin, interval.end) for interval in stage] for stage in found.intervals
    ] == [
        [(0, 1), (1, 2), (8, 10), (14, 16)],
        [(1.5, 3.5), (3.5, 7.5), (7.5, 9.5), (9.5, 13.5)],
    ]
    assert found.makespan == 16
    assert found.idle == pytest.approx((1 - 6 / 16, 1 - 12 / 16))
    assert found.peak_live == (2, 1)


def test_two_chunks_by_hand() -> None:
    """Each part has its times, and each boundary, the one from the last stage back to the first
    too.
    """
    times = Times({"forward": [1, 2, 3, 4], "backward": [1, 1, 1, 1]}, transfers=[10, 20, 30])
    found = simulate(actions("f0 f0' B0' B0", "f0 f0' B0' B0"), 2, 1, times)
    assert [[interval.begin for interval in stage] for stage in found.intervals] == [
        [0, 33, 101, 133],
        [11, 66, 70, 122],
    ]
    assert found.peak_live == (2, 2)


def test_one_stage_hands_on_to_itself_for_nothing() -> None:
    found = simulate(
        actions("f0 f0' B0' B0"),
        2,
        1,
        Times({"forward": [1, 1], "backward": [2, 2]}, transfers=[100]),
    )
    assert found.makespan == 6
    assert found.idle == (0,)


def test_an_evaluation_by_hand() -> None:
    found = simulate(actions("f0 f1", "f0 f1"), 1, 2)
    assert (found.makespan, found.peak_live) == (3, (1, 1))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (
            ["f0 f1 B0", "f0 B0 f1 B1"],
            [
                (
                    "stage 0: micro-batch 1 in chunk 0 makes output (it should be output, input "
                    "gradient, weight gradient)"
                )
            ],
        ),
        (
            ["f0 f1 B0 B1", "B0 f1 B1"],
            [
                (
                    "stage 1: micro-batch 0 in chunk 0 makes input gradient, weight gradient (it "
                    "should be output,"
                )
            ],
        ),
        (
            ["f0 f1 B0 B1 B0", "f0 B0 f1 B1"],
            [
                "stage 0",
                "makes output, input gradient, weight gradient, input gradient, weight gradient",
            ],
        ),
        (
            ["B0 f0 f1 B1", "f0 B0 f1 B1"],
            ["stage 0: micro-batch 0 in chunk 0 makes input gradient, weight gradient, output"],
        ),
        (
            ["f0 f1 B0 B1", "f0 B0 f1 B1 f2"],
            [
                (
                    "stage 1: forward of micro-batch 2 in chunk 0, but there are 1 chunks and 2 "
                    "micro-batches"
                )
            ],
        ),
        (
            ["f0 f1 B0 B1", "f0 B0 f1 B1 f0'"],
            ["stage 1: forward of micro-batch 0 in chunk 1, but there are"],
        ),
        (
            ["f0 B0 f1 B1", ""],
            [
                "stage 1: micro-batch 0 in chunk 0 makes nothing",
                "micro-batch 1 in chunk 0 makes nothing",
            ],
        ),
        (["", ""], ["stage 0: micro-batch 0 in chunk 0 makes nothing (it should be output)"]),
    ],
)
def test_what_is_missing_double_or_too_early_is_named(
    stages: Sequence[str], expected: list[str]
) -> None:
    text = complaint(actions(*stages), 1, 2)
    for part in expected:
        assert part in text


def test_a_deadlock_says_who_waits_for_what() -> None:
    text = complaint(actions("f0 B0 f1 B1", "f0 f1 B0 B1"), 1, 2)
    assert (
        "deadlock: stage 0 stands at the backward of micro-batch 0 in chunk 0, waiting for "
        "the input gradient of micro-batch 0"
    ) in text
    assert "from chunk 0 of stage 1" in text
    assert (
        "stage 1 stands at the forward of micro-batch 1 in chunk 0, waiting for the output "
        "of micro-batch 1 from chunk 0 of stage 0"
    ) in text


def test_many_mistakes_are_counted() -> None:
    with pytest.raises(HpczeroError, match=r"; and 6 more") as error:
        simulate([[Action("forward", 0, number) for number in range(10)], []], 1, 10)
    assert isinstance(error.value, InvalidSchedule)
    assert len(error.value.mistakes) == 10


def test_the_simulator_needs_nothing_but_two_more_kinds_for_backward_in_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The schedule ZB-H1 of Qi et al. 2023 for 3 stages: weight gradients fill the bubble at the
    end.
    """
    monkeypatch.setitem(schedules.RESULTS, "input gradient", ("input gradient",))
    monkeypatch.setitem(schedules.RESULTS, "weight gradient", ("weight gradient",))
    split = actions(
        "f0 f1 f2 I0 f3 W0 I1 W1 I2 W2 I3 W3",
        "f0 f1 I0 f2 W0 I1 f3 W1 I2 W2 I3 W3",
        "f0 I0 W0 f1 I1 W1 f2 I2 W2 f3 I3 W3",
    )
    found = simulate(split, 1, 4)
    assert found.peak_live == (4, 3, 1)
    whole = simulate(
        schedule("1f1b", 3, 1, 4), 1, 4, Times({"forward": [1] * 3, "backward": [2] * 3})
    )
    assert found.makespan < whole.makespan
    assert "makes output, input gradient (it should" in complaint(
        [split[0], split[1], split[2][:-1]], 1, 4
    )


def longest_paths(found: Schedule, chunks: int, times: Times) -> dict[tuple[int, Action], float]:
    """When each action ends, from nothing but the graph of what needs what."""
    stages = len(found)
    graph: dict[tuple[int, Action], list[tuple[tuple[int, Action], float]]] = {}
    for stage, own in enumerate(found):
        for number, action in enumerate(own):
            part = action.chunk * stages + stage
            other = part - 1 if action.kind == "forward" else part + 1
            before = [((stage, own[number - 1]), 0.0)] if number else []
            if 0 <= other < stages * chunks:
                between = times.transfers[min(part, other)] if stages > 1 else 0.0
                before.append(
                    (
                        (other % stages, Action(action.kind, other // stages, action.micro_batch)),
                        between,
                    )
                )
            graph[stage, action] = before
    ends: dict[tuple[int, Action], float] = {}
    for stage, action in TopologicalSorter(
        {node: [other for other, _ in before] for node, before in graph.items()}
    ).static_order():
        begin = max((ends[other] + between for other, between in graph[stage, action]), default=0.0)
        ends[stage, action] = begin + times.actions[action.kind][action.chunk * stages + stage]
    return ends


def shuffled(layout: tuple[int, int, int], seed: int, swaps: int) -> Schedule:
    """A valid schedule with some neighbouring actions exchanged: about half of them can still be
    carried out.
    """
    stages, chunks, micro_batches = layout
    found = [list(stage) for stage in schedule("interleaved", stages, chunks, micro_batches)]
    chance = random.Random(seed)
    for _ in range(swaps):
        own = found[chance.randrange(stages)]
        place = chance.randrange(len(own) - 1)
        first, second = own[place : place + 2]
        if (first.chunk, first.micro_batch) != (
            second.chunk,
            second.micro_batch,
        ):  # forward stays before backward
            own[place : place + 2] = second, first
    return found


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 7)),
    st.integers(0, 10**6),
    st.integers(0, 40),
)
@settings(max_examples=300, deadline=None)
def test_any_order_of_actions_takes_as_long_as_its_longest_path_or_is_a_deadlock(
    layout, seed, swaps
):
    stages, chunks, micro_batches = layout
    chance = random.Random(seed + 1)
    parts = stages * chunks
    of_kinds = {
        kind: [chance.randint(1, 9) for _ in range(parts)] for kind in ("forward", "backward")
    }
    times = Times(of_kinds, transfers=[chance.randint(0, 9) for _ in range(parts)])
    found = shuffled(layout, seed, swaps)
    try:
        expected = longest_paths(found, chunks, times)
    except CycleError:
        assert "deadlock: stage " in complaint(found, chunks, micro_batches)
        return
    simulation = simulate(found, chunks, micro_batches, times)
    assert {
        (stage, interval.action): interval.end
        for stage, intervals in enumerate(simulation.intervals)
        for interval in intervals
    } == expected
    assert live_by_counting(found, chunks) == simulation.peak_live
    forwards = simulate(forward_only(found), chunks, micro_batches, times) if not swaps else None
    assert forwards is None or forwards.makespan < simulation.makespan


def live_by_counting(found: Schedule, chunks: int) -> tuple[int, ...]:
    peaks = []
    for own in found:
        counts = [
            sum(1 if action.kind == "forward" else -1 for action in own[: number + 1])
            for number in range(len(own))
        ]
        peaks.append(max(counts))
    return tuple(peaks)


def test_spans_of_a_stage_never_overlap() -> None:
    found: Simulation = simulate(
        schedule("interleaved", 3, 2, 5),
        2,
        5,
        Times({"forward": [1.5] * 6, "backward": [2.5] * 6}, [0.25] * 5),
    )
    for intervals in found.intervals:
        assert all(first.end <= second.begin for first, second in pairwise(intervals))
