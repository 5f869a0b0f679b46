"""The kind of device that a job's tensors are on, and what of the spec follows from it (pure)."""

from dataclasses import dataclass

from hpczero.parallel.states import UpdateMemory, memory_of
from hpczero.spec.schema import Spec, Zero

BUCKET_MB = {"cpu": 4, "cuda": 256}


@dataclass(frozen=True)
class Platform:
    """The `device` of a job's tensors: "cpu", where all memory is the computer's, or "cuda".

    `kernels`: operations that hpczero's own kernels carry out; PyTorch does the others.
    `native`: collectives use torch.distributed in place of MPI. `update`: the memory of an update
    that is not the one that the spec names.
    """

    device: str = "cpu"
    kernels: frozenset[str] = frozenset()
    native: bool = False
    update: UpdateMemory | None = None

    def update_of(self, spec: Spec) -> UpdateMemory:
        return self.update or memory_of(spec.optimizer)

    @property
    def on_gpus(self) -> bool:
        return self.device == "cuda"


CPUS = Platform()


def device_of(spec: Spec, gpus: int) -> str:
    """Return "cpu" or "cuda": `train.device`, or for "auto" "cuda" if the nodes have GPUs."""
    if spec.train.device != "auto":
        return spec.train.device
    return "cuda" if spec.batch.gpus_per_node or gpus else "cpu"


def bucket_bytes(zero: Zero, device: str) -> int:
    """Return the size of a communication buffer.

    Each round of a reduction has a start and an end to wait for. A GPU is done with a small round
    in microseconds, so rounds are few and large there.
    """
    return (zero.bucket_mb or BUCKET_MB[device]) << 20


def as_run(spec: Spec, device: str) -> Spec:
    """Return the spec in effect on this device: on GPUs no states are in shared memory."""
    if device == "cpu":
        return spec
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"node_shared": False})})
