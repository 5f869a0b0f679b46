"""Pipeline schedules over 1-16 stages, 1-4 chunks and 1-64 micro-batches: valid, within the
published bounds, and never stuck on messages.

The usual run takes a part of these layouts (for some numbers of stages, each with every number of
chunks, the micro-batches around the stages); --slow takes all up to twice the stages, and every
eighth number of micro-batches beyond.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import pytest

from hpczero.parallel.pipeline.schedule import (
    KINDS,
    Action,
    PartResult,
    Schedule,
    ScheduledAction,
    forward_only,
    most_arrived,
    needs,
    receiver,
    schedule,
    scheduled_actions,
    sent,
)
from hpczero.parallel.pipeline.simulate import Times, simulate

Layout = tuple[str, int, int, int]  # kind, stages, chunks, micro-batches


def layouts(everything: bool) -> Iterator[Layout]:
    for stages in range(1, 17) if everything else (1, 2, 3, 4, 5, 6, 8, 11, 16):
        for chunks in range(1, 5):
            around = {1, 2, stages - 1, stages, stages + 1, 2 * stages - 1}
            for micro_batches in range(1, 65):
                if (
                    micro_batches in around
                    or (5 * micro_batches + 3 * stages + chunks) % 64 == 0
                    or (everything and (micro_batches <= 2 * stages or micro_batches % 8 == 0))
                ):
                    yield from (
                        (kind, stages, chunks, micro_batches)
                        for kind in KINDS
                        if chunks == 1 or kind == "interleaved"
                    )


some_and_many = pytest.mark.parametrize(
    "everything", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "many"]
)


def equal_parts(stages: int, chunks: int, forward: float, backward: float) -> Times:
    """A stage takes `forward` and `backward` for all of its chunks together."""
    return Times(
        {
            "forward": [forward / chunks] * stages * chunks,
            "backward": [backward / chunks] * stages * chunks,
        }
    )


def letters(actions: Sequence[Action]) -> str:
    """f0 forward of micro-batch 0; B3 backward; a second chunk is marked by '."""
    return " ".join(
        f"{'f' if action.kind == 'forward' else 'B'}{action.micro_batch}{chr(39) * action.chunk}"
        for action in actions
    )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (("gpipe", 2, 1, 3), ["f0 f1 f2 B0 B1 B2", "f0 f1 f2 B0 B1 B2"]),
        (
            ("1f1b", 3, 1, 4),
            ["f0 f1 f2 B0 f3 B1 B2 B3", "f0 f1 B0 f2 B1 f3 B2 B3", "f0 B0 f1 B1 f2 B2 f3 B3"],
        ),
        (("1f1b", 3, 1, 1), ["f0 B0", "f0 B0", "f0 B0"]),
        (("interleaved", 2, 2, 2), ["f0 f1 f0' f1' B0' B1' B0 B1", "f0 f1 f0' B0' f1' B1' B0 B1"]),
        (
            ("interleaved", 2, 2, 3),
            [
                "f0 f1 f0' f1' f2 B0' B1' f2' B0 B1 B2' B2",
                "f0 f1 f0' B0' f1' B1' f2 B0 B1 f2' B2' B2",
            ],
        ),
        (("interleaved", 1, 2, 2), ["f0 f0' B0' f1 B0 f1' B1' B1"]),
    ],
    ids=str,
)
def test_small_schedules_written_out(layout: Layout, expected: list[str]) -> None:
    assert [letters(stage) for stage in schedule(*layout)] == expected


@some_and_many
def test_every_schedule_is_valid_and_keeps_no_more_than_published(everything: bool) -> None:
    for kind, stages, chunks, micro_batches in layouts(everything):
        found = simulate(schedule(kind, stages, chunks, micro_batches), chunks, micro_batches)
        for stage, peak in enumerate(found.peak_live):
            ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
            in_flight = min(stages - stage, micro_batches)
            if kind == "gpipe":
                assert peak == micro_batches
            elif chunks == 1:
                assert peak == in_flight, (kind, stages, micro_batches, stage)
            else:
                assert peak <= min(ahead, chunks * micro_batches), (
                    kind,
                    stages,
                    chunks,
                    micro_batches,
                    stage,
                )


