"""The ranks of a job: what each does, and for whom it waits, from all their states (pure)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpczero.comm import verdict
from hpczero.comm.node_file import NodeFile
from hpczero.comm.status import RankState
from hpczero.comm.verdict import Question
from hpczero.runs.record import UNKNOWN_HOST
from hpczero.text import consecutive_runs, format_age, format_span, printable, shorten

COMPUTING, WAITING, STARTING, SILENT = "computing", "waiting", "starting", "silent"
STOPPED, ENDED, BLOCKED = "stopped", "ended", "waiting for a disk or a file server"
_PARTS = {"data": "loading data", "save": "saving", "evaluation": "evaluating"}
_GONE = {verdict.ENDED: ENDED, verdict.STOPPED: STOPPED}
# what ranks do that hold up others, or need somebody's look, comes first
_ODD = (ENDED, STOPPED, SILENT, BLOCKED)
SILENT_AFTER = 20.0  # seconds without a word of its node: of many ranks they come less often
_MOST_RANGES = 8
_WORTH_SAYING = 1.0  # seconds of a wait


@dataclass(frozen=True)
class RankNow:
    """`seconds`: in this wait, else since it last did something that is recorded."""

    rank: int
    host: str
    state: str
    step: int | None = None
    waits_in: str = ""
    axis: str = ""
    waits_for: tuple[int, ...] = ()
    seconds: float | None = None
    resident: int | None = None  # bytes


@dataclass(frozen=True)
class Fold:
    """Ranks that do the same; `seconds`: the longest of their waits."""

    ranks: Sequence[int]
    state: str
    operation: str
    axis: str
    waits_for: Sequence[int]
    seconds: float
    host: str  # of one rank alone

    @property
    def who(self) -> str:
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranges(self.ranks)}"

    @property
    def words(self) -> str:
        words = self.state
        if self.waits_for:
            plural = "s" if len(self.waits_for) > 1 else ""
            others = f"for rank{plural} {ranges(self.waits_for)}"
            words += f" {others}" if self.state == WAITING else f", waiting {others}"
        if self.operation:
            words += f" in {self.operation}" + (f" along {self.axis}" if self.axis else "")
        if self.state == SILENT or (self.operation and self.seconds >= _WORTH_SAYING):
            words += f" for {format_age(self.seconds)}"
        return words


def ranges(ranks: Sequence[int]) -> str:
    """Return "0-2, 4, 6-999", shortened where there are many."""
    runs = [format_span(run[0], run[-1]) for run in consecutive_runs(sorted(ranks))]
    return ", ".join(shorten(runs, _MOST_RANGES))


def ranks_now(
    files: Sequence[NodeFile], hosts: Mapping[int, str], now: float, silent_after: float
) -> list[RankNow]:
    """Return what each rank does, as its node's file says; of `hosts` each rank is listed."""
    ages = {rank: max(0.0, now - file.at) for file in files for rank in file.states}
    states = {
        rank: state.older(ages[rank]) for file in files for rank, state in file.states.items()
    }
    notes = {rank: note for file in files for rank, note in file.notes.items()}
    sizes = {rank: size for file in files for rank, size in file.resident.items()}
    waits_for = _waits_for(states)
    listed = []
    for rank in sorted({*states, *hosts}) if states else ():
        host = hosts.get(rank, UNKNOWN_HOST)
        state = states.get(rank)
        if state is None or ages[rank] > silent_after:
            listed.append(RankNow(rank, host, SILENT, seconds=ages.get(rank)))
            continue
        one = RankNow(
            rank,
            host,
            state=_what(state, notes.get(rank, "")),
            step=state.step if state.step >= 0 else None,
            seconds=max(0.0, state.resting),
            resident=sizes.get(rank),
        )
        if state.waited is not None and one.state not in (STOPPED, ENDED):
            one = replace(
                one,
                waits_in=printable(state.waits_in),
                axis=printable(state.axis, 40),
                waits_for=tuple(waits_for[rank]),
            )
        listed.append(one)
    return listed


def _what(state: RankState, note: str) -> str:
    if note in _GONE:
        return _GONE[note]
    if state.doing in _PARTS:
        return _PARTS[state.doing]
    if state.step < 0:
        return STARTING
    if state.waited is not None:
        return WAITING
    return BLOCKED if note else COMPUTING


def _waits_for(states: Mapping[int, RankState]) -> dict[int, list[int]]:
    """Return for each rank that waits those that have not come to where it waits."""
    members = verdict.members(states)
    known: dict[tuple[str, int, str], list[int]] = {}
    found = {}
    for rank, state in states.items():
        place = verdict.place(state)
        if place not in known:
            known[place] = _missing(verdict.question_of(rank, states, members), states)
        found[rank] = [other for other in known[place] if other != rank]
    return found


def _missing(question: Question, states: Mapping[int, RankState]) -> list[int]:
    """Return whom a rank waits for; nobody where it is not known who takes part."""
    if states[question.rank].waited is None or not question.group:
        return []
    judged = verdict.judge(question, states)
    for kinds in ((verdict.ABSENT, verdict.DIFFERENT), (verdict.STARTED,)):
        if missing := sorted(other for other, kind in judged.items() if kind in kinds):
            return missing
    return []


def folds(ranks: Sequence[RankNow]) -> list[Fold]:
    """Return the ranks by what they do: what is odd first, then what few of them do."""
    alike: dict[tuple[str, str, str], list[RankNow]] = defaultdict(list)
    for one in ranks:
        operation = one.waits_in.split(" ")[0] if one.axis else one.waits_in
        alike[one.state, operation, one.axis].append(one)
    found = []
    for (state, operation, axis), same in alike.items():
        numbers = [one.rank for one in same]
        missing = {other for one in same for other in one.waits_for}
        missing = missing.difference(numbers) or missing  # of several groups
        seconds = max((one.seconds or 0.0 for one in same), default=0.0)
        host = same[0].host if len(same) == 1 else ""
        found.append(Fold(numbers, state, operation, axis, sorted(missing), seconds, host))
    return sorted(found, key=lambda fold: (fold.state not in _ODD, len(fold.ranks), fold.ranks[0]))
