"""`hpczero ckpt export`, `import`, `prune`: they write, or remove. They need neither MPI nor torch."""

import contextlib
import re
from argparse import Namespace
from pathlib import Path

from hpczero import env
from hpczero.checkpoint import directory, listing
from hpczero.checkpoint.export import WHOLE, Export
from hpczero.checkpoint.import_safetensors import Adoption
from hpczero.checkpoint.listing import ASIDE, COMPLETE, DAMAGED, INCOMPLETE, Listed, listed
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.locate import checkpoint_at, checkpoints_of
from hpczero.checkpoint.progress import bar
from hpczero.checkpoint.safetensors import SafetensorsFile
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
        raise InputError(f"--shard-size: {printable(str(output))} would have to be a folder, for several files and their index")
    with Checkpoint.open(checkpoint_at(Path(options.checkpoint), options.step)) as checkpoint:
        made = Export(checkpoint, options.dtype)
        try:
            _room(output.parent if is_file else output, made.size)
            if not is_file:
                make_folders(output)
            with bar("writing", made.size) as advance:
                files = made.to_folder(output, largest, advance) if largest else made.to_file(output if is_file else output / WHOLE, advance)
        except OSError as error:
            raise HpczeroError(f"{error.filename or output}: {error.strerror} ({in_bytes(made.size)} are to be written)") from error
    for path in files:
        print(f"wrote {printable(str(path))}")
    print(f"{len(made.entries)} tensors (of them {len(checkpoint.buffers)} buffers), {in_bytes(made.size)}, weights as {options.dtype}")
    if made.overflows:
        print(f"WARN {made.overflows:,} weights are too large for {options.dtype} and became infinite; bf16 has the range of fp32")
    return 0


def import_(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    run = Path(options.output) if options.output else Path(env.expand(spec.output)) / spec.name
    checkpoints = run / "checkpoints"
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in _safetensors(options.files)]
        adoption = Adoption(spec, files)
        if _is_begun(run, checkpoints):
            raise InputError(f"{printable(str(run))} has checkpoints already: name another run's directory")
        try:
            _room(run, adoption.room)
            own_folder(run)
            with RunLock(run):
                _refuse_another_run(run / "spec.toml", spec)
                with bar("reading", adoption.size) as advance:
                    path = adoption.save(checkpoints, advance)
                if not (run / "spec.toml").exists():  # only now: with it alone a run would begin from weights made of random numbers
                    with written_durably(run / "spec.toml") as file:
                        file.write(to_toml(spec).encode())
        except OSError as error:
            raise HpczeroError(f"{error.filename or checkpoints}: {error.strerror}") from error
    print(f"made {printable(str(path))}: {len(adoption.parameters)} tensors, {len(adoption.buffers)} buffers, moments of zero")
    if adoption.overflows:
        print(f"WARN {adoption.overflows:,} weights are too large for fp32 and became infinite")
    print(f"`hpczero run` with this spec begins there, at step 0, if its run directory is {printable(str(run))}")
    return 0


def prune(options: Namespace) -> int:
    checkpoints = checkpoints_of(Path(options.path))
    if not directory.holds_any(checkpoints):
        raise InputError(f"{printable(options.path)} has no checkpoints: name a run's directory, or its folder of checkpoints")
    if options.keep is not None and options.keep < 1:
        raise InputError(f"--keep {options.keep}: at least 1, the newest complete one, is always kept")
    if options.keep is None and not (options.incomplete or options.set_aside or options.damaged):
        raise InputError("nothing to remove: say how many are to be kept (--keep), or give --incomplete, --set-aside or --damaged")
    with contextlib.ExitStack() as held:
        for run in () if options.dry_run else _runs_of(checkpoints):
            held.enter_context(RunLock(run))
        found = list(listed(checkpoints))
        removed = _unwanted(found, options)
        for one in removed:
            if not options.dry_run:
                _remove(one)
            print(f"{'would remove' if options.dry_run else 'removed'} {printable(str(one.path))} ({one.state}, {in_bytes(one.size)})")
    for one in found:
        if one.state in (listing.MISNAMED, listing.LINKED):
            print(f"left {printable(str(one.path))} ({one.state}: {printable(one.problem)})")
    print(f"{len(removed)} of {len(found)} checkpoints, {in_bytes(sum(one.size for one in removed))}")
    return 0


def _runs_of(checkpoints: Path) -> list[Path]:
    """The run's directory, as the path says it and where it leads to: it may be a link, or begin and end inside."""
    return [run for run in {checkpoints.absolute().parent.resolve(), checkpoints.resolve().parent} if (run / "spec.toml").exists()]


def _unwanted(found: list[Listed], options: Namespace) -> list[Listed]:
    """Only what is complete counts among those that are kept: a damaged one is no reason to remove a good one."""
    complete = [one.step for one in found if one.state == COMPLETE]
    old = directory.to_prune(complete, options.keep or 0, options.keep_every)
    states = {INCOMPLETE: options.incomplete, ASIDE: options.set_aside, DAMAGED: options.damaged}
    return [one for one in found if (one.state == COMPLETE and one.step in old) or states.get(one.state)]


def _remove(one: Listed) -> None:
    try:
        directory.remove(one.path, one.identity)
    except OSError as error:
        raise HpczeroError(f"{error.filename or one.path}: it was to be removed: {error.strerror}") from error


def _is_begun(run: Path, checkpoints: Path) -> bool:
    """Return False also for what an import leaves that was killed before its last action: step 0, and
    no spec. Its checkpoint is set aside then, and the same command goes on.
    """
    return bool(set(directory.steps(checkpoints)) - ({0} if not (run / "spec.toml").exists() else set()))


def _refuse_another_run(path: Path, spec: Spec) -> None:
    """The run's directory says whose it is, as one that `hpczero run` makes."""
    if not path.exists():
        return
    other = [difference.key for difference in differences(load(path).spec, spec) if difference.role == "identity" and difference.key != "name"]
    if other:
        raise InputError(f"{printable(str(path.parent))} is another run's directory, with another {', '.join(other)}")


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
        raise InputError(f"--shard-size {printable(text, 60)}: a number of bytes, such as 500MB or 5GB")
    return size


def _room(path: Path, size: int) -> None:
    free = directory.free_bytes(path.absolute())
    if free < size:
        raise InputError(f"{printable(str(path))}: {in_bytes(size)} are to be written, and {in_bytes(free)} are free there")
