"""The times that `scripts/bench_kernels.py` takes of kernels, on a GPU that is made of numbers."""

import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tests.support.launch import CHECKOUT

SCRIPTS = CHECKOUT / "scripts"
CYCLES = 2e9  # a second
CALL = 50e-6  # seconds of the host
RECORD = 1e-6


class Simulated:
    """A host and a device, each with a clock of its own; what is asked of the device begins when
    the host has asked and the device is through with what came before.
    """

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def asked(self, seconds: float, call: float = 0.0) -> float:
        self.host += call
        self.device = max(self.device, self.host) + seconds
        return self.device


class Event:
    def __init__(self, machine: Simulated) -> None:
        self._machine, self._at = machine, 0.0

    def record(self) -> None:
        self._at = self._machine.asked(0.0, RECORD)

    def query(self) -> bool:
        return self._machine.host >= self._at

    def synchronize(self) -> None:
        self._machine.host = max(self._machine.host, self._at)

    def elapsed_time(self, end: "Event") -> float:
        return (end._at - self._at) * 1e3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    made = Simulated()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(made))
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: made.asked(cycles / CYCLES), raising=False
    )
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    return made


def clock(**changes: Any) -> Any:
    import bench_kernels

    return bench_kernels.Clock("cuda", **({"rounds": 5, "warmup": 1, "calls": 0} | changes))


@pytest.mark.parametrize("kernel", [2e-6, 20e-6, 500e-6])
@pytest.mark.parametrize("call", [CALL, 3e-3])
def test_a_kernels_time_is_its_own_however_long_the_host_takes(
    machine: Simulated, kernel: float, call: float
) -> None:
    """Two calls: between them the device would stand still if it were not asleep before."""

    def run(number: int) -> None:
        machine.asked(kernel / 2, call)
        machine.asked(kernel / 2, call)

    (found,) = clock().seconds({"ours": run}, 2).values()
    assert found == pytest.approx(kernel, rel=0.01)


def test_what_waits_for_the_device_is_said(machine: Simulated) -> None:
    def run(number: int) -> None:
        machine.host = machine.asked(1e-6, CALL)

    with pytest.raises(SystemExit, match="waits for the device"):
        clock().seconds({"ours": run}, 1)