@some_and_many
def test_every_evaluation_is_valid_and_keeps_nothing(everything: bool) -> None:
    for kind, stages, chunks, micro_batches in layouts(everything):
        found = simulate(
            forward_only(schedule(kind, stages, chunks, micro_batches)), chunks, micro_batches
        )
        assert set(found.peak_live) == {1}


@some_and_many
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 2)])
@pytest.mark.few(1)
def test_idle_shares_are_the_published_ones(forward: int, backward: int, everything: bool) -> None:
    for kind, stages, chunks, micro_batches in layouts(everything):
        found = simulate(
            schedule(kind, stages, chunks, micro_batches),
            chunks,
            micro_batches,
            equal_parts(stages, chunks, forward, backward),
        )
        one_chunk = (
            micro_batches + stages - 1
        )  # what gpipe and 1f1b take; interleaved is never slower
        if chunks == 1 or micro_batches % stages == 0:
            ideal = micro_batches * (forward + backward)
            assert found.makespan - ideal == pytest.approx(
                (stages - 1) / chunks * (forward + backward)
            ), (kind, stages, chunks, micro_batches)
        else:
            assert found.makespan <= one_chunk * (forward + backward) * (1 + 1e-9), (
                kind,
                stages,
                chunks,
                micro_batches,
            )
        if chunks == 1:
            assert found.idle == pytest.approx([(stages - 1) / one_chunk] * stages)


def test_one_chunk_interleaved_is_1f1b() -> None:
    for kind, stages, chunks, micro_batches in layouts(everything=False):
        if kind == "interleaved" and chunks == 1:
            assert schedule(kind, stages, 1, micro_batches) == schedule(
                "1f1b", stages, 1, micro_batches
            )


def test_gradients_add_up_in_the_order_of_the_micro_batches_in_all_schedules() -> None:
    for kind, stages, chunks, micro_batches in layouts(everything=False):
        for stage in schedule(kind, stages, chunks, micro_batches):
            for chunk in range(chunks):
                backwards = [
                    action.micro_batch
                    for action in stage
                    if action.kind == "backward" and action.chunk == chunk
                ]
                assert backwards == list(range(micro_batches))


def test_what_does_not_exist_is_refused() -> None:
    for layout in (
        ("zero-bubble", 2, 1, 2),
        ("1f1b", 2, 2, 2),
        ("gpipe", 0, 1, 1),
        ("interleaved", 2, 2, 0),
    ):
        with pytest.raises(AssertionError):
            schedule(*layout)


class Rendezvous:
    """Carries out the steps of all stages where nothing is buffered on the way: a send is done when
    its receive has been started, and the first send between two ranks meets the first receive.
    `unsent`: how many sends a stage may have under way when it goes on.
    """

    def __init__(self, of_stages: Sequence[Sequence[ScheduledAction]], unsent: int) -> None:
        stages = len(of_stages)
        self.of_stages, self.unsent = of_stages, unsent
        self.position = [0] * stages
        self.begun = (
            [False] * stages
        )  # the action at the position: its receives are started, and what it needs was there
        self.posted: dict[tuple[int, int], deque[PartResult]] = {}
        self.sends: dict[tuple[int, int], deque[PartResult]] = {}
        self.under_way: list[deque[PartResult]] = [deque() for _ in of_stages]
        self.arrived: list[set[PartResult]] = [set() for _ in of_stages]

    def run(self) -> None:
        while any(self.goes_on(stage) for stage in range(len(self.of_stages))):
            pass
        assert self.position == [len(own) for own in self.of_stages], f"stuck at {self.position}"
        assert not any(self.posted.values()), "a receive that nobody answers"
        assert not any(self.sends.values()), "a message that nobody receives"
        assert not any(self.arrived), "a message that nobody needs"

    def goes_on(self, stage: int) -> bool:
        moved = False
        while self.position[stage] < len(self.of_stages[stage]) and self.steps_on(stage):
            moved = True
        return moved

    def steps_on(self, stage: int) -> bool:
        step, stages = self.of_stages[stage][self.position[stage]], len(self.of_stages)
        if not self.begun[stage]:
            for result in step.posts:
                self.posted.setdefault((result.part % stages, stage), deque()).append(result)
                self.meet(result.part % stages, stage)
            self.begun[stage] = True
        if step.needs and step.needs not in self.arrived[stage]:
            return False
        if len(self.under_way[stage]) > self.unsent:
            return False
        self.arrived[stage].discard(step.needs)
        if step.gives:
            target = receiver(step.gives, stages)
            if target == stage:
                self.arrived[stage].add(step.gives)
            else:
                self.under_way[stage].append(step.gives)
                self.sends.setdefault((stage, target), deque()).append(step.gives)
                self.meet(stage, target)
        self.position[stage] += 1
        self.begun[stage] = False
        return True

    def meet(self, source: int, target: int) -> None:
        posted, sends = self.posted.get((source, target)), self.sends.get((source, target))
        while posted and sends:
            result, other = posted.popleft(), sends.popleft()
            assert result == other, (
                f"stage {target} expects {result} where stage {source} sends {other}"
            )
            self.arrived[target].add(result)
            self.under_way[source].remove(result)


