"""The kind of device that a job runs on, and what a spec leaves to it (pure)."""

from dataclasses import dataclass

from hpczero.spec.schema import Spec, Zero

BUCKET_MB = {"cpu": 4, "cuda": 256}


@dataclass(frozen=True)
class Hardware:
    """Describe a node as a site's profile does. 0: not known; of `gpus` also: none."""

    memory_gb: float = 0
    gpus: int = 0
    gpu_memory_gb: float = 0

    def ranks_on_gpu(self, ranks: int) -> int:
        """Return how many of a node's ranks share a GPU; of an unknown number each has its own."""
        return -(-ranks // self.gpus) if self.gpus else 1


@dataclass(frozen=True)
class Platform:
    """Say where a job's tensors live: on "cpu", where all memory is the computer's, or on "cuda".

    `kernels`: operations that hpczero's own kernels carry out on GPUs; PyTorch does the others.
    `native`: collectives go by torch.distributed, not by MPI.
    """

    device: str = "cpu"
    kernels: frozenset[str] = frozenset()
    native: bool = False

    @property
    def on_gpus(self) -> bool:
        return self.device == "cuda"


CPUS = Platform()


def device_of(spec: Spec, gpus: int) -> str:
    """Return "cpu" or "cuda": what `train.device` says, else what the nodes' number of GPUs does."""
    if spec.train.device != "auto":
        return spec.train.device
    return "cuda" if spec.batch.gpus_per_node or gpus else "cpu"


def bucket_bytes(zero: Zero, device: str) -> int:
    """Return the size of a communication buffer. A round of a reduction has a start and an end to wait
    for: on GPUs, which are through a small one in microseconds, rounds are few and large.
    """
    return (zero.bucket_mb or BUCKET_MB[device]) << 20


def as_run(spec: Spec, device: str) -> Spec:
    """Return the spec as it is carried out there: on GPUs nothing lies in a node's shared memory."""
    if device == "cpu":
        return spec
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"node_shared": False})})
