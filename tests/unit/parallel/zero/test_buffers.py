"""Communication buffers: as large as the device wants them, and no larger than a layer needs."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hpczero.comm.connection import Connection, ConnectionSettings
from hpczero.comm.mpi_backend import Order
from hpczero.comm.progress import Limits
from hpczero.comm.status import WaitPoint
from hpczero.comm.torch_backend import TorchCarrier
from hpczero.device import Device
from hpczero.model.families import layers
from hpczero.planner.memory import need
from hpczero.planner.placement import Placement
from hpczero.planner.platform import CPUS, Platform, bucket_bytes
from hpczero.spec.load import load
from hpczero.spec.schema import Model, Spec, Train, Zero
from tests.support.carriers import FakeMpi, Silent
from tests.support.launch import CHECKOUT
from tests.support.queued import Queued

MIB = 1 << 20
RANKS = 16
GPUS = Platform("cuda", native=True)


class Asked:
    """A process group that has done everything at once."""

    def __init__(self) -> None:
        self.rounds = 0

    def size(self) -> int:
        return RANKS

    def alltoall_base(self, *_: object) -> "Asked":
        self.rounds += 1
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class Meeting:
    kind, device = "gloo", Device()


def rounds(bucket: int, sizes: list[int]) -> tuple[int, int]:
    """Return the rounds of reducing units of these sizes in bf16, and the bytes of the buffer.

    Nothing is allocated.
    """
    processes = Asked()
    native = TorchCarrier(processes, Meeting(), 0, bucket, Order(None))  # type: ignore[arg-type]
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.bfloat16, device="meta")
        for requests in native.reduce_scatter(tensor, lambda *_: None, WaitPoint(b""), 0):
            assert all(request.Test() for request in requests)
    return processes.rounds, native.buffered


def units(spec: Spec) -> list[int]:
    return [-(-layer.size // (64 * RANKS)) * 64 * RANKS for layer in layers(spec.model)]


def test_a_step_of_7_billion_parameters_is_some_hundred_rounds_on_gpus() -> None:
    spec = load(str(CHECKOUT / "jobspecs" / "gpt-7b-gh200.toml")).spec
    assert bucket_bytes(spec.zero, "cuda") >= 256 * MIB
    made, buffer = rounds(bucket_bytes(spec.zero, "cuda"), units(spec))
    assert made < 300
    assert buffer <= 256 * MIB


def test_what_the_spec_says_is_taken_on_every_device() -> None:
    assert (
        bucket_bytes(Zero(bucket_mb=7), "cuda") == bucket_bytes(Zero(bucket_mb=7), "cpu") == 7 * MIB
    )
    assert bucket_bytes(Zero(), "cpu") == 4 * MIB


@pytest.mark.parametrize("sizes", [[100], [4096 * RANKS], [1 << 20, 1 << 22, 1 << 10], [3 << 20]])
def test_the_largest_layer_bounds_it(sizes: list[int]) -> None:
    """In one round, and in a buffer of what leaves and what comes, for this round and the next."""
    made, buffer = rounds(256 * MIB, sizes)
    assert made == len(sizes)
    assert buffer <= 4 * RANKS * 2 * 4096 * (max(sizes) // RANKS // 4096 + 1)


def test_mpis_buffers_grow_with_what_they_are_for_and_are_two_at_most() -> None:
    means = ConnectionSettings(FakeMpi(), Silent(), None, Limits(1000), Queued())  # type: ignore[arg-type]
    connection = Connection(means, None, "data", range(RANKS))

    def borrowed(most: int | None) -> torch.Tensor:
        steps = connection.borrow(16, most=most)
        with pytest.raises(StopIteration) as done:
            next(steps)
        buffer: torch.Tensor = done.value.value
        return buffer

    for most, size in ((100, 100), (300, 300), (200, 200), (5000, 1000), (None, 1000), (1, 16)):
        one, two = borrowed(most), borrowed(most)
        assert one.numel() == two.numel() == size
        connection.give_back(one)
        connection.give_back(two)
        assert connection.buffered <= 2 * 1000
    assert connection.buffered == 2 * 1000


@pytest.mark.parametrize("hidden", [64, 4096])
def test_what_is_planned_is_what_is_made(hidden: int) -> None:
    model = Model(layers=2, hidden=hidden, heads=4, vocab=4096)
    spec = Spec(model=model, train=Train(global_batch=RANKS, micro_batch=1))
    placement = Placement(RANKS, 4, False)
    planned: dict[str, Any] = need(spec, layers(model), placement, GPUS).rank
    _, made = rounds(256 * MIB, units(spec))
    assert made <= planned["communication"] <= made + 4 * RANKS * 2 * 4096
    on_cpus = need(spec, layers(model), placement, CPUS).rank
    assert on_cpus["communication"] == 2 * 4 * MIB
