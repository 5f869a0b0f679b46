"""Pipeline schedules (pure): the actions of each stage and its messages, in order.

The model is cut into stages x chunks parts; part c * stages + s is chunk c of stage s. A
micro-batch goes forward through all parts and back through all of them. A stage's work on it is an
action; each action makes *results*:

    output            of a part: from the output of the part before
    input gradient    of a part: from the input gradient of the part after; needs the own output
    weight gradient   of a part: needs the same

So a result that is handed on is always made from the neighbour's result of the same name.
Simulator and messages know results only. A schedule that splits backward in two adds two kinds of
action to RESULTS, and to the executor what carries them out.

    gpipe         all forwards, then all backwards (Huang et al. 2019)
    1f1b          as few forwards ahead as keep the later stages busy, then one backward after each
                  forward (Narayanan et al. 2019)
    interleaved   the same with several chunks a stage: the bubble is shorter by their number
                  (Narayanan et al. 2021)

With p stages, v chunks and m micro-batches, at equal times of all parts, gpipe and 1f1b idle
(p - 1) / (m + p - 1) of the time. So does interleaved with (p - 1) / v in place of p - 1, if p
divides m. Micro-batches that stage s has in flight: m (gpipe), min(p - s, m) (1f1b), at most
min(2 (p - s - 1) + (v - 1) p + 1, v m) of 1 / v the size (interleaved).
In all of them a part's backwards go through the micro-batches in order, so gradients add up to the
same bits.

The messages of a stage, and when it starts their receives, follow from the schedules of all stages
(`scheduled_actions`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

RESULTS: dict[str, tuple[str, ...]] = {
    "forward": ("output",),
    "backward": ("input gradient", "weight gradient"),
}
# in the order in which a part makes them
ALL_RESULTS = ("output", "input gradient", "weight gradient")
HANDED_ON = {"output": 1, "input gradient": -1}  # to the next part, to the part before
KINDS = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Action:
    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.chunk}"


class PartResult(NamedTuple):
    """A tensor, or several, that a part makes of a micro-batch."""

    name: str
    part: int
    micro_batch: int


Schedule = Sequence[Sequence[Action]]  # of every stage


def schedule(
    kind: str, stages: int, chunks: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each stage.

    Every kind is an order of the forwards, one of the backwards, and a number of forwards that come
    before the first backward.

    Stages take the micro-batches in groups of as many as there are stages, a group through chunk 0,
    then through chunk 1, ...: when the last stage ends a chunk, the first one begins the next. A
    last group that is not full is scheduled as if it were; then the micro-batches that do not exist
    are left out. They do not need each other, so the others lack nothing.
    """
    return _of_stages(kind, stages, chunks, micro_batches, range(stages))


def schedule_of_stage(
    kind: str, stages: int, chunks: int, micro_batches: int, stage: int
) -> tuple[Action, ...]:
    """Return what `schedule` has for one stage."""
    return _of_stages(kind, stages, chunks, micro_batches, [stage])[0]


def _of_stages(
    kind: str, stages: int, chunks: int, micro_batches: int, wanted: Sequence[int]
) -> tuple[tuple[Action, ...], ...]:
    assert kind in KINDS, f"no schedule {kind}: there are {', '.join(KINDS)}"
    assert min(stages, chunks, micro_batches) > 0, (stages, chunks, micro_batches)
    assert chunks == 1 or kind == "interleaved", f"{kind} has one chunk, not {chunks}"
    order = [
        (chunk, number)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(first, first + stages)
    ]
    forwards = [Action("forward", chunk, number) for chunk, number in order]
    backwards = [Action("backward", chunks - 1 - chunk, number) for chunk, number in order]
    full = (
        _alternating(
            forwards, backwards, _forwards_first(kind, stages, chunks, stage) or len(order)
        )
        for stage in wanted
    )
    return tuple(
        tuple(action for action in actions if action.micro_batch < micro_batches)
        for actions in full
    )


def forward_only(actions: Schedule) -> Schedule:
    """Return the forwards of a schedule, for evaluation."""
    return tuple(
        tuple(action for action in stage if RESULTS[action.kind] == ("output",))
        for stage in actions
    )


def needs(action: Action, stage: int, stages: int, chunks: int) -> PartResult | None:
    """Return the result of a neighbouring part that an action takes, None without a neighbour."""
    part = action.chunk * stages + stage
    for name in RESULTS[action.kind]:
        neighbour = part - HANDED_ON.get(name, 0)
        if neighbour != part and 0 <= neighbour < stages * chunks:
            return PartResult(name, neighbour, action.micro_batch)
    return None


