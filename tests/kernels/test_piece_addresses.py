"""Addresses of a sum's pieces, which reach the GPU by value: no upload, and no wait."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.reduce import sum_pieces_reference
from tests.support.ptx import missing

pytestmark = pytest.mark.skipif(bool(missing()) and not SIMULATED, reason=missing())

UNIT = 1 << 12  # elements


def by_messages(
    ranks: int, rank: int, buffer: torch.Tensor, own: torch.Tensor
) -> list[torch.Tensor]:
    """Return the pieces as MPI brings them.

    The neighbour's is first, in slots of one buffer; one's own lies elsewhere.
    """
    slots = {(rank + distance) % ranks: distance - 1 for distance in range(1, ranks)}
    pieces = [buffer[slots[peer]] if peer != rank else own for peer in range(ranks)]
    return [piece.view(-1) for piece in pieces]


def by_nccl(ranks: int, rank: int, buffer: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[peer].view(-1) for peer in range(ranks)]


CARRIERS = [by_messages, by_nccl]


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    from hpczero_kernels.cuda import reduce

    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        type(reduce.add), "launch", lambda self, *arguments: found.append(arguments)
    )
    return found


def test_no_call_uploads_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more addresses than a cache would keep, as in a model of 7 billion parameters."""
    from hpczero_kernels.cuda import reduce

    seen, made = launched(monkeypatch), torch.tensor
    uploads = list[object]()

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        uploads.append(given)
        return made(*given, **named)

    monkeypatch.setattr(torch, "tensor", counted)
    gradients = torch.zeros(5000 + 8, 8)
    buffer = torch.zeros(8, 8)
    for unit in range(5000):
        pieces = by_messages(8, 3, buffer, gradients[unit])
        reduce.sum_pieces(pieces, gradients[unit], False, None, None)
    assert len(seen) == 5000
    assert not uploads


def places(found: list[Any]) -> list[int]:
    return [
        (run.start + index * run.stride) % 2**64 for run in found for index in range(run.pieces)
    ]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 17, 64])
def test_what_a_carrier_brings_are_three_runs_at_most(
    carrier: Callable[..., list[torch.Tensor]], ranks: int
) -> None:
    from hpczero_kernels.cuda.reduce import runs

    low, high = torch.zeros(2, 64 * UNIT // 64).unbind()
    buffer = torch.zeros(ranks, 64)
    for rank in range(ranks):
        for own in (low[:64], high[:64]):
            addresses = [piece.data_ptr() for piece in carrier(ranks, rank, buffer, own)]
            found = runs(addresses)
            assert len(found) <= 3
            assert places(found) == [(address - addresses[0]) % 2**64 for address in addresses]


@pytest.mark.parametrize(
    "addresses",
    [
        [0],
        [64, 0],
        [0, 64, 128, 256, 64, 0],
        [512, 256, 0, 1024],
        [8, 8, 8],
        [1 << 62, 0, 1 << 61],
        [0, 64, 64, 0],
    ],
)
def test_runs_are_the_addresses_in_their_order(addresses: list[int]) -> None:
    from hpczero_kernels.cuda.reduce import runs

    assert places(runs(addresses)) == [(address - addresses[0]) % 2**64 for address in addresses]


@pytest.mark.skipif(not SIMULATED, reason="the kernel itself runs in numba's simulator")
@pytest.mark.parametrize(
    "order", [[0, 1, 2], [2, 0, 1], [3, 1, 0, 2], [0, 2, 1, 5, 3, 4], [5, 5, 1]]
)
def test_the_sum_of_pieces_anywhere_is_the_references(order: list[int]) -> None:
    from hpczero_kernels.cuda import reduce

    drawn = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    pieces = [drawn[place] for place in order]
    expected, out = torch.zeros(24), torch.zeros(24)
    sum_pieces_reference(pieces, expected, False, None)
    reduce.sum_pieces(pieces, out, False, None, None)
    assert torch.equal(out, expected)
