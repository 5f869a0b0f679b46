"""What a run notes about where it runs: packages, git state, memory, and its share of the cores."""

import subprocess
import sys
from importlib import metadata

import torch

from hpczero import __version__, env, machine
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.text import in_bytes
from hpczero_kernels import dispatch

_PACKAGES = ("torch", "mpi4py", "numpy", "numba", "h5py", "pydantic")


def packages() -> dict[str, str | None]:
    return {"python": sys.version.split()[0], "hpczero": __version__} | {name: _version(name) for name in _PACKAGES}


def git_state() -> dict[str, object] | None:
    """Commit and cleanliness of the folder that the job was started in; None outside a checkout or without git."""
    commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "changed": bool(changed)}


def use_threads(world: World) -> int:
    """This rank takes its share of the cores: torch runs that many threads from now on. Several tried-out nodes may be one computer."""
    computer = machine.boot_identity() or world.hosts[world.rank]
    mine = {"computer": computer, "cores": sorted(machine.usable_cores()), "quota": machine.cpu_quota()}
    everyone = world.share(world.collect(mine))
    ranks = [rank for rank, one in enumerate(everyone) if one["computer"] == computer]
    cores = [set(everyone[rank]["cores"]) for rank in ranks]
    threads = machine.threads_per_rank(cores, everyone[ranks[0]]["quota"])[ranks.index(world.rank)]
    torch.set_num_threads(threads)
    return threads


def remove_stale_segments(world: World) -> None:
    """Remove what MPICH left of this user's killed jobs in /dev/shm: the room is needed, and nobody
    else gives it back. One rank of each node does, and says so; as `hpczero doctor --clean`.
    """
    if world.local_rank:
        return
    _, gone = machine.remove_stale_segments({"MPICH"})
    if gone:
        size = in_bytes(sum(segment.size for segment in gone))
        what = f"removed {len(gone)} shared-memory files that killed MPICH jobs left in /dev/shm"
        host = world.hosts[world.rank]
        print(f"hpczero: {host}: {what} ({size})", file=sys.stderr, flush=True)


def use_kernels(world: World) -> None:
    """Collective. What the environment asks for is taken from now on, on all ranks; it has to be the same there."""
    asked = world.share(world.collect(env.forced_kernels()))

    def force() -> None:
        if len(set(asked)) > 1:
            raise InputError(f"HPCZERO_KERNELS is not the same on all ranks: {', '.join(map(repr, dict.fromkeys(asked)))}")
        try:
            dispatch.force(asked[0])
        except ValueError as error:
            raise InputError(f"HPCZERO_KERNELS: {error}") from error

    world.together(force)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
