"""`hpczero ckpt prune`, `verify`: remove checkpoints, or read all of them.

Neither needs torch. `verify` shares its work over the ranks of an mpirun.
"""

import contextlib
import importlib.util
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero import env
from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.directory import checkpoint_at, checkpoints_of
from hpczero.checkpoint.listing import (
    ASIDE,
    COMPLETE,
    DAMAGED,
    INCOMPLETE,
    LINKED,
    MISNAMED,
    Listed,
    listed,
)
from hpczero.checkpoint.shard_file import Damaged, Unreadable, bar
from hpczero.checkpoint.verify import Damage, Verification
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
from hpczero.text import format_bytes, printable

if TYPE_CHECKING:
    from hpczero.comm.world import World


def prune(options: Namespace) -> int:
    checkpoints = checkpoints_of(Path(options.path))
    if not directory.holds_any(checkpoints):
        raise InputError(
            f"{printable(options.path)} has no checkpoints: "
            "name a run's directory, or its folder of checkpoints"
        )
    if options.keep is not None and options.keep < 1:
        raise InputError(
            f"--keep {options.keep}: at least 1, the newest complete one, is always kept"
        )
    if options.keep is None and not (options.incomplete or options.set_aside or options.damaged):
        raise InputError(
            "nothing to remove: say how many are to be kept (--keep), "
            "or give --incomplete, --set-aside or --damaged"
        )
    verb = "would remove" if options.dry_run else "removed"
    with contextlib.ExitStack() as locks:
        for run in () if options.dry_run else _runs_of(checkpoints):
            locks.enter_context(RunLock(run))
        present = list(listed(checkpoints))
        unwanted = _unwanted(present, options)
        for one in unwanted:
            if not options.dry_run:
                _remove(one)
            print(f"{verb} {printable(str(one.path))} ({one.state}, {format_bytes(one.size)})")
    for one in present:
        if one.state in (MISNAMED, LINKED):
            print(f"left {printable(str(one.path))} ({one.state}: {printable(one.problem)})")
    size = format_bytes(sum(one.size for one in unwanted))
    print(f"{len(unwanted)} of {len(present)} checkpoints, {size}")
    return 0


def _runs_of(checkpoints: Path) -> list[Path]:
    """Return the run's directory, as the path says it and as its links resolve."""
    return [
        run
        for run in {checkpoints.absolute().parent.resolve(), checkpoints.resolve().parent}
        if (run / "spec.toml").exists()
    ]


def _unwanted(present: list[Listed], options: Namespace) -> list[Listed]:
    """Return what the options remove; only complete checkpoints count among those that are kept."""
    complete = [one.step for one in present if one.state == COMPLETE]
    old = directory.to_prune(complete, options.keep or 0, options.keep_every)
    states = {INCOMPLETE: options.incomplete, ASIDE: options.set_aside, DAMAGED: options.damaged}
    return [
        one
        for one in present
        if (one.state == COMPLETE and one.step in old) or states.get(one.state)
    ]


def _remove(one: Listed) -> None:
    try:
        directory.remove(one.path, one.identity)
    except OSError as error:
        raise HpczeroError(
            f"{error.filename or one.path}: it was to be removed: {error.strerror}"
        ) from error


# `hpczero ckpt verify`: in one process, or with the work shared over the ranks of an mpirun.
def verify(options: Namespace) -> int:
    """Return 0 if all is as it was written, 1 for damage, 2 for unreadable files only."""
    with _launch() as (world, rank):
        if world is None and rank:  # without MPI for Python the first process does it all
            return 0
        reports = [_verified(world, folder) for folder in _folders(world, options)]
        if rank == 0 and options.json:
            print(json.dumps(reports, indent=2))
        elif rank == 0:
            print("\n".join(line for report in reports for line in _lines(report)))
    if any(report["damages"] for report in reports):
        return 1
    return 2 if any(report["unreadable"] for report in reports) else 0


@contextlib.contextmanager
def _launch() -> Iterator[tuple["World | None", int]]:
    """Yield the ranks of this launch, and this process's number among them.

    The ranks are None if there is only one, or no MPI for Python.
    """
    rank, ranks = max(env.launched_tasks().values(), key=lambda task: task[1], default=(0, 1))
    if ranks == 1 or not importlib.util.find_spec("mpi4py"):
        yield None, rank
        return
    from hpczero.comm.world import World

    with World.start() as world:
        yield world, world.rank


def _folders(world: "World | None", options: Namespace) -> list[Path]:
    """Return the checkpoints' folders as rank 0 finds them; collective."""

    def look() -> list[str]:
        if world and world.rank:
            return []
        return [str(_folder(Path(path), options.step)) for path in options.checkpoints]

    folders = world.broadcast_object(world.run_on_all(look)) if world else look()
    return list(map(Path, folders))


def _folder(path: Path, step: int | None) -> Path:
    """Take a folder with an index as it is: an incomplete checkpoint is damaged, and no mistake."""
    return path if (path / manifest.INDEX).exists() else checkpoint_at(path, step)


def _verified(world: "World | None", folder: Path) -> dict[str, Any]:
    """Verify this rank's share; return what all ranks found; collective."""
    rank, ranks = (world.rank, world.size) if world else (0, 1)
    size = 0
    damages = list[Damage]()
    unreadable = list[str]()
    try:
        with Verification(folder) as verification:
            size = verification.content.size
            tasks = verification.tasks()[rank::ranks]
            work = sum(task.size(verification.content) for task in tasks)
            with bar(f"verifying {printable(folder.name)}", work, rank == 0) as advance:
                for task in tasks:
                    try:
                        damages += verification.carry_out(task, advance)
                    except Unreadable as error:
                        unreadable.append(str(error))
    except Unreadable as error:
        unreadable.append(str(error))
    except Damaged as error:
        damages = [Damage(manifest.NAME, str(error).removeprefix(f"{folder / manifest.NAME}: "))]
    rows = [[damage.file, damage.what, list(damage.tensors)] for damage in damages]
    unique = {(file, what, tuple(tensors)) for file, what, tensors in _of_all_ranks(world, rows)}
    in_order = sorted(unique, key=lambda row: _numeric_order(f"{row[0]} {row[1]}"))
    return {
        "path": str(folder),
        "size": size,
        "damages": [
            {"file": file, "what": what, "tensors": tensors} for file, what, tensors in in_order
        ],
        "unreadable": sorted(set(_of_all_ranks(world, unreadable))),
    }


def _of_all_ranks(world: "World | None", rows: list[Any]) -> list[Any]:
    """Return the rows of all ranks on all ranks; collective."""
    if not world:
        return rows
    return [row for of_rank in world.all_gather_objects(rows) for row in of_rank]


def _numeric_order(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers inside a text by their value."""
    pieces = re.split(r"([0-9]+)", text)
    return [(int(piece), "") if piece.isdecimal() else (0, piece) for piece in pieces]


def _lines(report: dict[str, Any]) -> Sequence[str]:
    path = printable(report["path"])
    if not report["damages"] and not report["unreadable"]:
        return [f"{path}: good, {format_bytes(report['size'])} as they were written"]
    messages = [*(Damage(**damage) for damage in report["damages"]), *report["unreadable"]]
    verdict = "DAMAGED" if report["damages"] else "NOT READ"
    return [f"{path}: {verdict}", *(f"  {printable(str(message))}" for message in messages)]
