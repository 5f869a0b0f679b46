"""Where a run's tensors live and what carries its collectives: `train.device` and `comm.backend`, decided by all ranks together."""

import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from hpczero import device, env, kernel_cache, machine, process_memory
from hpczero.comm.world import World
from hpczero.device import CPU, Cuda, Device
from hpczero.errors import InputError
from hpczero.model.shapes import Layer
from hpczero.parallel.zero.weights import DTYPES
from hpczero.planner.fit import Bound, Site, refusal
from hpczero.planner.memory import RUNTIME, Platform, as_run, bucket_bytes, saves_behind
from hpczero.spec.schema import Spec
from hpczero.text import in_bytes
from hpczero_kernels import dispatch


def select_device(world: World, spec: Spec) -> Spec:
    """Collective, before the world's groups are made. The spec as it is carried out: on GPUs nothing lies in a node's shared memory."""
    own = _device(world, spec.train.device)
    shared = (
        own.kind == "cuda"
        and len(set(_together(world, [_computer(world), own.identity]))) < world.size
    )
    backend = carrier(
        spec.comm.backend, own.kind, world.size, shared, _available(spec.comm.backend, own)
    )
    if own is CPU and backend == "mpi":
        return spec
    world.use(own, backend, bucket_bytes(spec.zero, own.kind))
    if not isinstance(own, Cuda):
        return spec
    world.run_on_all(lambda: kernel_cache.of_gpu(own.capability))
    return as_run(spec, own.kind)


def carrier(wanted: str, kind: str, ranks: int, shared: bool, available: Collection[str]) -> str:
    """What `comm.backend` means for so many ranks on devices of this kind: "mpi", "nccl" or "gloo" (pure). `shared`: several have one GPU
    together; `available`: what PyTorch offers.
    """
    if wanted == "auto":
        return (
            "nccl" if kind == "cuda" and ranks > 1 and not shared and "nccl" in available else "mpi"
        )
    if wanted == "mpi":
        return "mpi"
    fitting = {"nccl": "cuda", "gloo": "cpu"}[wanted]
    problem = ""
    if kind != fitting:
        problem = f"it carries tensors on {fitting}, and these are on {kind} (train.device)"
    elif wanted not in available:
        problem = "this PyTorch was built without it"
    elif wanted == "nccl" and shared:
        problem = "several ranks have one GPU together, which NCCL refuses: start as many ranks as there are GPUs"
    if problem:
        raise InputError(f'comm.backend = "{wanted}": {problem}; or set comm.backend = "mpi"')
    return wanted


def _device(world: World, wanted: str) -> Device:
    if wanted == "cpu" or (wanted == "auto" and not any(_together(world, machine.gpu_driver()))):
        return CPU
    kind = device.agreed(wanted, _together(world, device.visible()), world.hosts)
    computers = _together(world, _computer(world))
    neighbours = [
        rank for rank, computer in enumerate(computers) if computer == computers[world.rank]
    ]
    return world.run_on_all(
        lambda: device.of_rank(kind, neighbours.index(world.rank), len(neighbours))
    )


def _computer(world: World) -> str:
    """Several tried-out nodes may be one."""
    return machine.boot_identity() or world.hosts[world.rank]


def _available(wanted: str, own: Device) -> Collection[str]:
    """Of what may be chosen."""
    if wanted == "mpi" or (wanted == "auto" and own is CPU):
        return ()
    from torch import distributed

    if not distributed.is_available():
        return ()
    asked = {"nccl": distributed.is_nccl_available, "gloo": distributed.is_gloo_available}
    return [name for name, is_available in asked.items() if is_available()]


def _together(world: World, value: object) -> list[Any]:
    """Every rank's."""
    found = world.broadcast_object(world.gather_objects(value))
    return [tuple(one) if isinstance(one, list) else one for one in found]


# What a run notes about where it runs: packages, git state, memory, and its share of the cores.
_PACKAGES = ("torch", "mpi4py", "numpy", "numba", "h5py", "pydantic")


def packages() -> dict[str, str | None]:
    return {"python": sys.version.split()[0], "hpczero": env.VERSION} | {
        name: _version(name) for name in _PACKAGES
    }


def git_state() -> dict[str, object] | None:
    """Commit and cleanliness of the folder that the job was started in; None outside a checkout or without git."""
    commit, changed = (
        _git("rev-parse", "HEAD"),
        _git("status", "--porcelain", "--untracked-files=no"),
    )
    return None if commit is None else {"commit": commit, "changed": bool(changed)}


def use_threads(world: World) -> int:
    """This rank takes its share of the cores: torch runs that many threads from now on. Several tried-out nodes may be one computer."""
    computer = machine.boot_identity() or world.hosts[world.rank]
    mine = {
        "computer": computer,
        "cores": sorted(machine.usable_cores()),
        "quota": machine.cpu_quota(),
    }
    everyone = world.broadcast_object(world.gather_objects(mine))
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
    asked = world.broadcast_object(world.gather_objects(env.forced_kernels()))

    def force() -> None:
        if len(set(asked)) > 1:
            raise InputError(
                f"HPCZERO_KERNELS is not the same on all ranks: {', '.join(map(repr, dict.fromkeys(asked)))}"
            )
        try:
            dispatch.force(asked[0])
        except ValueError as error:
            raise InputError(f"HPCZERO_KERNELS: {error}") from error

    world.run_on_all(force)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# Before anything is allocated: is there room for it? Every rank says what it sees, rank 0 decides, all ranks end together.
