"""`hpczero blame`: which rank a run waits for, or waited for, and in what; from its files alone."""

import json
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpczero.comm import node_file, verdict
from hpczero.comm.node_file import NodeFile
from hpczero.comm.status import RankState
from hpczero.comm.verdict import Question
from hpczero.commands.jobs import run_named
from hpczero.runs import rank_times
from hpczero.runs.record import Run, read_run
from hpczero.runs.stragglers import LATEST_OF_ALL, Straggler, stragglers
from hpczero.text import first_few, format_duration, join_words, printable

_SLACK = 2.0  # seconds between clocks of nodes
_MOST_STACKS = 4


@dataclass(frozen=True)
class Finding:
    """The rank or ranks that the others wait for, and the words that say it."""

    ranks: Sequence[int]
    words: str
    details: Sequence[str] = ()
    stacks: Mapping[int, str] = field(default_factory=dict)
    at: float = 0.0  # when the ranks' states were written


def blame(options: Namespace) -> int:
    run = read_run(run_named(options.run))
    files = states_of(run)
    finding = find(run, files) if files else None
    slow = stragglers(run, rank_times.read(run.path, LATEST_OF_ALL))
    if options.json:
        print(json.dumps(_as_data(finding, slow), indent=2))
        return 0
    if finding:
        ago = format_duration(max(0.0, time.time() - finding.at))
        since = "; the run has gone on since" if _went_on(run, finding) else ""
        print(f"{finding.words}\nAs the ranks' own record says, written {ago} ago{since}.")
        for line in finding.details:
            print(line)
        for rank, stack in list(finding.stacks.items())[:_MOST_STACKS]:
            print(f"\nstacks of rank {rank}:")
            print("\n".join(printable(line) for line in _of_main_thread(stack).splitlines()))
    for one in slow:
        print(one.words)
    if not finding and not slow:
        print(
            "no rank is behind: none has recorded that the ranks did nothing for long, and none is "
            "slower than the others. kill -USR1 PID of any rank records what they do now"
        )
    return 0


def _went_on(run: Run, finding: Finding) -> bool:
    """Return True if the run has left a sign of life since the ranks' states were written."""
    return bool(run.jobs) and run.jobs[-1].ended > finding.at + _SLACK


def _of_main_thread(stack: str) -> str:
    """Return the part of the thread that trains; all where none is marked as it."""
    threads = [part.strip() for part in stack.split("\n\n")]
    return next((part for part in threads if part.startswith("Current thread")), stack.rstrip())


def states_of(run: Run) -> list[NodeFile]:
    """Return what the nodes of the newest job have written."""
    began = run.jobs[-1].began if run.jobs else 0.0
    try:
        paths = sorted((run.path / node_file.FOLDER).glob("node-*.json"))
    except OSError:
        return []
    files = [node_file.read(path) for path in paths]
    return [file for file in files if file.states and file.at >= began - _SLACK]


