"""`hpczero ckpt export`, `import`, `prune`: they write, or remove. They need neither MPI nor torch."""

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
from hpczero.checkpoint.import_safetensors import Adoption
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.safetensors import WHOLE, Export, SafetensorsFile
from hpczero.checkpoint.shard_file import Damaged, Unreadable, bar
from hpczero.checkpoint.verify import Damage, Verification
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
from hpczero.safe_files import make_folders, own_folder, written_durably
from hpczero.spec.load import differences, load, to_toml
from hpczero.spec.schema import Spec
from hpczero.text import in_bytes, printable

_MOST_BYTES = 10**18  # of a file
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def export(options: Namespace) -> int:
    output, largest = Path(options.output), _bytes(options.shard_size) if options.shard_size else 0
    is_file = output.suffix == ".safetensors"
    if is_file and largest:
        raise InputError(
            f"--shard-size: {printable(str(output))} would have to be a folder, for several files and their index"
        )
    with Checkpoint.open(checkpoint_at(Path(options.checkpoint), options.step)) as checkpoint:
        made = Export(checkpoint, options.dtype)
        try:
            _room(output.parent if is_file else output, made.size)
            if not is_file:
                make_folders(output)
            with bar("writing", made.size) as advance:
                files = (
                    made.to_folder(output, largest, advance)
                    if largest
                    else made.to_file(output if is_file else output / WHOLE, advance)
                )
        except OSError as error:
            raise HpczeroError(
                f"{error.filename or output}: {error.strerror} ({in_bytes(made.size)} are to be written)"
            ) from error
    for path in files:
        print(f"wrote {printable(str(path))}")
    print(
        f"{len(made.entries)} tensors (of them {len(checkpoint.buffers)} buffers), {in_bytes(made.size)}, weights as {options.dtype}"
    )
    if made.overflows:
        print(
            f"WARN {made.overflows:,} weights are too large for {options.dtype} and became infinite; bf16 has the range of fp32"
        )
    return 0


def import_(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    run = Path(options.output) if options.output else Path(env.expand(spec.output)) / spec.name
    checkpoints = run / "checkpoints"
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in _safetensors(options.files)]
        adoption = Adoption(spec, files)
        if _is_begun(run, checkpoints):
            raise InputError(
                f"{printable(str(run))} has checkpoints already: name another run's directory"
            )
        try:
            _room(run, adoption.room)
            own_folder(run)
            with RunLock(run):
                _refuse_another_run(run / "spec.toml", spec)
                with bar("reading", adoption.size) as advance:
                    path = adoption.save(checkpoints, advance)
                if not (
                    run / "spec.toml"
                ).exists():  # only now: with it alone a run would begin from weights made of random numbers
                    with written_durably(run / "spec.toml") as file:
                        file.write(to_toml(spec).encode())
        except OSError as error:
            raise HpczeroError(f"{error.filename or checkpoints}: {error.strerror}") from error
    print(
        f"made {printable(str(path))}: {len(adoption.parameters)} tensors, {len(adoption.buffers)} buffers, moments of zero"
    )
    if adoption.overflows:
        print(f"WARN {adoption.overflows:,} weights are too large for fp32 and became infinite")
    print(
        f"`hpczero run` with this spec begins there, at step 0, if its run directory is {printable(str(run))}"
    )
    return 0