def refuse_what_does_not_fit(
    world: World, spec: Spec, layers: Sequence[Layer], given: int = 0
) -> None:
    """Collective; InputError on all ranks if the memory of any node, or a cgroup's limit, or /dev/shm, is too small for a model of these layers.
    `given`: bytes of a module that this rank has built, which goes as the engine's states come.
    """
    problem = _problem(world, spec, layers, given)
    if problem:
        raise InputError(problem)


def fitting(world: World, spec: Spec, layers: Sequence[Layer], given: int = 0) -> Spec:
    """As `refuse_what_does_not_fit`, but where only the copy for saving behind the training does not fit: then the spec without that."""
    if not saves_behind(spec):
        refuse_what_does_not_fit(world, spec, layers, given)
    elif _problem(world, spec, layers, given):
        spec = spec.model_copy(
            update={"checkpoint": spec.checkpoint.model_copy(update={"asynchronous": False})}
        )
        refuse_what_does_not_fit(world, spec, layers, given)
    return spec


def _problem(world: World, spec: Spec, layers: Sequence[Layer], given: int) -> str | None:
    """The same on all ranks."""
    seen = world.gather_objects(_seen(world, spec, given))
    problem: str | None = world.broadcast_object(
        refusal(spec, layers, site_of(seen)) if seen is not None else None
    )
    return problem


def _seen(world: World, spec: Spec, given: int) -> dict[str, Any]:
    """What this rank knows of its node, as plain data. What it holds itself already is part of its need."""
    shm = machine.shared_memory()
    return {
        "node": world.node,
        "host": world.hosts[world.rank],
        "computer": machine.boot_identity()
        or world.hosts[world.rank],  # several tried-out nodes may be one
        "available": machine.memory().available,
        "limits": {str(limit.folder): limit.free for limit in machine.memory_limits()},
        "shm": shm.free if shm else 0,
        "held": min(process_memory.held(), RUNTIME + given),
        "gpu": _gpu(world.device),
        "kernels": sorted(platform_of(world, spec).kernels),
        "native": world.backend != "mpi",
    }


def platform_of(world: World, spec: Spec) -> Platform:
    """Return what this rank runs on."""
    if world.device.kind != "cuda" or spec.model.kernels == "torch":
        return Platform(world.device.kind, native=world.backend != "mpi")
    kernels = dispatch.of_gpus(DTYPES[spec.train.precision])
    return Platform("cuda", kernels, native=world.backend != "mpi")


def _gpu(device: Device) -> dict[str, Any] | None:
    memory = device.memory()
    return (
        None
        if memory is None
        else {
            "identity": device.identity,
            "name": device.name,
            "free": memory.free,
            "held": memory.held,
        }
    )


def site_of(seen: Sequence[dict[str, Any]]) -> Site:
    """From what all ranks have seen to the bounds that they must keep together."""
    groups: dict[tuple[str, str], list[tuple[dict[str, Any], Claim]]] = {}
    for rank in seen:
        for claim in _claims(rank):
            groups.setdefault((rank["computer"], claim.what), []).append((rank, claim))
    bounds = tuple(_bound(group) for group in groups.values())
    on_gpus = any(rank.get("gpu") for rank in seen)
    kernels = frozenset.intersection(*(frozenset(rank.get("kernels", ())) for rank in seen))
    native = all(rank.get("native", False) for rank in seen)
    platform = Platform("cuda" if on_gpus else "cpu", kernels, native)
    return Site(Counter(rank["node"] for rank in seen), bounds, platform)


@dataclass(frozen=True)
class Claim:
    """That one rank keeps within `free` bytes, together with all ranks of its computer that name the same thing."""

    what: str
    free: int
    place: str
    windows: bool = False
    part: str = "all"


def _claims(rank: dict[str, Any]) -> Iterator[Claim]:
    host, gpu = rank["host"], rank.get("gpu")
    part = "host" if gpu else "all"
    if rank["available"]:
        yield Claim("memory", rank["available"], f"on {host}", part=part)
    for folder, free in rank["limits"].items():
        yield Claim(folder, free, f"in the cgroup {folder} on {host}", part=part)
    if gpu:
        yield Claim(
            f"gpu {gpu['identity']}", gpu["free"], f"on {gpu['name']} of {host}", part="device"
        )
    yield Claim("shm", rank["shm"], f"in /dev/shm of {host}", windows=True)


def _bound(group: Sequence[tuple[dict[str, Any], Claim]]) -> Bound:
    first = group[0][1]
    held = (
        0
        if first.windows
        else sum(
            rank["gpu"]["held"] if first.part == "device" else rank["held"] for rank, _ in group
        )
    )
    ranks, free = (
        Counter(rank["node"] for rank, _ in group),
        min(claim.free for _, claim in group) + held,
    )
    return Bound(ranks, free, first.place, first.windows, first.part)