def find(run: Run, files: Sequence[NodeFile]) -> Finding:
    """Say who is behind; each state is brought to the time of the newest file."""
    newest = max(file.at for file in files)
    states = {
        rank: state.older(max(0.0, newest - file.at))
        for file in files
        for rank, state in file.states.items()
    }
    stacks = {rank: text for file in files for rank, text in file.stacks.items()}
    notes = {rank: text for file in files for rank, text in file.notes.items()}
    reasons = list(dict.fromkeys(printable(file.reason) for file in files if file.reason))
    because = f" ({join_words(reasons)})" if reasons else ""
    missing = _missing(run, states)
    hosts = {rank: run.host_of(rank) for rank in [*states, *missing]}
    waiting = [rank for rank, state in states.items() if state.waited is not None]
    if not waiting:
        busy = ", ".join(_at(rank, states[rank]) for rank in sorted(states)[:8])
        words = f"No rank waits for another one: {busy}.{because}"
        return Finding([], words, (), stacks, newest)
    members = verdict.members(states)
    questions = [
        verdict.question_of(rank, states, members) for rank in _one_of_each_place(states, waiting)
    ]
    question = max(questions, key=lambda question: _weight(question, states))
    judged = verdict.judge(question, states)
    gone = [rank for rank in question.ranks if notes.get(rank) in (verdict.ENDED, verdict.STOPPED)]
    if missing and len(waiting) == len(states) and verdict.DIFFERENT not in judged.values():
        gone = gone or missing  # all of whom something is known wait for another one
    behind = verdict.suspects(question, judged, states, gone)
    details = verdict.account(question, judged, states, hosts, notes)
    told = [_behind(rank, states.get(rank), hosts[rank], notes.get(rank)) for rank in behind[:8]]
    words = _paragraph(question, behind, told, states) + because
    chosen = {rank: stacks[rank] for rank in [*behind, question.rank] if rank in stacks}
    return Finding(behind, words, [printable(line) for line in details], chosen, newest)


def _one_of_each_place(states: Mapping[int, RankState], waiting: Sequence[int]) -> Iterable[int]:
    """Return the rank that has waited longest in each place: of a thousand, all ask the same."""
    longest: dict[tuple[str, int, str], int] = {}
    for rank in waiting:
        place = verdict.place(states[rank])
        known = states[longest.setdefault(place, rank)]
        if (states[rank].waited or 0.0) > (known.waited or 0.0):
            longest[place] = rank
    return longest.values()


def _weight(question: Question, states: Mapping[int, RankState]) -> tuple[bool, float]:
    """Order the waits by how much they tell: one in which another rank differs, then the longest.

    Ranks that wait for such a one in turn have waited for less long.
    """
    judged = verdict.judge(question, states)
    return verdict.DIFFERENT in judged.values(), states[question.rank].waited or 0.0


def _missing(run: Run, states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks of the job of which no node has written anything."""
    ranks = range(len(run.jobs[-1].ranks)) if run.jobs else range(0)
    return [rank for rank in ranks if rank not in states]


def _at(rank: int, state: RankState) -> str:
    step = f"step {state.step}, " if state.step >= 0 else ""
    return f"rank {rank} ({step}in no operation for {state.idle:.0f} s)"


def _paragraph(
    question: Question,
    behind: Sequence[int],
    told: Sequence[str],
    states: Mapping[int, RankState],
) -> str:
    waited = states[question.rank].waited or 0.0
    others = [rank for rank in question.ranks if rank not in behind] or [question.rank]
    who = f"rank{'s' if len(others) > 1 else ''} {first_few(list(map(str, others)))}"
    waits = f"{who} waited for {waited:.0f} s in {printable(question.waits_in)}"
    if not behind:
        return f"Nobody is behind, as far as is known: {waits}."
    return f"{' '.join(told)} For {'it' if len(behind) == 1 else 'them'} {waits}."


def _behind(rank: int, state: RankState | None, host: str, note: str | None) -> str:
    words = f"Rank {rank} on {host} is behind"
    if state is None:
        return f"{words}, or has ended: its node has recorded nothing of it."
    step = f" in step {state.step}" if state.step >= 0 else ""
    if note:
        return f"{words}{step}: {printable(note)}."
    if state.waited is None:
        return f"{words}{step}: it has been in no operation for {state.idle:.0f} s."
    where = printable(state.waits_in)
    return f"{words}{step}: it waits elsewhere, for {state.waited:.0f} s, in {where}."


def _as_data(finding: Finding | None, slow: Sequence[Straggler]) -> dict[str, Any]:
    stuck = None
    if finding:
        stuck = {
            "ranks": list(finding.ranks),
            "words": finding.words,
            "details": list(finding.details),
            "at": finding.at,
            "stacks": dict(finding.stacks),
        }
    return {"stuck": stuck, "slow": [asdict(one) for one in slow]}
