"""The watchdog: a thread of every rank that ends the job, and says why, when a rank waits too long.

It calls no MPI. Ranks of one node read each other's slots (`status`) in a window that they share.
Where nothing has happened on a rank for unusually long, or for a few seconds after the run was
asked to stop, its node writes what its ranks are doing to
<folder>/node-<number>.json (`node_file`). So ranks of other nodes, when their time is up, know what
the rank that they miss is doing. Without a folder they know its name only.

When the time is up, one rank of the node reports: the operation, who is in it and who is not, and
the stacks of all threads of the rank that waits and of those missing that run on its node
(`stacks`). Where there is a folder, one node of the job prints its report, and all
nodes write theirs to <folder>/node-<number>.txt. Then the process ends with code 1, and the
launcher ends the others; those that it does not reach end themselves.

Nothing keeps the job from its end. An error of the watchdog itself ends it, too, with that error.
Files are written by a thread of their own, as a file server may not answer. A report has
`_REPORTING` seconds.
"""

import contextlib
import fcntl
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.comm import live, node_file, rank_process, stacks, verdict
from hpczero.comm.live import Live
from hpczero.comm.node_file import STOP, NodeFile
from hpczero.comm.stacks import Asked, Stacks
from hpczero.comm.status import RankState, Status, Wait, in_words, read
from hpczero.comm.verdict import ENDED, STOPPED, Question
from hpczero.errors import InputError
from hpczero.safe_files import make_own_folder, remove, write_new

_ASKED_FOR_STACKS = 4  # missing ranks
_QUIET = (20.0, 60.0)  # seconds after which a node says what its ranks are doing: least, most
_QUIET_AT_STOP = 5.0  # seconds after which it does where the run is asked to stop, and soon killed
_LONGER = 3  # times the longest that its ranks have done nothing before
_REPORTING = 6.0  # seconds that the rank that reports gets before the others of its node end, too
# Seconds that the launcher gets to pass on what was printed: MPICH's drops the rest when it ends
# the job.
PASSING_ON = 0.3


@dataclass(frozen=True)
class Member:
    rank: int
    host: str
    node: int


