"""Where a run's tensors live and what carries its collectives: `train.device` and `comm.backend`, decided by all ranks together."""

from collections.abc import Collection
from typing import Any

from hpczero import device, kernel_cache, machine
from hpczero.comm.world import World
from hpczero.device import CPU, Cuda, Device
from hpczero.errors import InputError
from hpczero.planner.platform import as_run, bucket_bytes
from hpczero.spec.schema import Spec


def place(world: World, spec: Spec) -> Spec:
    """Collective, before the world's groups are made. The spec as it is carried out: on GPUs nothing lies in a node's shared memory."""
    own = _device(world, spec.train.device)
    shared = own.kind == "cuda" and len(set(_together(world, [_computer(world), own.identity]))) < world.size
    backend = carrier(spec.comm.backend, own.kind, world.size, shared, _available(spec.comm.backend, own))
    if own is CPU and backend == "mpi":
        return spec
    world.use(own, backend, bucket_bytes(spec.zero, own.kind))
    if not isinstance(own, Cuda):
        return spec
    world.together(lambda: kernel_cache.of_gpu(own.capability))
    return as_run(spec, own.kind)


def carrier(wanted: str, kind: str, ranks: int, shared: bool, available: Collection[str]) -> str:
    """What `comm.backend` means for so many ranks on devices of this kind: "mpi", "nccl" or "gloo" (pure). `shared`: several have one GPU
    together; `available`: what PyTorch offers.
    """
    if wanted == "auto":
        return "nccl" if kind == "cuda" and ranks > 1 and not shared and "nccl" in available else "mpi"
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
    neighbours = [rank for rank, computer in enumerate(computers) if computer == computers[world.rank]]
    return world.together(lambda: device.of_rank(kind, neighbours.index(world.rank), len(neighbours)))


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
    found = world.share(world.collect(value))
    return [tuple(one) if isinstance(one, list) else one for one in found]
