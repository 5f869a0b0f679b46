"""The process of a rank of this node, as /proc shows it."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpczero.comm.status import RankState, process_namespace
from hpczero.comm.verdict import ENDED, STOPPED

_BLOCKED = "its process waits for a disk or a file server"
_STATES = {"Z": ENDED, "X": ENDED, "T": STOPPED, "t": STOPPED, "D": _BLOCKED}
_PAGE = os.sysconf("SC_PAGE_SIZE")


def notes(states: Mapping[int, RankState]) -> dict[int, str]:
    """Say what is wrong with the processes of these ranks, of those with which something is."""
    return {rank: note for rank, state in states.items() if (note := trouble(state))}


def trouble(state: RankState) -> str:
    """Say what is wrong with a process; "" if nothing is, or it cannot be told."""
    if state.namespace != process_namespace():
        return ""
    try:
        letter = (Path("/proc") / str(state.pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ENDED
    return _STATES.get(letter, "")


def resident(state: RankState) -> int:
    """Return the bytes of a process that lie in memory, shared ones too; 0 if unknown."""
    if state.namespace != process_namespace():
        return 0
    try:
        pages = (Path("/proc") / str(state.pid) / "statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * _PAGE
