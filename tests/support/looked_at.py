"""Facts that `hpczero top` shows of a run, made by hand."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpczero.batch.run_status import Progress
from hpczero.comm.node_file import NodeFile
from hpczero.comm.status import Operation, RankState
from hpczero.commands.top_facts import Facts
from hpczero.commands.top_ranks import RankNow, ranks_now

BAD = "\x1b[2J\x1b]0;x\x07\r\u202e\x9b31m"
NOW = 5000.0
HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def progress(**more: Any) -> Progress:
    known: dict[str, Any] = {
        "run": Path("/runs/four"),
        "state": "running",
        "reason": "",
        "step": 250,
        "steps": 1000,
        "loss": 2.5,
        "seconds_per_step": 0.2,
        "tokens_per_second": 10_000.0,
        "seconds_left": 150.0,
        "job_seconds_left": None,
        "last_save": 200,
        "node_hours": 0.0,
    }
    return Progress(**(known | more))


def facts(**more: Any) -> Facts:
    known: dict[str, Any] = {
        "progress": progress(),
        "ranks": [],
        "seen": "seen 1 s ago",
        "complete": True,
        "behind": None,
        "slow": [],
        "memory": None,
        "events": [],
        "steps": np.arange(1.0, 251.0),
        "losses": 5 / np.sqrt(np.arange(1.0, 251.0)),
    }
    return Facts(**(known | more))


def state(
    number: int = 7, *, waited: float | None = 3.0, group: str = "77", **more: Any
) -> RankState:
    """Return a rank that has started operations up to this number, and waits in the last one."""
    started = {group: [Operation(at, 5, "all_reduce", 9) for at in range(1, number + 1)]}
    words = f"all_reduce of 64 bytes (number {number} along data)" if waited is not None else ""
    place = words, started, group, number, "data"
    return replace(RankState(1, 1, 1, 12, 4.0, waited, *place), **more)


LATE = state(6, waited=None)


def ranks_of(states: Mapping[int, RankState], **more: Any) -> list[RankNow]:
    file = NodeFile(NOW, "", states, {}, **more)
    return ranks_now([file], dict.fromkeys(states, "n"), NOW, 10.0)
