"""Fixture: memory of gathered weights that shows every use after its release."""

import pytest
import torch

from hpczero.parallel.zero.buffers import Region


@pytest.fixture
def poisoned_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is released with NaN at once."""
    give_back = Region.give_back

    def poisoned(region: Region, part: torch.Tensor) -> None:
        part.fill_(float("nan"))
        give_back(region, part)

    monkeypatch.setattr(Region, "give_back", poisoned)
