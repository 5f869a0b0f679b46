"""Turns on a GPU, as far as CPUs can show it: events of the device are the clock."""

from typing import Any

import pytest
import torch

from hpczero.calibrate.compute import precisions
from hpczero.calibrate.turns import Turns
from hpczero.device import Device


class Clock:
    """A device's time, in milliseconds: it goes on only when something is done."""

    now = 0.0


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


class Gpu(Device):
    kind = "cuda"
    has_queues = True


class Alone:
    """A world of one rank."""

    device = Gpu()
    rank = 0
    local_size = 1

    @property
    def everyone(self) -> "Alone":
        return self

    def barrier(self) -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        pass

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_what_a_gpu_takes_is_read_from_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)

    def work() -> None:
        Clock.now += 2.5

    turns = Turns(Alone())  # type: ignore[arg-type]
    turns.begin(0.5, 1)
    timing = turns.of(work)
    assert timing.median == pytest.approx(2.5e-3)
    assert timing.low == timing.high
    assert not waits
    host = turns.of(work, by_host=True)
    assert host.median < 1e-3
    assert waits


@pytest.mark.parametrize(
    ("bf16", "expected"), [(True, ("bf16", "fp16", "fp32")), (False, ("fp16", "fp32"))]
)
def test_a_gpu_is_measured_in_the_precisions_that_it_has(
    bf16: bool, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    assert precisions(Gpu()) == expected
