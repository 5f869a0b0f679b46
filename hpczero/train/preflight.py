"""The look at memory and storage before a run: all ranks' parts must fit where they run.

Ranks say what they see of their node, as plain data; rank 0 counts, and all do what it says.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hpczero import machine, safe_files
from hpczero.comm.world import World
from hpczero.device import Device
from hpczero.errors import InputError
from hpczero.model.shapes import Layer
from hpczero.parallel.states import UpdateMemory
from hpczero.parallel.zero.weights import DTYPES
from hpczero.planner.fit import Bound, NodeLimits, as_it_fits, is_tight, ways_to_run
from hpczero.planner.memory import RUNTIME
from hpczero.planner.needs import FILES
from hpczero.planner.platform import Platform
from hpczero.spec import states_folder
from hpczero.spec.schema import Spec
from hpczero.text import first_few
from hpczero.train import malloc, process
from hpczero.train.setup import all_gather, computer_of
from hpczero_kernels import dispatch

_TIGHT = (
    "hpczero: memory is short: what is freed goes back to the system at once, which makes steps"
    " slower (docs/activation-memory.md)"
)


def fit_to_memory(
    world: World,
    spec: Spec,
    layers: Sequence[Layer],
    module: nn.Module | None,
    update: UpdateMemory | None = None,
) -> Spec:
    """Check that a model of these layers fits into every node, cgroup, GPU and /dev/shm.

    Collective; InputError on all ranks where it does not. Return the spec with all that it leaves
    to be decided (`fit.ways_to_run`). `module`: what this rank has built already; its memory is
    freed as the engine's states come. Where memory is short, malloc keeps none that is free.
    """
    parameters = () if module is None else module.parameters()
    built = sum(parameter.nbytes for parameter in parameters if not parameter.is_meta)
    ways = list(ways_to_run(spec))
    seen = world.gather_objects(_seen(world, spec, built))
    found = None
    if seen:
        limits = limits_from_ranks(seen, update)
        way, problem = as_it_fits(spec, layers, limits)
        found = ways.index(way), problem, is_tight(way, layers, limits)
    number, problem, tight = world.broadcast_object(found)
    if problem:
        raise InputError(problem)
    if tight and malloc.keep_no_free_memory() and world.rank == 0:
        print(_TIGHT, file=sys.stderr, flush=True)
    return ways[number]


def check_folder(world: World, spec: Spec) -> None:
    """Check that every rank can make its file of states, before anything is built. Collective.

    InputError on all ranks where one cannot; rank 0 says if memory is all that the folder is.
    """
    if not spec.zero.offload.startswith("nvme:"):  # the same on all ranks
        return
    host = world.hosts[world.rank]
    problem = states_folder.problem(spec.zero)
    warning = "" if problem else states_folder.warning(spec.zero, f"on {host}")
    seen = all_gather(world, [host, problem, warning])
    if problem := next((of_rank for _, of_rank, _ in seen if of_rank), ""):
        hosts = dict.fromkeys(host for host, of_rank, _ in seen if of_rank == problem)
        raise InputError(f"on {first_few(list(hosts))}: {problem}")
    if world.rank == 0 and (said := next((of_rank for *_, of_rank in seen if of_rank), "")):
        print(f"hpczero: WARN {said}", file=sys.stderr, flush=True)


def has_room(world: World, wanted: int) -> bool:
    """Return True if every rank can take so many bytes of its computer's memory. Collective."""
    seen = all_gather(world, [computer_of(world), wanted, machine.memory().usable])
    asked = Counter[str]()
    for computer, of_rank, _ in seen:
        asked[computer] += of_rank
    return all(asked[computer] <= usable for computer, _, usable in seen)


def _seen(world: World, spec: Spec, built: int) -> dict[str, Any]:
    """Return what this rank knows of its node, as plain data.

    What it holds itself already (`held`) is a part of its need.
    """
    shm = machine.shared_memory()
    platform = platform_of(world, spec)
    return {
        "node": world.node,
        "host": world.hosts[world.rank],
        "computer": computer_of(world),
        "available": machine.memory().available,
        "limits": {str(limit.folder): limit.free for limit in machine.memory_limits()},
        "shm": shm.free if shm else 0,
        "storage": _storage(spec),
        "held": min(process.held(), RUNTIME + built),
        "gpu": _gpu(world.device),
        "kernels": sorted(platform.kernels),
        "native": platform.native,
    }


