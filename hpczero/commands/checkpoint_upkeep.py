"""`hpczero ckpt export`, `import`, `prune`, `verify`: change checkpoints, or read all of them.

None of them needs torch. `verify` shares its work over the ranks of an mpirun, the others need no
MPI.
"""

import contextlib
import importlib.util
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero import env, safe_files
from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.directory import (
    ASIDE,
    COMPLETE,
    DAMAGED,
    INCOMPLETE,
    Listed,
    checkpoint_at,
    checkpoints_of,
    listed,
)
from hpczero.checkpoint.import_safetensors import SafetensorsImport
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.safetensors import WHOLE, Export, SafetensorsFile
from hpczero.checkpoint.shard_file import Damaged, Unreadable, bar
from hpczero.checkpoint.verify import Damage, Verification
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
from hpczero.safe_files import make_folders, make_own_folder, written_durably
from hpczero.spec.load import differences, load, to_toml
from hpczero.spec.schema import Spec
from hpczero.text import format_bytes, printable

if TYPE_CHECKING:
    from hpczero.comm.world import World

_MOST_BYTES = 10**18  # of a file
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def export(options: Namespace) -> int:
    output = Path(options.output)
    largest = _bytes(options.shard_size) if options.shard_size else 0
    is_file = output.suffix == ".safetensors"
    if is_file and largest:
        raise InputError(
            f"--shard-size: {printable(str(output))} would have to be a folder, "
            "for several files and their index"
        )
    with Checkpoint.open(checkpoint_at(Path(options.checkpoint), options.step)) as checkpoint:
        made = Export(checkpoint, options.dtype)
        try:
            _refuse_without_space(output.parent if is_file else output, made.size)
            if not is_file:
                make_folders(output)
            with bar("writing", made.size) as advance:
                if largest:
                    files = made.to_folder(output, largest, advance)
                elif is_file:
                    files = made.to_file(output, advance)
                else:
                    files = made.to_file(output / WHOLE, advance)
        except OSError as error:
            raise HpczeroError(
                f"{error.filename or output}: {error.strerror} "
                f"({format_bytes(made.size)} are to be written)"
            ) from error
    for path in files:
        print(f"wrote {printable(str(path))}")
    tensors = f"{len(made.entries)} tensors (of them {len(checkpoint.buffers)} buffers)"
    print(f"{tensors}, {format_bytes(made.size)}, weights as {options.dtype}")
    if made.overflows:
        print(
            f"WARN {made.overflows:,} weights are too large for {options.dtype} "
            "and became infinite; bf16 has the range of fp32"
        )
    return 0


def import_(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    run = Path(options.output) if options.output else Path(env.expand(spec.output)) / spec.name
    checkpoints = run / "checkpoints"
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in _safetensors(options.files)]
        adoption = SafetensorsImport(spec, files)
        if _is_begun(run, checkpoints):
            raise InputError(
                f"{printable(str(run))} has checkpoints already: name another run's directory"
            )
        try:
            _refuse_without_space(run, adoption.room)
            make_own_folder(run)
            with RunLock(run):
                _refuse_another_run(run / "spec.toml", spec)
                with bar("reading", adoption.size) as advance:
                    path = adoption.save(checkpoints, advance)
                # only now: with the spec alone, a run would begin from random weights
                if not (run / "spec.toml").exists():
                    with written_durably(run / "spec.toml") as file:
                        file.write(to_toml(spec).encode())
        except OSError as error:
            raise HpczeroError(f"{error.filename or checkpoints}: {error.strerror}") from error
    print(
        f"made {printable(str(path))}: {len(adoption.parameters)} tensors, "
        f"{len(adoption.buffers)} buffers, moments of zero"
    )
    if adoption.overflows:
        print(f"WARN {adoption.overflows:,} weights are too large for fp32 and became infinite")
    print(
        "`hpczero run` with this spec begins there, at step 0, "
        f"if its run directory is {printable(str(run))}"
    )
    return 0


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
        if one.state in (directory.MISNAMED, directory.LINKED):
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


def _is_begun(run: Path, checkpoints: Path) -> bool:
    """Return True if the run has checkpoints.

    An import that was killed before its last action leaves step 0 and no spec: return False. The
    same command sets its checkpoint aside, and goes on.
    """
    ignored = set() if (run / "spec.toml").exists() else {0}
    return bool(set(directory.steps(checkpoints)) - ignored)


def _refuse_another_run(path: Path, spec: Spec) -> None:
    """Raise InputError if the spec in the run's directory has another identity."""
    if not path.exists():
        return
    other = [
        difference.key
        for difference in differences(load(path).spec, spec)
        if difference.role == "identity" and difference.key != "name"
    ]
    if other:
        raise InputError(
            f"{printable(str(path.parent))} is another run's directory, "
            f"with another {', '.join(other)}"
        )


def _safetensors(paths: list[str]) -> list[Path]:
    """Return the files; a folder stands for all .safetensors files in it."""
    files = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"{printable(str(path))} has no .safetensors files")
        files += inside
    return files


def _bytes(text: str) -> int:
    """Parse a size such as "5GB" or "500 MB"; GB are 10^9 bytes, as for safetensors."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)B?\s*", text.upper())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, OverflowError):
        size = 0
    if not 1 <= size < _MOST_BYTES:
        raise InputError(
            f"--shard-size {printable(text, 60)}: a number of bytes, such as 500MB or 5GB"
        )
    return size


def _refuse_without_space(path: Path, size: int) -> None:
    free = safe_files.free_bytes(path.absolute())
    if free < size:
        raise InputError(
            f"{printable(str(path))}: {format_bytes(size)} are to be written, "
            f"and {format_bytes(free)} are free there"
        )


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
