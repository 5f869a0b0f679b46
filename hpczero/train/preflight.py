"""Before anything is allocated: is there room for it? Every rank says what it sees, rank 0 decides, all ranks end together."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpczero import machine, process_memory
from hpczero.comm.world import World
from hpczero.device import Device
from hpczero.errors import InputError
from hpczero.model.shapes import Layer
from hpczero.parallel.zero.engine import DTYPES
from hpczero.planner.fit import Bound, Site, refusal
from hpczero.planner.memory import RUNTIME, saves_behind
from hpczero.planner.platform import Platform
from hpczero.spec.schema import Spec
from hpczero_kernels import dispatch


def refuse_what_does_not_fit(world: World, spec: Spec, layers: Sequence[Layer], given: int = 0) -> None:
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
        spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"asynchronous": False})})
        refuse_what_does_not_fit(world, spec, layers, given)
    return spec


def _problem(world: World, spec: Spec, layers: Sequence[Layer], given: int) -> str | None:
    """The same on all ranks."""
    seen = world.collect(_seen(world, spec, given))
    problem: str | None = world.share(refusal(spec, layers, site_of(seen)) if seen is not None else None)
    return problem


def _seen(world: World, spec: Spec, given: int) -> dict[str, Any]:
    """What this rank knows of its node, as plain data. What it holds itself already is part of its need."""
    shm = machine.shared_memory()
    return {
        "node": world.node,
        "host": world.hosts[world.rank],
        "computer": machine.boot_identity() or world.hosts[world.rank],  # several tried-out nodes may be one
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
    return None if memory is None else {"identity": device.identity, "name": device.name, "free": memory.free, "held": memory.held}


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
        yield Claim(f"gpu {gpu['identity']}", gpu["free"], f"on {gpu['name']} of {host}", part="device")
    yield Claim("shm", rank["shm"], f"in /dev/shm of {host}", windows=True)


def _bound(group: Sequence[tuple[dict[str, Any], Claim]]) -> Bound:
    first = group[0][1]
    held = 0 if first.windows else sum(rank["gpu"]["held"] if first.part == "device" else rank["held"] for rank, _ in group)
    ranks, free = Counter(rank["node"] for rank, _ in group), min(claim.free for _, claim in group) + held
    return Bound(ranks, free, first.place, first.windows, first.part)
