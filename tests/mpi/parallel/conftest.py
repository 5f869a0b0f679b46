"""Fixtures: memory of gathered weights that shows every use after its release; a device."""

from collections.abc import Callable, Iterator

import pytest
import torch

from hpczero import device
from hpczero.comm.world import World
from hpczero.device import device_of_rank
from hpczero.parallel.zero.buffers import Lender, Loan
from tests.support.queued import Queued


@pytest.fixture
def poisoned_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is released with NaN as soon as nobody sees it."""
    lend = Lender.lend

    def poisoned(lender: Lender, part: torch.Tensor, returned: Callable[[], None]) -> Loan:
        def spoilt() -> None:
            if part.is_floating_point():
                part.fill_(float("nan"))
            returned()

        return lend(lender, part, spoilt)

    monkeypatch.setattr(Lender, "lend", poisoned)


@pytest.fixture
def there(world: World) -> Iterator[World | None]:
    """The same ranks, whose tensors are on a device."""
    part = world.part(range(world.size)) if world else None
    if part:
        part.use(
            device_of_rank("cuda", part.local_rank, part.local_size)
            if device.visible()
            else Queued(),
            "mpi",
        )
    yield part
    if part:
        part.close()
