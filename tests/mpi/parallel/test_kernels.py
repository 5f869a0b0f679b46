"""The kernels that HPCZERO_KERNELS asks for are taken on all ranks, or on none."""

from collections.abc import Iterator

import pytest
import torch

from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.train.setup import use_kernels
from hpczero_kernels import dispatch

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def nothing_forced() -> Iterator[None]:
    yield
    dispatch.force("")


def test_what_is_asked_for_is_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCZERO_KERNELS", "adamw=torch")
    use_kernels(world)
    assert dispatch.choose("adamw", torch.ones(1)) == "torch"
    monkeypatch.setenv("HPCZERO_KERNELS", "nrom=torch")
    with pytest.raises(InputError, match="HPCZERO_KERNELS: there is no operation nrom"):
        use_kernels(world)


def test_ranks_that_ask_for_different_ones_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        return
    monkeypatch.setenv("HPCZERO_KERNELS", "adamw=torch" if world.rank == world.size - 1 else "")
    with pytest.raises(
        InputError, match="HPCZERO_KERNELS is not the same on all ranks: '', 'adamw=torch'"
    ):
        use_kernels(world)
    assert dispatch.choose("adamw", torch.ones(1)) == "numba"
