"""Rounds of what torch.distributed's collectives sum up."""

import pytest
import torch

from hpczero.comm.torch_backend import TorchCarrier
from hpczero_kernels.reduce import BLOCK


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("room", [1 << 20, 4 << 20, (4 << 20) + 1000])
def test_a_round_is_made_of_whole_blocks_of_the_norms_squares(ranks: int, room: int) -> None:
    carrier = object.__new__(TorchCarrier)
    carrier.size, carrier._room, carrier._buffer = ranks, room, None
    leaving, arriving = carrier._slots(torch.empty(10_000_000))
    assert leaving.shape == arriving.shape
    assert leaving.shape[1] % (ranks * BLOCK) == 0
    assert 8 * (leaving.numel() + BLOCK * 2 * ranks) > room // 2, "it uses most of the room"
