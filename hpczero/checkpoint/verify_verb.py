"""`hpczero ckpt verify`: alone, or with the work shared out over the ranks of an mpirun."""

import contextlib
import importlib.util
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero import env
from hpczero.checkpoint import manifest
from hpczero.checkpoint.files import Damaged, Unreadable
from hpczero.checkpoint.locate import checkpoint_at
from hpczero.checkpoint.progress import bar
from hpczero.checkpoint.verify import Damage, Verification
from hpczero.text import in_bytes, printable

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
    return 1 if any(one["damages"] for one in found) else 2 if any(one["unreadable"] for one in found) else 0


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
    found = world.share(world.together(lambda: look() if world.rank == 0 else [])) if world else look()
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
        listed = [one for of_rank in world.share(world.collect(listed)) for one in of_rank]
        unreadable = [text for of_rank in world.share(world.collect(unreadable)) for text in of_rank]
    told = sorted({(file, what, tuple(tensors)) for file, what, tensors in listed}, key=lambda one: _in_order(f"{one[0]} {one[1]}"))
    damaged = [{"file": file, "what": what, "tensors": tensors} for file, what, tensors in told]
    return {"path": str(folder), "size": size, "damages": damaged, "unreadable": sorted(set(unreadable))}


def _in_order(text: str) -> list[tuple[int, str]]:
    """Numbers by their size."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"([0-9]+)", text)]


def _lines(found: dict[str, Any]) -> Sequence[str]:
    path = printable(found["path"])
    if not found["damages"] and not found["unreadable"]:
        return [f"{path}: good, {in_bytes(found['size'])} as they were written"]
    damages = [f"  {printable(str(Damage(**damage)))}" for damage in found["damages"]]
    return [f"{path}: {'DAMAGED' if damages else 'NOT READ'}", *damages, *(f"  {printable(text)}" for text in found["unreadable"])]