def gives(action: Action, stage: int, stages: int, chunks: int) -> PartResult | None:
    """Return the result that an action hands on to a neighbouring part, None without one."""
    part = action.chunk * stages + stage
    for name in RESULTS[action.kind]:
        if name in HANDED_ON and 0 <= part + HANDED_ON[name] < stages * chunks:
            return PartResult(name, part, action.micro_batch)
    return None


def receiver(result: PartResult, stages: int) -> int:
    """Return the stage that a result is handed on to."""
    return (result.part + HANDED_ON[result.name]) % stages


def _forwards_first(kind: str, stages: int, chunks: int, stage: int) -> int | None:
    """Return the number of forwards before the first backward; None: all. One chunk: 1F1B's."""
    after = stages - 1 - stage
    if kind == "gpipe":
        return None
    return after + 1 if chunks == 1 else 2 * after + (chunks - 1) * stages + 1


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Return forwards ahead, then a backward and a forward in turn, then the other backwards."""
    pairs = zip(backwards, forwards[ahead:], strict=False)
    alternating = [action for pair in pairs for action in pair]
    return [*forwards[:ahead], *alternating, *backwards[len(forwards[ahead:]) :]]


# ---------------------------------------------------------------------------- a stage's messages
#
# Messages between two ranks arrive in the order in which they were started, so a stage starts its
# receives from another one in the order in which that one sends: the order of the actions there.
# Activations and gradients may come from the same stage, and may be needed in another order than
# they come; an early one waits in its buffer. A receive is started `ahead` actions before the one
# that needs it, together with all that come before it.
RECEIVED_AHEAD = 2  # actions: the next forward and the next backward


@dataclass(frozen=True)
class ScheduledAction:
    """An action with its messages: `posts` are the receives that are started before it.

    `last`: no later action of its chunk makes weight gradients.
    """

    action: Action
    posts: tuple[PartResult, ...]
    needs: PartResult | None
    gives: PartResult | None
    last: bool


def sent(actions: Schedule, chunks: int, source: int, target: int) -> Iterator[PartResult]:
    """Yield all results that one stage sends to another one, in order."""
    for action in actions[source]:
        result = gives(action, source, len(actions), chunks)
        if result is not None and receiver(result, len(actions)) == target:
            yield result


def scheduled_actions(
    actions: Schedule, chunks: int, stage: int, ahead: int
) -> tuple[ScheduledAction, ...]:
    """Return the actions of one stage with their messages.

    The only stage of a pipeline makes the input of its next chunk itself, and receives nothing.
    """
    stages = len(actions)
    needed = [needs(action, stage, stages, chunks) for action in actions[stage]]
    sources = {result.part % stages for result in needed if result is not None} - {stage}
    incoming = {source: sent(actions, chunks, source, stage) for source in sources}
    posted: set[PartResult] = set()

    def post_until(result: PartResult | None) -> Iterator[PartResult]:
        while result is not None and result.part % stages != stage and result not in posted:
            following = next(incoming[result.part % stages])
            posted.add(following)
            yield following

    posts = [tuple(post_until(result)) for result in [*needed, *[None] * ahead]]
    first_posts = tuple(result for results in posts[: ahead + 1] for result in results)
    last = {
        action.chunk: number
        for number, action in enumerate(actions[stage])
        if "weight gradient" in RESULTS[action.kind]
    }
    return tuple(
        ScheduledAction(
            action,
            posts[number + ahead] if number else first_posts,
            needed[number],
            gives(action, stage, stages, chunks),
            last=last.get(action.chunk) == number,
        )
        for number, action in enumerate(actions[stage])
    )


def most_arrived(of_stage: Sequence[ScheduledAction]) -> int:
    """Return the most messages that are in flight to a stage, or in use, at the same time.

    An activation is in use until its backward is done (if there is one), a gradient while its
    backward runs.
    """
    made = {result for scheduled in of_stage for result in RESULTS[scheduled.action.kind]}
    # the last result that is made from an activation
    last = max(made, key=ALL_RESULTS.index, default="output")
    inputs = {
        (scheduled.action.chunk, scheduled.action.micro_batch): scheduled.needs
        for scheduled in of_stage
        if "output" in RESULTS[scheduled.action.kind]
    }
    now = most = 0
    for scheduled in of_stage:
        now += len(scheduled.posts)
        most = max(most, now)
        if last in RESULTS[scheduled.action.kind]:
            now -= inputs[scheduled.action.chunk, scheduled.action.micro_batch] is not None
        if "input gradient" in RESULTS[scheduled.action.kind]:
            now -= scheduled.needs is not None
    return most
