"""The verdict on a wait, from the states of the ranks: who waits where, who has not come. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpczero.comm.status import Operation, RankState
from hpczero.text import shorten

# What another rank is doing, seen from one that waits.
HERE = "waiting in it"
STARTED = "has started it, but waits in nothing, so that it does not go on there"
DIFFERENT = "in a different operation"
ABSENT = "not come"
UNKNOWN = "no news of"
# what is wrong with a process
ENDED = "its process has ended"
STOPPED = "its process is stopped (by a signal or a debugger)"
_SHOWN = 8  # ranks told about one by one


@dataclass(frozen=True)
class Question:
    """The operation, or other call, in which `rank` waits, and the ranks that it waits with.

    If it waits for operation `number` of a group, `started` are those operations of the group that
    are remembered; it need not be among them.
    """

    waits_in: str
    rank: int
    ranks: Sequence[int]
    group: str = ""
    axis: str = ""
    number: int = 0
    started: Sequence[Operation] = ()
    missing: Collection[int] | None = None


def place(state: RankState) -> tuple[str, int, str]:
    """Return where a rank waits: ranks that wait in one operation, or call, are in one place."""
    return state.group, state.number, state.waits_in


def members(states: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Return identity of a group -> the ranks that are known to take part, in their order."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(states):
        for group in states[rank].started:
            found[group].append(rank)
    return found


def question_of(
    rank: int, states: Mapping[int, RankState], members: Mapping[str, Sequence[int]]
) -> Question:
    """Return whom a rank waits with, as the states tell: outside of groups with all others."""
    state = states[rank]
    if not state.group:
        return Question(state.waits_in, rank, sorted(states))
    ranks = members.get(state.group, [rank])
    started = state.started.get(state.group, [])
    return Question(state.waits_in, rank, ranks, state.group, state.axis, state.number, started)


def judge(question: Question, states: Mapping[int, RankState]) -> dict[int, str]:
    """Return HERE, STARTED, DIFFERENT, ABSENT or UNKNOWN for every other rank that takes part."""
    others = [rank for rank in question.ranks if rank != question.rank]
    return {rank: _judge(question, rank, states.get(rank)) for rank in others}


def _judge(question: Question, rank: int, state: RankState | None) -> str:
    if question.missing is not None:
        return ABSENT if rank in question.missing else HERE
    if state is None:
        return UNKNOWN
    if not question.group:
        return HERE if state.waited is not None and state.waits_in == question.waits_in else ABSENT
    started = state.started.get(question.group, [])
    if _parting(question.started, started):
        return DIFFERENT
    if not started or started[-1].number < question.number:
        return ABSENT
    return STARTED if state.waited is None else HERE


def _parting(
    ours: Sequence[Operation], theirs: Sequence[Operation]
) -> tuple[Operation, Operation] | None:
    """Return the first operation of the same number that differs, or that follows such a one."""
    by_number = {operation.number: operation for operation in theirs}
    for our in ours:
        their = by_number.get(our.number)
        if their and (our.code, our.history) != (their.code, their.history):
            return our, their
    return None


def suspects(
    question: Question,
    judged: Mapping[int, str],
    states: Mapping[int, RankState],
    gone: Collection[int],
) -> list[int]:
    """Return the ranks that the others wait for; none where that cannot be told.

    The first of these that there are: ranks that are `gone` (ended or stopped); ranks that started
    another operation than most; ranks that wait for nothing; ranks that wait elsewhere than most.
    """
    if gone:
        return sorted(gone)
    if DIFFERENT in judged.values():
        started = {rank: _started_instead(question, states.get(rank)) for rank in question.ranks}
        return _outvoted(started)
    asking = states.get(question.rank)
    waited = (asking.waited if asking else None) or 0.0
    busy = [
        rank for rank, state in states.items() if state.waited is None and state.idle > waited / 2
    ]
    late = [rank for rank in busy if judged.get(rank) in (ABSENT, STARTED)]
    if late or busy:
        return sorted(late or busy)
    own_place = {question.rank: question.waits_in}
    everywhere = {rank: state.waits_in for rank, state in states.items()} | own_place
    in_group = {rank: place for rank, place in everywhere.items() if rank in judged} | own_place
    all_known = len(in_group) == len(judged) + 1
    return (_outvoted(in_group) if all_known else []) or _outvoted(everywhere)


def _started_instead(question: Question, state: RankState | None) -> str:
    parting = _parting(question.started, state.started.get(question.group, [])) if state else None
    return f"{parting[1].number} {parting[1].label}" if parting else ""


def _outvoted(choices: Mapping[int, str]) -> list[int]:
    """Return the ranks that have not chosen what more than half of them have."""
    for choice in set(choices.values()):
        others = [rank for rank, theirs in choices.items() if theirs != choice]
        if 2 * len(others) < len(choices):
            return sorted(others)
    return []


def headline(judged: Mapping[int, str], seconds: float) -> str:
    kinds = set(judged.values())
    if DIFFERENT in kinds:
        return "not all ranks are in the same operation, or not with the same size"
    if ABSENT in kinds:
        return f"after {seconds:.1f} s a rank did not come"
    if UNKNOWN in kinds:
        return f"it has not ended after {seconds:.1f} s"
    return f"after {seconds:.1f} s all have come, but it does not end"


def cause(ranks: Sequence[int], hosts: Mapping[int, str]) -> list[str]:
    """Say who the suspects are; no line if there are none."""
    if not ranks:
        return []
    their_hosts = sorted({hosts[rank] for rank in ranks})[:_SHOWN]
    return [f"  most likely the cause: {_named(ranks)} on {', '.join(their_hosts)}"]


def account(
    question: Question,
    judged: Mapping[int, str],
    states: Mapping[int, RankState],
    hosts: Mapping[int, str],
    notes: Mapping[int, str],
) -> list[str]:
    """Say what the other ranks are doing. `notes`: what is known of their processes."""
    of_kind = {
        kind: [rank for rank, theirs in judged.items() if theirs == kind]
        for kind in (HERE, STARTED, DIFFERENT, ABSENT, UNKNOWN)
    }
    here = of_kind.pop(HERE)
    lines = [f"  {HERE}: {_named([question.rank, *here])}"]
    for kind, ranks in of_kind.items():
        for rank in ranks[:_SHOWN]:
            doing = _doing(question, states.get(rank), notes.get(rank))
            lines.append(f"  {kind}: rank {rank} on {hosts[rank]}{doing}")
        if len(ranks) > _SHOWN:
            lines.append(f"  {kind}: {len(ranks) - _SHOWN} more: {_named(ranks[_SHOWN:])}")
    noted = [rank for rank in notes if rank in here]
    lines += [f"  rank {rank} on {hosts[rank]}: {notes[rank]}" for rank in noted]
    return lines + _advice(question, judged, states)


def _advice(
    question: Question, judged: Mapping[int, str], states: Mapping[int, RankState]
) -> list[str]:
    """Advise where ranks wait for different things, and one of these is a layer's parameters."""
    apart = [rank for rank, kind in judged.items() if kind in (DIFFERENT, ABSENT)]
    others = [states[rank] for rank in apart if rank in states]
    places = [question.waits_in, *(state.waits_in for state in others if state.waited is not None)]
    gathers = [place for place in places if place.startswith("all_gather ")]
    if len(places) == 1 or all(place.startswith("all_gather of ") for place in gathers):
        return []
    return [
        "  parameters are gathered as layers run (zero.stage = 3): all ranks must run the same "
        "layers, in one order; at zero.stage = 2 they need not"
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
        words.append(f"waits since {state.waited:.1f} s in {state.waits_in}")
    started = state.started.get(question.group, [])
    if parting := _parting(question.started, started):
        words.append(_parted(question.axis, *parting))
    elif question.group:
        last = f"{started[-1].label} (number {started[-1].number})" if started else "nothing"
        words.append(f"started last along {question.axis}: {last}")
    return ": " + "; ".join(words)


def _parted(axis: str, our: Operation, their: Operation) -> str:
    number = f"number {our.number} along {axis}"
    if our.code == their.code:
        return f"an operation before {number} was not the same there and here"
    return f"{number} is {their.label} there, {our.label} here"


def _named(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 3", "ranks 0 2 4 6 … 98"."""
    shown = shorten([str(rank) for rank in sorted(ranks)], 2 * _SHOWN)
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(shown)}"