def prune(options: Namespace) -> int:
    checkpoints = checkpoints_of(Path(options.path))
    if not directory.holds_any(checkpoints):
        raise InputError(
            f"{printable(options.path)} has no checkpoints: name a run's directory, or its folder of checkpoints"
        )
    if options.keep is not None and options.keep < 1:
        raise InputError(
            f"--keep {options.keep}: at least 1, the newest complete one, is always kept"
        )
    if options.keep is None and not (options.incomplete or options.set_aside or options.damaged):
        raise InputError(
            "nothing to remove: say how many are to be kept (--keep), or give --incomplete, --set-aside or --damaged"
        )
    with contextlib.ExitStack() as held:
        for run in () if options.dry_run else _runs_of(checkpoints):
            held.enter_context(RunLock(run))
        found = list(listed(checkpoints))
        removed = _unwanted(found, options)
        for one in removed:
            if not options.dry_run:
                _remove(one)
            print(
                f"{'would remove' if options.dry_run else 'removed'} {printable(str(one.path))} ({one.state}, {in_bytes(one.size)})"
            )
    for one in found:
        if one.state in (directory.MISNAMED, directory.LINKED):
            print(f"left {printable(str(one.path))} ({one.state}: {printable(one.problem)})")
    print(
        f"{len(removed)} of {len(found)} checkpoints, {in_bytes(sum(one.size for one in removed))}"
    )
    return 0


def _runs_of(checkpoints: Path) -> list[Path]:
    """The run's directory, as the path says it and where it leads to: it may be a link, or begin and end inside."""
    return [
        run
        for run in {checkpoints.absolute().parent.resolve(), checkpoints.resolve().parent}
        if (run / "spec.toml").exists()
    ]


def _unwanted(found: list[Listed], options: Namespace) -> list[Listed]:
    """Only what is complete counts among those that are kept: a damaged one is no reason to remove a good one."""
    complete = [one.step for one in found if one.state == COMPLETE]
    old = directory.to_prune(complete, options.keep or 0, options.keep_every)
    states = {INCOMPLETE: options.incomplete, ASIDE: options.set_aside, DAMAGED: options.damaged}
    return [
        one for one in found if (one.state == COMPLETE and one.step in old) or states.get(one.state)
    ]


def _remove(one: Listed) -> None:
    try:
        directory.remove(one.path, one.identity)
    except OSError as error:
        raise HpczeroError(
            f"{error.filename or one.path}: it was to be removed: {error.strerror}"
        ) from error


def _is_begun(run: Path, checkpoints: Path) -> bool:
    """Return False also for what an import leaves that was killed before its last action: step 0, and
    no spec. Its checkpoint is set aside then, and the same command goes on.
    """
    return bool(
        set(directory.steps(checkpoints)) - ({0} if not (run / "spec.toml").exists() else set())
    )


def _refuse_another_run(path: Path, spec: Spec) -> None:
    """The run's directory says whose it is, as one that `hpczero run` makes."""
    if not path.exists():
        return
    other = [
        difference.key
        for difference in differences(load(path).spec, spec)
        if difference.role == "identity" and difference.key != "name"
    ]
    if other:
        raise InputError(
            f"{printable(str(path.parent))} is another run's directory, with another {', '.join(other)}"
        )


def _safetensors(paths: list[str]) -> list[Path]:
    """A folder stands for all such files in it."""
    found = []
    for path in map(Path, paths):
        inner = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not inner:
            raise InputError(f"{printable(str(path))} has no .safetensors files")
        found += inner
    return found


