"""What a pipeline stage sends and receives, and when it asks for it (pure): derived from the schedules of all stages.

Messages between two ranks arrive in the order in which they were started, so a stage starts its receives from another one in the order in which
that one sends: the order of the actions there. Activations and gradients may come from the same stage, and may be needed in another order
than they come; what comes early waits in its buffer. A receive is started `ahead` actions before the one that needs it, together with
all that come before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpczero.parallel.pipeline.schedule import ALL_RESULTS, RESULTS, Action, Result, Schedule, gives, needs, receiver

AHEAD = 2  # actions: the next forward and the next backward


@dataclass(frozen=True)
class Step:
    """An action with what belongs to it: the receives that are started before it, what it takes, what it hands on; `last`: the last one of
    its chunk that makes weight gradients.
    """

    action: Action
    posts: tuple[Result, ...]
    needs: Result | None
    gives: Result | None
    last: bool


def sent(actions: Schedule, chunks: int, source: int, target: int) -> Iterator[Result]:
    """All that one stage sends to another one, in order."""
    for action in actions[source]:
        result = gives(action, source, len(actions), chunks)
        if result is not None and receiver(result, len(actions)) == target:
            yield result


def steps(actions: Schedule, chunks: int, stage: int, ahead: int) -> tuple[Step, ...]:
    """Of one stage. What a stage makes for itself (its own next chunk, where it is the only one) is not received."""
    stages, own = len(actions), actions[stage]
    needed = [needs(action, stage, stages, chunks) for action in own]
    sources = {result.part % stages for result in needed if result is not None} - {stage}
    coming = {source: sent(actions, chunks, source, stage) for source in sources}
    posted: set[Result] = set()

    def post_until(result: Result | None) -> Iterator[Result]:
        while result is not None and result.part % stages != stage and result not in posted:
            following = next(coming[result.part % stages])
            posted.add(following)
            yield following

    posts = [tuple(post_until(result)) for result in [*needed, *[None] * ahead]]
    first = tuple(result for together in posts[: ahead + 1] for result in together)
    last = {action.chunk: number for number, action in enumerate(own) if "weight gradient" in RESULTS[action.kind]}
    return tuple(
        Step(
            action,
            posts[number + ahead] if number else first,
            needed[number],
            gives(action, stage, stages, chunks),
            last=last.get(action.chunk) == number,
        )
        for number, action in enumerate(own)
    )


def most_arrived(of_stage: Sequence[Step]) -> int:
    """Messages that are on their way to the stage, or have arrived and are in use, at the same time: an activation until its backward is done (if
    there is one), a gradient while its backward runs.
    """
    made = {result for step in of_stage for result in RESULTS[step.action.kind]}
    last = max(made, key=ALL_RESULTS.index, default="output")  # that is made from an activation
    inputs = {(step.action.chunk, step.action.micro_batch): step.needs for step in of_stage if "output" in RESULTS[step.action.kind]}
    now = most = 0
    for step in of_stage:
        now += len(step.posts)
        most = max(most, now)
        done = [inputs[step.action.chunk, step.action.micro_batch]] if last in RESULTS[step.action.kind] else []
        if "input gradient" in RESULTS[step.action.kind]:
            done.append(step.needs)
        now -= sum(result is not None for result in done)
    return most
