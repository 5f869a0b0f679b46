"""The sum of a step's losses, which the device may make later."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hpczero.device import CPU  # noqa: E402  # needs torch
from hpczero.parallel.step import _add_up  # noqa: E402


def test_losses_of_one_element_are_summed_whatever_their_shape() -> None:
    settled: list[bool] = []
    progress = SimpleNamespace(snapshot=lambda: lambda: settled.append(True))
    group = SimpleNamespace(connection=SimpleNamespace(progress=progress))
    engine = SimpleNamespace(device=CPU, axis=SimpleNamespace(group=group))
    read = _add_up([torch.tensor(1.5), torch.tensor([2.0]), torch.tensor([[3.0]])], engine)  # type: ignore[arg-type]
    assert not settled
    assert read() == 6.5
    assert settled
    assert _add_up([], engine)() == 0.0  # type: ignore[arg-type]