def _bytes(text: str) -> int:
    """ "5GB", "500 MB", "1e6"; GB are 10^9 bytes, as the tools for safetensors have it."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)B?\s*", text.upper())
    try:
        size = int(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0
    except (ValueError, OverflowError):
        size = 0
    if not 1 <= size < _MOST_BYTES:
        raise InputError(
            f"--shard-size {printable(text, 60)}: a number of bytes, such as 500MB or 5GB"
        )
    return size


def _room(path: Path, size: int) -> None:
    free = directory.free_bytes(path.absolute())
    if free < size:
        raise InputError(
            f"{printable(str(path))}: {in_bytes(size)} are to be written, and {in_bytes(free)} are free there"
        )


# `hpczero ckpt verify`: alone, or with the work shared out over the ranks of an mpirun.
if TYPE_CHECKING:
    from hpczero.comm.world import World


def verify(options: Namespace) -> int:
    """0: all is as it was written; 1: something is damaged; 2: nothing is, as far as could be read."""
    with _launch() as (world, rank):
        if world is None and rank:  # without MPI for Python the first process does it all
            return 0
        found = [_verified(world, path) for path in _folders(world, options)]
        if rank == 0 and options.json:
            print(json.dumps(found, indent=2))
        elif rank == 0:
            print("\n".join(line for one in found for line in _lines(one)))
    return (
        1
        if any(one["damages"] for one in found)
        else 2
        if any(one["unreadable"] for one in found)
        else 0
    )


@contextlib.contextmanager
def _launch() -> Iterator[tuple["World | None", int]]:
    """The ranks of this launch (None: there is one, or no MPI for Python), and this process's number among them."""
    rank, ranks = max(env.launched_tasks().values(), key=lambda task: task[1], default=(0, 1))
    if ranks == 1 or not importlib.util.find_spec("mpi4py"):
        yield None, rank
        return
    from hpczero.comm.world import World

    with World.start() as world:
        yield world, world.rank


def _folders(world: "World | None", options: Namespace) -> list[Path]:
    """What rank 0 takes the paths for; an incomplete checkpoint has a damage like any other."""
    look = lambda: [str(_folder(Path(path), options.step)) for path in options.checkpoints]  # noqa: E731
    found = (
        world.broadcast_object(world.run_on_all(lambda: look() if world.rank == 0 else []))
        if world
        else look()
    )
    return [Path(path) for path in found]


def _folder(path: Path, step: int | None) -> Path:
    return path if (path / manifest.INDEX).exists() else checkpoint_at(path, step)


def _verified(world: "World | None", folder: Path) -> dict[str, Any]:
    """Every rank's part of the work; all damages, on all ranks."""
    rank, ranks = (world.rank, world.size) if world else (0, 1)
    size, damages, unreadable = 0, list[Damage](), list[str]()
    try:
        with Verification(folder) as verification:
            size, own = verification.content.size, verification.tasks()[rank::ranks]
            work = sum(task.size(verification.content) for task in own)
            with bar(f"verifying {printable(folder.name)}", work, rank == 0) as advance:
                for task in own:
                    try:
                        damages += verification.carry_out(task, advance)
                    except Unreadable as error:
                        unreadable.append(str(error))
    except Unreadable as error:
        unreadable.append(str(error))
    except Damaged as error:
        damages = [Damage(manifest.NAME, str(error).removeprefix(f"{folder / manifest.NAME}: "))]
    listed = [[damage.file, damage.what, list(damage.tensors)] for damage in damages]
    if world:
        listed = [
            one
            for of_rank in world.broadcast_object(world.gather_objects(listed))
            for one in of_rank
        ]
        unreadable = [
            text
            for of_rank in world.broadcast_object(world.gather_objects(unreadable))
            for text in of_rank
        ]
    told = sorted(
        {(file, what, tuple(tensors)) for file, what, tensors in listed},
        key=lambda one: _in_order(f"{one[0]} {one[1]}"),
    )
    damaged = [{"file": file, "what": what, "tensors": tensors} for file, what, tensors in told]
    return {
        "path": str(folder),
        "size": size,
        "damages": damaged,
        "unreadable": sorted(set(unreadable)),
    }


def _in_order(text: str) -> list[tuple[int, str]]:
    """Numbers by their size."""
    return [
        (int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"([0-9]+)", text)
    ]


def _lines(found: dict[str, Any]) -> Sequence[str]:
    path = printable(found["path"])
    if not found["damages"] and not found["unreadable"]:
        return [f"{path}: good, {in_bytes(found['size'])} as they were written"]
    damages = [f"  {printable(str(Damage(**damage)))}" for damage in found["damages"]]
    return [
        f"{path}: {'DAMAGED' if damages else 'NOT READ'}",
        *damages,
        *(f"  {printable(text)}" for text in found["unreadable"]),
    ]
