"""A file of what the ranks of a node are doing: `<run>/watch/node-0000.json`.

A rank of the node writes it when they have done nothing new for long, when a rank fails, and when
one is asked to (SIGUSR1). The other nodes read it to tell whom they wait for; `hpczero blame` reads
it after the job has ended, whatever ended it. A file `live-0000.json` has the same form, and says
what they do now while somebody looks (`live`).
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpczero.comm.status import RankState, seconds
from hpczero.errors import InputError
from hpczero.safe_files import make_own_folder, read_small, rename, write_text

FOLDER = "watch"
STOP = "stop"  # a file beside it, by which the run is asked to stop
_MOST = 256 << 20  # bytes that are read of a file
_LARGEST = 1 << 60  # bytes of a process: more are nonsense
_MOST_OPERATIONS = 16  # of each group, in a file


@dataclass(frozen=True)
class NodeFile:
    """`at`: when it was written, in seconds since 1970; stacks and notes are of some ranks.

    `reason`: why it was written, in words; "" if for somebody who looks.
    """

    at: float
    reason: str
    states: Mapping[int, RankState]
    stacks: Mapping[int, str]
    notes: Mapping[int, str] = field(default_factory=dict)  # what is wrong with their processes
    resident: Mapping[int, int] = field(default_factory=dict)  # bytes of their processes


NOTHING = NodeFile(0.0, "", {}, {})


def path_of(folder: Path, node: int, ending: str = "json") -> Path:
    return folder / f"node-{node:04}.{ending}"


def write(path: Path, file: NodeFile, writer: int) -> None:
    states = {rank: _facts(state) for rank, state in file.states.items()}
    of_ranks: dict[str, Any] = {"states": states, "stacks": file.stacks, "notes": file.notes}
    of_ranks |= {"resident": file.resident} if file.resident else {}
    facts = {"at": file.at, "reason": file.reason, **of_ranks}
    write_whole(path, json.dumps(facts), writer)


def write_whole(path: Path, text: str, writer: int) -> None:
    """Write the whole file or nothing; a folder that fails must not keep the job alive."""
    new = path.with_name(f".{path.name}.{writer}")
    with contextlib.suppress(OSError, InputError):
        make_own_folder(path.parent)
        write_text(new, text)
        rename(new, path)


def read(path: Path) -> NodeFile:
    """Return the file's content; NOTHING where there is none, or no such content."""
    try:
        facts = json.loads(read_small(path, _MOST))
        return NodeFile(
            seconds(facts["at"]),
            str(facts["reason"]),
            {int(rank): RankState.of(state) for rank, state in facts["states"].items()},
            {int(rank): str(text) for rank, text in facts["stacks"].items()},
            {int(rank): str(text) for rank, text in facts["notes"].items()},
            {int(rank): _size(size) for rank, size in facts.get("resident", {}).items()},
        )
    except (InputError, ValueError, LookupError, TypeError, AttributeError):
        return NOTHING
    except (OverflowError, RecursionError):  # of huge numbers, deep lists
        return NOTHING


def _size(value: Any) -> int:
    """Return a number of bytes; ValueError if no memory is so large."""
    size = int(value)
    if not 0 <= size < _LARGEST:
        raise ValueError(f"{size} bytes")
    return size


def _facts(state: RankState) -> dict[str, Any]:
    started = {
        group: [vars(operation) for operation in last[-_MOST_OPERATIONS:]]
        for group, last in state.started.items()
    }
    return vars(state) | {"started": started}