class Watch:
    def __init__(
        self,
        status: Status,
        member: Member,
        members: Sequence[Member],
        slots: Mapping[int, memoryview],
        seconds: float,
        folder: Path | None,
    ) -> None:
        """`slots`: of the ranks of this node, this rank's included."""
        self._status = status
        self._rank = member.rank
        self._node = member.node
        self._members = {other.rank: other for other in members}
        self._slots = slots
        self._seconds = seconds
        self._folder = folder
        self._published: set[int] = set()  # ranks that rested at the last look
        self._suspected: Wait | None = None
        self._done = threading.Event()
        self._looking = threading.Lock()  # held while files of the folder are written, unasked
        self._stacks = Stacks()
        status.identify(self._stacks.fileno())
        self._asked = Asked() if stacks.is_free(stacks.ASK) else None
        self._longest = 0.0  # seconds for which a rank has done nothing, and then something again
        self._rested: dict[int, float] = {}  # at the last look
        is_first = min(self._members) in slots
        self._live: Live | None = Live(status, member.rank, member.node, slots, is_first)
        if folder:
            self.use(folder)
        status.explain = self.explain
        self._period = min(1.0, seconds / 10)
        self._threads = [
            threading.Thread(target=self._run, args=[duty], name="hpczero-watch", daemon=True)
            for duty in (self._end_if_stuck, self._write_files)
        ]
        for thread in self._threads:
            thread.start()

    def use(self, folder: Path) -> None:
        """Write in this folder from now on, without what an earlier job has left there."""
        if self._rank == min(self._slots):
            for ending in ("json", "txt"):
                remove(node_file.path_of(folder, self._node, ending))
            remove(live.path_of(folder, self._node))
            if self._rank == min(self._members):
                remove(folder / "report")
        self._folder = folder

    def leave(self, folder: Path) -> None:
        """Write there no more, as it may be removed; a file server that hangs is not waited for."""
        if self._folder == folder:
            self._folder = None
            if self._looking.acquire(timeout=_REPORTING):
                self._looking.release()

    def stop(self) -> None:
        """Stop watching; to be called when all ranks have come to the end."""
        self._done.set()
        for thread in self._threads:
            thread.join(_REPORTING)
        self._status.explain = str
        self._stacks.close()
        if self._asked:
            self._asked.close()

    def explain(self) -> str:
        """Say what the other ranks are doing, for an error of the operation this rank is in."""
        wait = self._status.wait
        return self._try_to_explain(wait, self._states) if wait else ""

    def _run(self, duty: Callable[[], None]) -> None:
        """Do a duty again and again; an error ends the job, which would go on unwatched."""
        try:
            while not self._done.wait(self._period):
                duty()
        except BaseException:
            if self._done.is_set():
                return
            words = f"{self._speaker()}: the watchdog failed, and so the job ends"
            self._leave(
                lambda: print(f"{words}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            )

    def _end_if_stuck(self) -> None:
        wait = self._status.wait
        waited = time.monotonic() - wait.since if wait else 0.0
        if wait and (waited > self._seconds or (waited > self._period and self._is_hopeless(wait))):
            self._leave(lambda: self._report(wait))

    def _leave(self, report: Callable[[], object]) -> None:
        """End this process with code 1 after the report, whatever comes of that."""
        with contextlib.suppress(RuntimeError):  # no more threads are to be had
            threading.Thread(target=_leave_late, name="hpczero-end", daemon=True).start()
        try:
            report()
        except BaseException:
            traceback.print_exc()
        finally:
            time.sleep(PASSING_ON)
            os._exit(1)

    def _is_hopeless(self, wait: Wait) -> bool:
        """Return True if another rank is in a different operation or has ended.

        It must be seen twice, as slots are read while they are written.
        """
        states = self._states_on_node()
        judged = verdict.judge(self._question(wait, states), states)
        if verdict.DIFFERENT not in judged.values() and not self._ended(judged, states):
            return False
        suspected = self._suspected
        self._suspected = wait
        return suspected is wait

    # ------------------------------------------------------------------------ states of the ranks

    def _states_on_node(self, whole: bool = True) -> dict[int, RankState]:
        now = time.monotonic()
        return {rank: read(slot, now, whole) for rank, slot in self._slots.items()}

    def _states(self) -> dict[int, RankState]:
        """Return the states of this node's ranks, and those that other nodes have published."""
        states, folder = self._states_on_node(), self._folder
        if not folder:
            return states
        for node in {member.node for member in self._members.values()} - {self._node}:
            written = node_file.read(node_file.path_of(folder, node))
            # nothing has happened there since, or it would have been written again
            ago = max(0.0, time.time() - written.at)
            states |= {rank: state.older(ago) for rank, state in written.states.items()}
        return states

    def _write_files(self) -> None:
        with self._looking:
            if folder := self._folder:
                self._publish(folder)
                self._answer(folder)

    def _answer(self, folder: Path) -> None:
        try:
            if self._live:
                self._live.look(folder)
        except Exception:  # nobody's looking on may end a job
            self._live = None

    def _publish(self, folder: Path) -> None:
        """Write the node's file where more ranks than before have long done nothing, or if asked.

        One rank of them writes; a rank that waits is able to.
        """
        if self._asked and self._asked.again():
            self.record(f"rank {self._rank} was asked (SIGUSR1)")
        states = self._states_on_node(whole=False)
        for rank, state in states.items():
            before = self._rested.get(rank, 0.0)
            if state.resting < before:
                self._longest = max(self._longest, before)
            self._rested[rank] = state.resting
        least, most = _QUIET
        patience = min(self._seconds / 2, max(least, min(most, _LONGER * self._longest)))
        if patience > _QUIET_AT_STOP and self._is_to_end(states, folder):
            patience = _QUIET_AT_STOP
        resting = {rank for rank, state in states.items() if state.resting > patience}
        is_more = not resting <= self._published
        self._published = resting
        if not is_more:
            return
        writer = min(resting, key=lambda rank: (states[rank].waited is None, rank))
        if writer == self._rank:
            silent = [rank for rank in sorted(resting) if states[rank].waited is None]
            words = f"nothing new for {patience:.0f} s on {len(resting)} of {len(states)} ranks"
            self.record(words, silent)

    def _is_to_end(self, states: Mapping[int, RankState], folder: Path) -> bool:
        """Return True if the run was asked to stop, by a signal or a file, and a rank rests."""
        if all(state.resting <= _QUIET_AT_STOP for state in states.values()):
            return False
        return self._status.is_to_end or (folder.parent / STOP).exists()

    def record_failure(self, words: str) -> None:
        """Record that this rank fails; a file server that does not answer is not waited for."""
        writing = threading.Thread(target=self._record_quietly, args=[words], daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads are to be had
            writing.start()
            writing.join(_REPORTING)

    def _record_quietly(self, words: str) -> None:
        with contextlib.suppress(Exception):
            self.record(f"rank {self._rank} failed: {words}", [])

    def record(self, reason: str, of_ranks: Sequence[int] | None = None) -> None:
        """Write what the node's ranks are doing, with the stacks of some (None: all) of them."""
        folder = self._folder
        if folder is None:
            return
        states = self._states_on_node()
        asked = sorted(states) if of_ranks is None else of_ranks[:_ASKED_FOR_STACKS]
        stacks_of_ranks = self._stacks_of(asked, states)
        notes = rank_process.notes(states)
        file = NodeFile(time.time(), reason, states, stacks_of_ranks, notes)
        node_file.write(node_file.path_of(folder, self._node), file, self._rank)

    # -------------------------------------------------------------------------------- the report

    def _report(self, wait: Wait) -> None:
        states = self._states_on_node()
        self._status.last_words()
        if not self._may_report(states):
            time.sleep(_REPORTING)
            return
        words = f"{self._speaker()}: {self._try_to_explain(wait, self._states)}"
        if self._is_first_node():
            print(words, file=sys.stderr, flush=True)
        if folder := self._folder:
            path = node_file.path_of(folder, self._node, "txt")
            node_file.write_whole(path, words, self._rank)
            waits_in = self._status.in_words(wait.point)
            self.record(f"the watchdog ended the job: rank {self._rank} waited in {waits_in}")

    def _speaker(self) -> str:
        return f"hpczero: rank {self._rank} on {self._members[self._rank].host}"

    def _may_report(self, states: Mapping[int, RankState]) -> bool:
        """Return True for the first of the node's ranks to lock a file of the lowest rank's.

        Where that file cannot be reached, every rank reports.
        """
        try:
            # Stays open, and so locked, until the end.
            self._claim = open(stacks.file_of(states[min(self._slots)]), "rb")  # noqa: SIM115
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _is_first_node(self) -> bool:
        folder = self._folder
        if not folder:
            return True
        try:
            make_own_folder(folder)
            write_new(folder / "report", "")
        except FileExistsError:
            return False
        except (OSError, InputError):
            return True
        return True

    def _try_to_explain(self, wait: Wait, states: Callable[[], Mapping[int, RankState]]) -> str:
        """Say who does not come; where that fails, at least what this rank waits for."""
        try:
            return self._explain(wait, states())
        except Exception:
            waited = f"has waited for {time.monotonic() - wait.since:.1f} s"
            failed = f"for whom cannot be told, as the watchdog failed:\n{traceback.format_exc()}"
            return f"{self._status.in_words(wait.point)}: {waited}; {failed}"

    def _explain(self, wait: Wait, states: Mapping[int, RankState]) -> str:
        question = self._question(wait, states)
        judged = verdict.judge(question, states)
        here = {rank: states[rank] for rank in self._slots if rank in states}
        processes = rank_process.notes(here)
        gone = [rank for rank, note in processes.items() if note in (ENDED, STOPPED)]
        suspects = verdict.suspects(question, judged, states, gone)
        notes = {rank: processes[rank] for rank in judged if rank in processes}
        hosts = {rank: member.host for rank, member in self._members.items()}
        lines = [f"{question.waits_in}: {verdict.headline(judged, time.monotonic() - wait.since)}"]
        lines += verdict.cause(suspects, hosts)
        lines += verdict.account(question, judged, states, hosts, notes)
        missing = (verdict.ABSENT, verdict.DIFFERENT, verdict.STARTED)
        wrong = dict.fromkeys([*suspects, *(rank for rank in judged if judged[rank] in missing)])
        asked = [rank for rank in wrong if rank in self._slots][:_ASKED_FOR_STACKS]
        texts = self._stacks_of(dict.fromkeys([self._rank, *asked]), states)
        for rank, text in (texts | self._stacks_elsewhere(wrong)).items():
            lines += [f"stacks of rank {rank} on {hosts[rank]}:", text.rstrip()]
        return "\n".join(lines)

    def _stacks_of(self, ranks: Iterable[int], states: Mapping[int, RankState]) -> dict[int, str]:
        asked = [rank for rank in ranks if rank in self._slots]
        written = stacks.ask([states[rank] for rank in asked])
        return {rank: text for rank, text in zip(asked, written, strict=True) if text}

    def _stacks_elsewhere(self, ranks: Collection[int]) -> dict[int, str]:
        folder = self._folder
        if not folder:
            return {}
        texts: dict[int, str] = {}
        for node in {self._members[rank].node for rank in ranks} - {self._node}:
            published = node_file.read(node_file.path_of(folder, node)).stacks
            texts |= {rank: text for rank, text in published.items() if rank in ranks}
        return texts

    def _ended(self, judged: Mapping[int, str], states: Mapping[int, RankState]) -> list[int]:
        """Return the ranks of this node that have not come and never will."""
        here = [rank for rank in judged if rank in self._slots and judged[rank] == verdict.ABSENT]
        return [rank for rank in here if rank_process.trouble(states[rank]) == ENDED]

    def _question(self, wait: Wait, states: Mapping[int, RankState]) -> Question:
        point = wait.point
        label = point.label.decode(errors="replace")
        missing = None if wait.missing is None else set(wait.missing())
        if point.entry < 0:
            return Question(label, self._rank, point.ranks, missing=missing)
        axis, group = self._status.group_at(point.entry)
        started = states[self._rank].started.get(group, [])
        words = in_words(label, axis, point.number)
        ranks = self._status.ranks_of[point.entry]
        return Question(words, self._rank, ranks, group, axis, point.number, started, missing)


def _leave_late() -> None:
    time.sleep(_REPORTING)
    os._exit(1)