def of_all_stages(actions: Schedule, chunks: int, ahead: int) -> list[tuple[ScheduledAction, ...]]:
    return [scheduled_actions(actions, chunks, stage, ahead) for stage in range(len(actions))]


@some_and_many
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.few(2)
def test_messages_meet_in_order_and_never_block(ahead: int, everything: bool) -> None:
    """Whatever MPI buffers: in training sends are waited for at the end; an evaluation goes on
    with two under way.
    """
    for kind, stages, chunks, micro_batches in layouts(everything):
        if everything or micro_batches <= 2 * stages + 1:
            actions = schedule(kind, stages, chunks, micro_batches)
            Rendezvous(of_all_stages(actions, chunks, ahead), unsent=10**9).run()
            Rendezvous(of_all_stages(forward_only(actions), chunks, ahead), unsent=2).run()


@some_and_many
def test_few_more_buffers_than_live_activations(everything: bool) -> None:
    """An activation stays in its buffer until its backward is done, a gradient until it is used;
    receives are started two actions ahead.
    """
    for kind, stages, chunks, micro_batches in layouts(everything):
        if everything or micro_batches <= 2 * stages + 1:
            actions = schedule(kind, stages, chunks, micro_batches)
            peaks = simulate(actions, chunks, micro_batches).peak_live
            used = [most_arrived(own) for own in of_all_stages(actions, chunks, ahead=2)]
            assert all(most <= peak + 3 for most, peak in zip(used, peaks, strict=True)), (
                kind,
                stages,
                chunks,
                micro_batches,
                used,
                peaks,
            )


def test_steps_say_which_backward_is_a_chunks_last() -> None:
    for stage in range(3):
        found = scheduled_actions(schedule("interleaved", 3, 2, 5), 2, stage, ahead=2)
        assert [step.action for step in found if step.last] == [
            Action("backward", 1, 4),
            Action("backward", 0, 4),
        ]


def test_receives_are_started_two_actions_ahead() -> None:
    actions = schedule("1f1b", 2, 1, 4)
    activations = [PartResult("output", 0, number) for number in range(4)]
    assert list(sent(actions, 1, 0, 1)) == activations
    assert [step.posts for step in scheduled_actions(actions, 1, 1, ahead=2)] == [
        (activations[0], activations[1]), (), (activations[2],), (), (activations[3],), (), (), ()
    ]  # fmt: skip


def test_a_stage_alone_receives_nothing() -> None:
    for step in scheduled_actions(schedule("interleaved", 1, 3, 2), 3, 0, ahead=2):
        assert step.posts == ()
        assert (step.needs is None) == (
            step.action.chunk == (0 if step.action.kind == "forward" else 2)
        )
        assert (step.gives is None) == (
            step.action.chunk == (2 if step.action.kind == "forward" else 0)
        )


def test_an_action_needs_the_result_of_the_neighbouring_part() -> None:
    assert needs(Action("forward", 1, 5), 0, 4, 2) == PartResult("output", 3, 5)
    assert needs(Action("backward", 0, 5), 3, 4, 2) == PartResult("input gradient", 4, 5)
    assert needs(Action("forward", 0, 5), 0, 4, 2) is None
    assert needs(Action("backward", 1, 5), 3, 4, 2) is None