def _storage(spec: Spec) -> dict[str, Any] | None:
    """Return the room for states in files; None if there are to be none, or it is not seen."""
    if not spec.zero.folder:
        return None
    folder = Path(spec.zero.folder).absolute()
    try:
        return {
            "folder": str(folder),
            "free": safe_files.free_bytes(folder),
            "on_server": not machine.is_local_file_system(folder),
        }
    except OSError:
        return None


def platform_of(world: World, spec: Spec) -> Platform:
    """Return what this rank runs on."""
    kernels: frozenset[str] = frozenset()
    if spec.model.kernels != "torch":
        kernels = dispatch.kernel_operations(world.device.kind, DTYPES[spec.train.precision])
    return Platform(world.device.kind, kernels, native=world.backend != "mpi")


def _gpu(device: Device) -> dict[str, Any] | None:
    memory = device.memory()
    if memory is None:
        return None
    return {
        "identity": device.identity,
        "name": device.name,
        "free": memory.free,
        "held": memory.held,
    }


@dataclass(frozen=True)
class Claim:
    """A rank's promise to stay within `free` bytes.

    It keeps it together with all ranks of its computer that name the same thing, or with those of
    all computers (`everywhere`).
    """

    rank: Mapping[str, Any]  # as `_seen` describes it
    what: str
    free: int
    place: str
    windows: bool = False
    memory: str = "all"
    everywhere: bool = False


def limits_from_ranks(
    seen: Sequence[Mapping[str, Any]], update: UpdateMemory | None = None
) -> NodeLimits:
    """Return the bounds that the ranks must keep together, from what each has seen (pure)."""
    groups: dict[tuple[str, str], list[Claim]] = {}
    for rank in seen:
        for claim in _claims(rank):
            computer = "" if claim.everywhere else rank["computer"]
            groups.setdefault((computer, claim.what), []).append(claim)
    bounds = tuple(map(_bound, groups.values()))
    on_gpus = any(rank.get("gpu") for rank in seen)
    kernels = frozenset.intersection(*(frozenset(rank.get("kernels", ())) for rank in seen))
    native = all(rank.get("native", False) for rank in seen)
    platform = Platform("cuda" if on_gpus else "cpu", kernels, native, update)
    return NodeLimits(Counter(rank["node"] for rank in seen), bounds, platform)


def _claims(rank: Mapping[str, Any]) -> Iterator[Claim]:
    host, gpu = rank["host"], rank.get("gpu")
    memory = "host" if gpu else "all"
    if rank["available"]:
        yield Claim(rank, "memory", rank["available"], f"on {host}", memory=memory)
    for folder, free in rank["limits"].items():
        yield Claim(rank, folder, free, f"in the cgroup {folder} on {host}", memory=memory)
    if gpu:
        place = f"on {gpu['name']} of {host}"
        yield Claim(rank, f"gpu {gpu['identity']}", gpu["free"], place, memory="device")
    if storage := rank.get("storage"):
        folder, on_server = storage["folder"], storage["on_server"]
        place = f"in {folder}" if on_server else f"in {folder} of {host}"
        yield Claim(rank, folder, storage["free"], place, memory=FILES, everywhere=on_server)
    yield Claim(rank, "shm", rank["shm"], f"in /dev/shm of {host}", windows=True)


def _bound(claims: Sequence[Claim]) -> Bound:
    first = claims[0]
    free = min(claim.free for claim in claims)
    if (
        not first.windows and first.memory != FILES
    ):  # then what the ranks hold already counts as free
        holders = (
            claim.rank["gpu"] if first.memory == "device" else claim.rank for claim in claims
        )
        free += sum(holder["held"] for holder in holders)
    nodes = Counter(claim.rank["node"] for claim in claims)
    return Bound(nodes, free, first.place, first.windows, first.memory, first.everywhere)
