"""From what the ranks are doing to words: who waits where, who has not come. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpczero.comm.status import Operation, RankState

HERE, STARTED = (
    "waiting in it",
    "has started it, but waits in nothing, so that it does not go on there",
)
DIFFERENT, ABSENT, UNKNOWN = "in a different operation", "not come", "no news of"
_SHOWN = 8  # ranks told about one by one


@dataclass(frozen=True)
class Question:
    """The thing that a rank waits for, and the ranks with which it does.

    If that is operation `number` of a group, `started` are those of the group that are remembered; it
    need not be among them.
    """

    place: str
    rank: int
    ranks: Sequence[int]
    group: str = ""
    axis: str = ""
    number: int = 0
    started: Sequence[Operation] = ()
    missing: Collection[int] | None = None


def judge(question: Question, states: Mapping[int, RankState]) -> dict[int, str]:
    """Of every other rank that takes part: HERE, STARTED, DIFFERENT, ABSENT or UNKNOWN."""
    return {
        rank: _judge(question, rank, states.get(rank))
        for rank in question.ranks
        if rank != question.rank
    }


def _judge(question: Question, rank: int, state: RankState | None) -> str:
    if question.missing is not None:
        return ABSENT if rank in question.missing else HERE
    if state is None:
        return UNKNOWN
    if not question.group:
        return HERE if state.waited is not None and state.place == question.place else ABSENT
    started = state.started.get(question.group, [])
    if _parting(question.started, started):
        return DIFFERENT
    if not started or started[-1].number < question.number:
        return ABSENT
    return STARTED if state.waited is None else HERE


def _parting(
    ours: Sequence[Operation], theirs: Sequence[Operation]
) -> tuple[Operation, Operation] | None:
    """The first operation of the same number that is not the same, or that follows such a one."""
    by_number = {operation.number: operation for operation in theirs}
    common = [operation for operation in ours if operation.number in by_number]
    pairs = [(operation, by_number[operation.number]) for operation in common]
    return next(((our, their) for our, their in pairs if not _agree(our, their)), None)


def _agree(our: Operation, their: Operation) -> bool:
    return (our.code, our.history) == (their.code, their.history)


def suspects(
    question: Question,
    judged: Mapping[int, str],
    states: Mapping[int, RankState],
    gone: Collection[int],
) -> list[int]:
    """The ranks that the others wait for, in the order of what speaks against them: those `gone`
    (ended or stopped); one that started another operation than most; ranks that wait for nothing;
    ranks that wait elsewhere than most. Empty where that cannot be told, as of two ranks.
    """
    if gone:
        return sorted(gone)
    if DIFFERENT in judged.values():
        return _outvoted(
            {rank: _started_instead(question, states.get(rank)) for rank in question.ranks}
        )
    since = states[question.rank].waited or 0.0 if question.rank in states else 0.0
    busy = [
        rank for rank, state in states.items() if state.waited is None and state.idle > since / 2
    ]
    late = [rank for rank in busy if judged.get(rank) in (ABSENT, STARTED)]
    if late or busy:
        return sorted(late or busy)
    places = {question.rank: question.place}
    everywhere = {rank: state.place for rank, state in states.items()} | places
    here = {rank: place for rank, place in everywhere.items() if rank in judged} | places
    return (_outvoted(here) if len(here) == len(judged) + 1 else []) or _outvoted(everywhere)


def _started_instead(question: Question, state: RankState | None) -> str:
    parting = _parting(question.started, state.started.get(question.group, [])) if state else None
    return f"{parting[1].number} {parting[1].label}" if parting else ""


def _outvoted(choices: Mapping[int, str]) -> list[int]:
    """The ranks that have not chosen what more than half of them have."""
    for choice in set(choices.values()):
        others = [rank for rank, theirs in choices.items() if theirs != choice]
        if 2 * len(others) < len(choices):
            return sorted(others)
    return []


def headline(judged: Mapping[int, str], seconds: float) -> str:
    kinds = set(judged.values())
    if DIFFERENT in kinds:
        return "not all ranks are in the same operation, or not with the same size"
    missing = "a rank did not come" if ABSENT in kinds else "all have come, but it does not end"
    return (
        f"after {seconds:.1f} s {missing}"
        if ABSENT in kinds or UNKNOWN not in kinds
        else f"it has not ended after {seconds:.1f} s"
    )


def cause(ranks: Sequence[int], hosts: Mapping[int, str]) -> list[str]:
    """The suspects in words."""
    if not ranks:
        return []
    on = sorted({hosts[rank] for rank in ranks})
    return [f"  most likely the cause: {_named(ranks)} on {', '.join(on[:_SHOWN])}"]


def account(
    question: Question,
    judged: Mapping[int, str],
    states: Mapping[int, RankState],
    hosts: Mapping[int, str],
    notes: Mapping[int, str],
) -> list[str]:
    """The other ranks, by what they are doing. `notes`: what is known of their processes."""
    here = [question.rank, *(rank for rank, kind in judged.items() if kind == HERE)]
    lines = [f"  {HERE}: {_named(here)}"]
    for kind in (STARTED, DIFFERENT, ABSENT, UNKNOWN):
        ranks = [rank for rank, found in judged.items() if found == kind]
        lines += [
            f"  {kind}: rank {rank} on {hosts[rank]}{_doing(question, states.get(rank), notes.get(rank))}"
            for rank in ranks[:_SHOWN]
        ]
        if len(ranks) > _SHOWN:
            lines.append(f"  {kind}: {len(ranks) - _SHOWN} more: {_named(ranks[_SHOWN:])}")
    lines += [
        f"  rank {rank} on {hosts[rank]}: {note}"
        for rank, note in notes.items()
        if judged.get(rank) == HERE
    ]
    return lines + _advice(question, judged, states)


def _advice(
    question: Question, judged: Mapping[int, str], states: Mapping[int, RankState]
) -> list[str]:
    """Where ranks wait for different things, and one of these is a layer's parameters."""
    others = [
        states[rank]
        for rank, kind in judged.items()
        if kind in (DIFFERENT, ABSENT) and rank in states
    ]
    places = [question.place, *(state.place for state in others if state.waited is not None)]
    if len(places) == 1 or not any(
        place.startswith("all_gather ") and not place.startswith("all_gather of ")
        for place in places
    ):
        return []
    gathered = "parameters are gathered as layers run (zero.stage = 3)"
    return [
        f"  {gathered}: all ranks must run the same layers, in one order; at zero.stage = 2 they need not"
    ]


def _doing(question: Question, state: RankState | None, note: str | None) -> str:
    if state is None:
        return ": nothing is known of what it does"
    words = [f"step {state.step}"] if state.step >= 0 else []
    if note:
        words.append(note)
    elif state.waited is None:
        words.append(f"in no operation for {state.idle:.1f} s")
    else:
        words.append(f"waits since {state.waited:.1f} s in {state.place}")
    started = state.started.get(question.group, [])
    if parting := _parting(question.started, started):
        words.append(_parted(question.axis, *parting))
    elif question.group:
        last = f"{started[-1].label} (number {started[-1].number})" if started else "nothing"
        words.append(f"started last along {question.axis}: {last}")
    return ": " + "; ".join(words)


def _parted(axis: str, our: Operation, their: Operation) -> str:
    if our.code == their.code:
        return (
            f"an operation before number {our.number} along {axis} was not the same there and here"
        )
    return f"number {our.number} along {axis} is {their.label} there, {our.label} here"


def _named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0 2 4 6 … 98" """
    shown = [str(rank) for rank in sorted(ranks)]
    if len(shown) > 2 * _SHOWN:
        shown = [*shown[: 2 * _SHOWN - 2], "…", shown[-1]]
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(shown)}"
