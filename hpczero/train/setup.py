"""The start that `hpczero run` and `hpczero.initialize` share: spec, device, kernels.

All ranks decide together: what is wrong on one of them is an InputError on all. Nothing is
allocated before `preflight.fit_to_memory` has found that there is room for it.
"""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from hpczero import device, env, kernel_cache, machine, processors
from hpczero.comm.grid import Grid
from hpczero.comm.progress import Limits
from hpczero.comm.world import World
from hpczero.device import CPU, Cuda, Device
from hpczero.errors import InputError
from hpczero.planner.platform import as_run, bucket_bytes
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Spec
from hpczero.text import format_bytes, format_count
from hpczero.train import malloc
from hpczero_kernels import dispatch

_PACKAGES = ("torch", "mpi4py", "numpy", "numba", "h5py", "pydantic")


def agree_on_spec(world: World, read: Callable[[], Spec]) -> Spec:
    """Return the spec that rank 0 reads, on all ranks. Collective."""
    text = world.run_on_all(lambda: "" if world.rank else read().model_dump_json())
    return Spec.model_validate_json(world.broadcast_object(text))


def training_world(world: World, spec: Spec) -> World:
    """Return a world of the same ranks, with the nodes and buffers that the spec asks for.

    Collective. The caller closes it before `world`.
    """
    limits = Limits(staging=bucket_bytes(spec.zero, "cpu"))
    return world.part(range(world.size), spec.comm.ranks_per_node, limits)


def prepare(world: World, spec: Spec) -> tuple[Spec, Grid]:
    """Choose kernels, device and grid, and keep freed memory. Collective, before any group is made.

    The spec that is returned is the one that is carried out: `select_device` changes it.
    """
    use_kernels(world)
    malloc.keep_free_memory()
    spec = select_device(world, spec)
    return spec, Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)


# -- device and backend ----------------------------------------------------------------------------


def select_device(world: World, spec: Spec) -> Spec:
    """Carry out `train.device` and `comm.backend`. Collective, before any group is made.

    Return the spec that is carried out: on GPUs nothing lies in a node's shared memory.
    """
    chosen = _device(world, spec.train.device)
    gpus = all_gather(world, [computer_of(world), chosen.identity]) if chosen.kind == "cuda" else []
    shared = len(set(gpus)) < len(gpus)
    available = _available(spec.comm.backend, chosen)
    backend = collective_backend(spec.comm.backend, chosen.kind, world.size, shared, available)
    if chosen is CPU and backend == "mpi":
        return spec
    world.use(chosen, backend, bucket_bytes(spec.zero, chosen.kind))
    if not isinstance(chosen, Cuda):
        return spec
    world.run_on_all(lambda: kernel_cache.load_gpu_kernels(chosen.capability))
    return as_run(spec, chosen.kind)


def collective_backend(
    wanted: str, kind: str, ranks: int, shared: bool, available: Collection[str]
) -> str:
    """Return the library that `comm.backend` means: "mpi", "nccl" or "gloo" (pure).

    `kind`: of the ranks' devices; `shared`: ranks share a GPU; `available`: in this PyTorch.
    """
    if wanted == "auto":
        nccl = kind == "cuda" and ranks > 1 and not shared and "nccl" in available
        return "nccl" if nccl else "mpi"
    if wanted == "mpi":
        return "mpi"
    fitting = {"nccl": "cuda", "gloo": "cpu"}[wanted]
    problem = ""
    if kind != fitting:
        problem = f"it carries tensors on {fitting}, and these are on {kind} (train.device)"
    elif wanted not in available:
        problem = "this PyTorch was built without it"
    elif wanted == "nccl" and shared:
        problem = (
            "several ranks have one GPU together, which NCCL refuses: "
            "start as many ranks as there are GPUs"
        )
    if problem:
        raise InputError(f'comm.backend = "{wanted}": {problem}; or set comm.backend = "mpi"')
    return wanted


def _device(world: World, wanted: str) -> Device:
    if wanted == "cpu":
        return CPU
    if wanted == "auto" and not any(all_gather(world, machine.gpu_driver())):
        return CPU
    kind = device.choose_kind(wanted, all_gather(world, device.visible()), world.hosts)
    ranks = _ranks_of_computer(world)
    position = ranks.index(world.rank)
    return world.run_on_all(lambda: device.device_of_rank(kind, position, len(ranks)))


