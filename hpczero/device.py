"""Where a rank's tensors live: all that the program knows of GPUs (docs/gpu.md).

A GPU does what it is asked for later, in the order of a stream. Work beside the computing, copies and messages, goes through a `Queue`, a stream of
its own: `begins` puts what follows there behind all that was asked for so far, a `Mark` says how far it came and puts what is computed
from then on behind it. The CPU has done everything when a call returns; its queue and marks do nothing, and it is the base of the others.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hpczero import machine
from hpczero.errors import InputError


class Mark:
    """A place in a queue."""

    def Test(self) -> bool:  # as a request of MPI, which it is waited for together with
        """Whether the device has come there."""
        return True

    def order(self) -> None:
        """What is asked of the device from now on comes after it."""


class Queue:
    def begins(self) -> None:
        """What follows here comes after all that has been asked of the device so far."""

    def running(self) -> AbstractContextManager[object]:
        """What is asked of the device inside goes here."""
        return nullcontext()

    def copy(self, output: Tensor, tensor: Tensor) -> None:
        """Here, inside `running` or not; between the device and pinned memory too."""
        output.copy_(tensor)

    def mark(self) -> Mark:
        return Mark()


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's own memory: `total`, `free` of it now, `held` by this process's tensors, and the most of these so far."""

    total: int
    free: int
    held: int
    peak: int


class Device:
    """The CPU."""

    kind = "cpu"
    name = "the CPU"
    identity = ""  # equal on ranks that share a device; "" where the memory is the computer's own
    torch = torch.device("cpu")
    has_queues = False  # whether what is asked of it is done later

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.torch.type

    def queue(self) -> Queue:
        return Queue()

    def pinned(self, size: int) -> Tensor:
        """Bytes of the computer's memory that the device reads and writes beside the computing."""
        return torch.empty(size, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the computer's, on the device."""
        return tensor

    def later(self, values: Tensor) -> Callable[[], list[float]]:
        """Reads what has been asked of the device: it is waited for when this is called, and what is asked of it after them is not."""
        return values.tolist

    def memory(self) -> Memory | None:
        """None: its memory is the computer's."""
        return None


CPU = Device()


class _CudaMark(Mark):
    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def Test(self) -> bool:
        return self._event.query()

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _CudaQueue(Queue):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)  # ahead of the computing, which waits for what it brings

    def begins(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def copy(self, output: Tensor, tensor: Tensor) -> None:
        with self.running():
            output.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)


class Cuda(Device):
    """One GPU of this computer, by its number among those that this process sees. (AMD's are called cuda by PyTorch, too.)"""

    kind = "cuda"
    has_queues = True

    def __init__(self, number: int) -> None:
        self.torch = torch.device("cuda", number)
        torch.cuda.set_device(self.torch)
        torch.empty(1, dtype=torch.float32, device=self.torch)  # from now on what CUDA itself takes of its memory is not free
        found = torch.cuda.get_device_properties(self.torch)
        self.name = f"{found.name} (cuda:{number})"
        self.capability = found.major, found.minor
        self.identity = str(getattr(found, "uuid", number))

    def queue(self) -> Queue:
        return _CudaQueue(self.torch)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch, non_blocking=True)

    def later(self, values: Tensor) -> Callable[[], list[float]]:
        here = torch.empty_like(values, device="cpu", pin_memory=True)
        here.copy_(values, non_blocking=True)
        made = torch.cuda.Event()
        made.record()

        def read() -> list[float]:
            made.synchronize()
            return here.tolist()

        return read

    def memory(self) -> Memory | None:
        free, total = torch.cuda.mem_get_info(self.torch)
        return Memory(total, free, torch.cuda.memory_allocated(self.torch), torch.cuda.max_memory_allocated(self.torch))


def visible() -> int:
    """GPUs that this process may use; PyTorch is asked only where there is a driver, as it may have something to say where there is none."""
    return torch.cuda.device_count() if machine.gpu_driver() and torch.cuda.is_available() else 0


def agreed(wanted: str, seen: Sequence[int], hosts: Sequence[str]) -> str:
    """What `train.device` (auto, cpu, cuda) means for ranks that see so many GPUs each: "cpu" or "cuda" for all of them (pure)."""
    if wanted == "cpu" or (wanted == "auto" and not any(seen)):
        return "cpu"
    if all(seen):
        return "cuda"
    without = [rank for rank, count in enumerate(seen) if not count]
    shown = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in without[:4]) + (f" and {len(without) - 4} more" if len(without) > 4 else "")
    drivers = "a driver (nvidia-smi), a PyTorch built for it, and gpus in the batch system's request"
    way_out = f'give every rank one ({drivers}), or set train.device = "cpu"'
    raise InputError(f'train.device = "{wanted}": {len(without)} of {len(seen)} ranks see no GPU: {shown}; {way_out}')


def of_rank(kind: str, place: int, ranks: int) -> Device:
    """The device of a rank that is number `place` of so many on its computer: where ranks see all its GPUs they are dealt out in blocks, so that
    neighbours are neighbours; with more ranks than GPUs, several have one together.
    """
    if kind == "cpu":
        return CPU
    count = visible()
    number = place * count // ranks if ranks > count else place
    try:
        return Cuda(number)
    except RuntimeError as error:
        raise InputError(f'GPU {number} of {count} cannot be used: {error}; train.device = "cpu" does without') from error
