"""A bound of a pipeline's course in closed form (pure).

It is the longest of some chains of actions that wait for each other: no course is shorter, and few
are longer to speak of.
"""

import numpy as np
from numpy.typing import NDArray

from hpczero.planner.timetable import Course, Durations, course_of


def shortest_course(
    kind: str, stages: int, chunks: int, micro_batches: int, durations: Durations
) -> Course:
    """Return a course that ends no later than the real one, on any stage.

    Work reaches a stage through the stages before it, and leaves through them.
    """
    if stages == 1:
        return course_of(kind, stages, chunks, micro_batches, durations)
    forward, backward = (
        np.array(seconds).reshape(chunks, stages)
        for seconds in (durations.forward, durations.backward)
    )
    transfers = np.array([*durations.transfers, 0.0]).reshape(chunks, stages)
    if kind == "gpipe":
        busy = _all_forwards_first(forward[0], backward[0], transfers[0], micro_batches)
    elif chunks == 1:
        busy = _in_turn(forward[0], backward[0], transfers[0], micro_batches)
    else:
        busy = _by_chunks(forward, backward, transfers, micro_batches)
    enter, leave = (_before(seconds[0] + transfers[0]) for seconds in (forward, backward))
    # the work of a stage leaves through those before it, so none of them ends earlier
    ends = np.maximum.accumulate((enter + busy + leave)[::-1])[::-1] - leave
    return Course(enter.tolist(), ends.tolist())


_Seconds = NDArray[np.float64]


def _before(seconds: _Seconds) -> _Seconds:
    """Return the sums of the stages before each one."""
    return np.concatenate([[0.0], np.cumsum(seconds[:-1])])


def _all_forwards_first(
    forward: _Seconds, backward: _Seconds, transfers: _Seconds, count: int
) -> _Seconds:
    """Return the seconds from a stage's first action to its last one: the slowest holds up all."""
    enter, leave = _before(forward + transfers), _before(backward + transfers)
    onward = enter[-1] - enter + forward[-1] - forward
    turn = float(np.max(enter + count * forward + onward))
    behind = leave[-1] - leave + backward[-1] - backward
    return turn - enter + behind + count * backward


def _in_turn(forward: _Seconds, backward: _Seconds, transfers: _Seconds, count: int) -> _Seconds:
    """Return the seconds of forwards and backwards in turn, those of each stage.

    A micro-batch that goes on from stage a to e and comes back waits for messages on its way; e - a
    + 1 micro-batches are on it together. The first that finds a backward to wait for at e has as
    many before it as there are stages after e. So many rounds, and the own work of e on the rest,
    are a chain. To the last stage and back, a round for the first micro-batch, others for as many
    or none, and one for the last, with the own work of a on the rest, are a chain, too.
    """
    stages = len(forward)
    both = forward + backward
    first, last = np.arange(stages)[:, None], np.arange(stages)[None, :]
    together = np.maximum(last - first + 1, 1)
    before = stages - 1 - last
    rounds = np.maximum(0, count - 1 - before) // together
    reached = np.cumsum(both)
    messages = 2 * _before(transfers)
    round_trip = (reached + messages)[None, :] - (reached - both + messages)[:, None]
    chains = rounds * round_trip + (count - rounds * together) * both[None, :]
    chains += np.where(rounds > 0, before * (forward[:, None] - forward[None, :]), 0.0)
    of_last = np.where(last >= first, chains, 0.0).max(axis=0)
    there, ahead, most = round_trip[:, -1], together[:, -1], rounds[:, -1]
    others = np.maximum(0, count - ahead)
    alone = np.maximum(forward, backward)
    of_first = there + others * both + (count - 1 - others) * alone
    for more in (np.minimum(most, 1), most):
        chain = (1 + more) * there + (count - 1 - more * ahead) * both
        of_first = np.maximum(of_first, np.where(most > 0, chain, 0.0))
    return np.maximum(of_last, of_first)


def _by_chunks(forward: _Seconds, backward: _Seconds, transfers: _Seconds, count: int) -> _Seconds:
    """Return the seconds of a stage's work on all chunks, and of its waits at both ends.

    There a group of micro-batches may be back for the next chunk only after the stage has done all
    of it.
    """
    stages = forward.shape[1]
    busy = count * (forward + backward).sum(axis=0)
    first_group, last_group = min(count, stages), (count - 1) % stages + 1
    there, back = forward + transfers, backward + transfers
    for chunk in range(len(forward) - 1):
        here, after = there[chunk], there[chunk + 1]
        around = here.sum() - _before(here) + _before(after)
        busy += np.maximum(0.0, around - first_group * forward[chunk])
        here, after = back[chunk], back[chunk + 1]
        around = _before(after) + here.sum() - _before(here)
        busy += np.maximum(0.0, around - last_group * backward[chunk])
    return busy