def _available(wanted: str, chosen: Device) -> Collection[str]:
    """Return the backends of this PyTorch among which `collective_backend` may choose."""
    if wanted == "mpi" or (wanted == "auto" and chosen is CPU):
        return ()
    from torch import distributed

    if not distributed.is_available():
        return ()
    asked = {"nccl": distributed.is_nccl_available, "gloo": distributed.is_gloo_available}
    return [name for name, is_available in asked.items() if is_available()]


def computer_of(world: World) -> str:
    """Return what tells computers apart: `comm.ranks_per_node` can make several nodes of one."""
    return machine.boot_identity() or world.hosts[world.rank]


def _ranks_of_computer(world: World) -> list[int]:
    """Return the ranks on this rank's computer. Collective."""
    mine = computer_of(world)
    computers = enumerate(all_gather(world, mine))
    return [rank for rank, computer in computers if computer == mine]


def all_gather(world: World, value: object) -> list[Any]:
    """Return every rank's value, in rank order; a list becomes a tuple. Collective."""
    return [tuple(one) if isinstance(one, list) else one for one in world.all_gather_objects(value)]


# -- kernels, threads, facts -----------------------------------------------------------------------


def use_kernels(world: World) -> None:
    """Use the kernels that HPCZERO_KERNELS names. Collective; it must be the same on all ranks."""
    asked = list(dict.fromkeys(all_gather(world, env.forced_kernels())))

    def force() -> None:
        if len(asked) > 1:
            values = ", ".join(map(repr, asked))
            raise InputError(f"HPCZERO_KERNELS is not the same on all ranks: {values}")
        try:
            dispatch.force(asked[0])
        except ValueError as error:
            raise InputError(f"HPCZERO_KERNELS: {error}") from error

    world.run_on_all(force)


def share_cores(world: World, alike: Sequence[int] = ()) -> int:
    """Let torch run as many threads as this rank's share of the cores, and return how many.

    Ranks `alike` (of a tensor group) run equally many, the fewest: what they compute in common is
    equal to the bit, and a sum's last bits depend on the number of threads. Where ranks are more
    than cores, those that wait leave them to the others.
    """
    ranks = _ranks_of_computer(world)
    usable = all_gather(world, [sorted(processors.usable_cores()), machine.cpu_quota()])
    cores = [set(usable[rank][0]) for rank in ranks]
    _, quota = usable[ranks[0]]
    threads = processors.threads_per_rank(cores, quota)[ranks.index(world.rank)]
    of_ranks = all_gather(world, threads)
    threads = min((of_ranks[rank] for rank in alike), default=threads)
    world.progress.is_crowded = len(ranks) > min(len(set().union(*cores)), quota or math.inf)
    torch.set_num_threads(threads)
    return threads


def remove_stale_segments(world: World) -> None:
    """Remove what MPICH left of this user's killed jobs in /dev/shm, as `hpczero doctor --clean`.

    One rank of each node does, and says so: the memory is needed, and nobody else gives it back.
    """
    if world.local_rank:
        return
    _, removed = machine.remove_stale_segments({"MPICH"})
    if removed:
        size = format_bytes(sum(segment.size for segment in removed))
        files = format_count(len(removed), "shared-memory file")
        what = f"removed {files} that killed MPICH jobs left in /dev/shm ({size})"
        print(f"hpczero: {world.hosts[world.rank]}: {what}", file=sys.stderr, flush=True)


def places_of_ranks(world: World) -> list[Any] | None:
    """Return where each rank runs, on rank 0; None elsewhere. Collective."""
    return world.gather_objects(
        {
            "rank": world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "node": world.node,
            "device": world.device.name,
        }
    )


def packages() -> dict[str, str | None]:
    versions = {name: env.package_version(name) for name in _PACKAGES}
    return {"python": sys.version.split()[0], "hpczero": env.VERSION} | versions


def start_time() -> str:
    """Return when this process was started, long before it has loaded its libraries."""
    began = datetime.fromtimestamp(machine.process_began(), UTC)
    return began.isoformat(timespec="milliseconds")


def git_state() -> dict[str, object] | None:
    """Return commit and cleanliness of the folder that the job was started in.

    None outside a checkout or without git.
    """
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "changed": bool(changed)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
