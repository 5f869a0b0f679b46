"""The account of memory: its kinds, its cost, and its line, with figures of a device's own."""

import platform
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hpczero.device import CPU, Device, Memory
from hpczero.planner.needs import Need
from hpczero.planner.placement import Placement
from hpczero.train import process
from hpczero.train.memory_account import (
    Expected,
    MemoryAccount,
    by_kind,
    fullest_rank,
    steps_left_out,
)

STATES = {"weights": 20, "moments": 40, "master": 0}


def test_kinds_add_up_to_what_is_held() -> None:
    found = by_kind(STATES, held=200, on_top=70, kept=50)
    assert found == {
        "weights": 20,
        "moments": 40,
        "activations": 50,
        "workspace": 20,
        "runtime": 70,
    }
    assert sum(found.values()) == 200


def test_activations_that_are_away_are_some_too() -> None:
    """They have memory from step to step."""
    found = by_kind({"weights": 20, "activations": 30}, held=100, on_top=15, kept=10)
    assert found == {"weights": 20, "activations": 40, "workspace": 5, "runtime": 35}


def test_activations_that_no_peak_shows_are_not_counted() -> None:
    """Memory may be given out and never touched."""
    assert by_kind(STATES, held=100, on_top=30, kept=50)["activations"] == 30
    assert "activations" not in by_kind(STATES, held=100, on_top=-5, kept=50)
    assert sum(by_kind(STATES, held=100, on_top=-5, kept=50).values()) == 100


def test_what_is_not_told_apart_is_workspace() -> None:
    assert by_kind({}, held=10, on_top=7, kept=None) == {"workspace": 7, "runtime": 3}


@pytest.mark.parametrize("seconds", [1e-4, 0.03, 1.0, 500.0])
@pytest.mark.parametrize("cost", [0.0, 1e-3, 0.02, 3.0])
def test_measuring_costs_less_than_a_hundredth(cost: float, seconds: float) -> None:
    left_out = steps_left_out(cost, seconds)
    assert left_out >= 1
    assert cost <= 0.01 * (left_out + 1) * seconds
    assert left_out == 1 or cost > 0.01 * (left_out - 1) * seconds


def test_the_line_is_the_fullest_ranks() -> None:
    world: Any = SimpleNamespace(hosts=["n1", "n1", "n2"], node_of_rank=[0, 0, 1])
    figures = [{"held": held, "measured": {"runtime": held}} for held in (5, 9, 8)]
    predicted = [{"weights": rank, "moments": 0, "files": 0} for rank in range(3)]
    assert fullest_rank(world, figures, predicted) == {
        "rank": 1,
        "host": "n1",
        "held": 9,
        "node": 14,
        "predicted": {"weights": 1},
        "measured": {"runtime": 9},
    }


class Gpu(Device):
    """A device whose tensors come and go as a test says."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def hold(self, size: int) -> None:
        self.held = size
        self.peak = max(self.peak, size)

    def memory(self) -> Memory:
        return Memory(1000, 1000 - self.held, self.held, self.peak)

    def new_peak(self) -> int:
        peak, self.peak = self.peak, self.held
        return peak


def account_on(device: Device) -> MemoryAccount:
    """Return the account of one rank: 60 bytes of states, 5 of them on the host, 7 in a file."""
    world: Any = SimpleNamespace(
        device=device,
        hosts=["n1"],
        node_of_rank=[0],
        gather_objects=lambda value: [value],
        broadcast_object=lambda value: value,
    )
    arena = SimpleNamespace(sizes={"weights": 55, "moments": 7}, of_zeros={"moments"})
    need = Need(1, {"weights": 55, "activations": 30, "runtime": 100}, {}, 0, files=8)
    expected = Expected(Placement(1, 1, False), need)
    engine: Any = SimpleNamespace(arena=arena, on_backward=None)
    states = {"weights": 55, "gradients on the host": 5}
    return MemoryAccount(world, engine, expected, lambda: states)


def step_of(account: MemoryAccount, gpu: Gpu, number: int) -> dict[str, Any] | None:
    gpu.hold(60)
    account.begin_step()
    gpu.hold(90)
    account._at_backward()
    gpu.hold(110)
    gpu.hold(60)
    return account.end_step(number)


def test_a_step_on_a_gpu() -> None:
    """The states, five bytes of others, what forward has kept, and the peak."""
    gpu = Gpu()
    gpu.hold(500)  # before training
    account = account_on(gpu)
    assert step_of(account, gpu, 1) is None
    line = step_of(account, gpu, 2)
    assert line
    on_host = line.pop("on_host")
    assert line == {
        "step": 2,
        "rank": 0,
        "host": "n1",
        "held": 110,
        "node": 110,
        "files": {"predicted": 8, "measured": 7},
        "predicted": {"weights": 55, "activations": 30},
        "measured": {"weights": 55, "activations": 30, "workspace": 20, "runtime": 5},
    }
    assert on_host["predicted"] == {"runtime": 100}
    assert on_host["measured"]["gradients on the host"] == 5
    assert sum(on_host["measured"].values()) == on_host["held"] > 1_000_000


def test_a_step_that_is_left_out_is_followed_by_one_that_is_measured() -> None:
    gpu = Gpu()
    account = account_on(gpu)
    step_of(account, gpu, 1)
    account.begin_step()
    account.leave_out()
    assert account.end_step(2) is None
    assert step_of(account, gpu, 3)


def test_a_step_that_is_left_out_gives_nothing_back_any_more() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "gives" in thread.name]

    account = account_on(CPU)
    account.begin_step()
    account.end_step(1)
    account.begin_step()
    assert threads() == ["gives memory back"]
    account.leave_out()
    assert not threads()


def line_of_cpu() -> dict[str, Any] | None:
    """Return the line of a step that keeps 40 MB for backward, which needs 20 MB more."""
    account = account_on(CPU)
    account.begin_step()
    account.end_step(1)
    account.begin_step()
    kept = torch.ones(10_000_000)
    account._at_backward()
    more = torch.ones(5_000_000)
    del kept, more
    return account.end_step(2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this malloc can be asked")
def test_a_step_in_the_computers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_of_cpu()
    assert line
    measured = line["measured"]
    assert sum(measured.values()) == line["held"]
    assert measured["activations"] == pytest.approx(40e6, rel=0.02)
    assert measured["workspace"] == pytest.approx(20e6, rel=0.2)
    monkeypatch.setattr(process, "held", lambda: 0)
    assert line_of_cpu() is None, "it is not known what the process holds"
