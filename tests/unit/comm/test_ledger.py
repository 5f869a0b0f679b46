"""The ledger's sums, and the pure arithmetic under the collectives."""

import itertools

import pytest

from hpczero.comm.trace import Ledger

torch = pytest.importorskip("torch")
from hpczero.comm.mpi_backend import (  # noqa: E402  # needs torch
    binomial_tree,
    combine_parts,
    shard,
)


def test_sums_by_axis_and_operation() -> None:
    ledger = Ledger()
    ledger.entry("data", "all_reduce").sent(10, 5)
    ledger.entry("data", "all_reduce").sent(1, 0)
    ledger.entry("tensor", "barrier")
    ledger.entry("data", "all_reduce").seconds += 0.5
    assert ledger.as_dict() == {
        "data": {
            "all_reduce": {
                "count": 2,
                "bytes": 16,
                "inside": 11,
                "between": 5,
                "shared": 0,
                "seconds": 0.5,
            }
        }
    }
    assert ledger.seconds == 0.5


def test_a_reset_reaches_operations_that_are_under_way() -> None:
    ledger = Ledger()
    held = ledger.entry("data", "all_reduce")
    held.sent(10, 0)
    ledger.reset()
    assert ledger.as_dict() == {}
    held.sent(3, 0)
    assert ledger.as_dict()["data"]["all_reduce"]["bytes"] == 3


def test_shards_cover_every_element_once() -> None:
    for elements, ranks in itertools.product(range(40), range(1, 12)):
        shards = [shard(elements, ranks, rank) for rank in range(ranks)]
        assert [element for part in shards for element in range(elements)[part]] == list(
            range(elements)
        )
        lengths = [part.stop - part.start for part in shards]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] == -(-elements // ranks)


def test_every_place_of_the_tree_has_one_parent_that_knows_it() -> None:
    for size in range(1, 70):
        for place in range(size):
            parent, children = binomial_tree(place, size)
            assert (parent is None) == (place == 0)
            assert parent is None or place in binomial_tree(parent, size)[1]
            assert all(binomial_tree(child, size)[0] == place for child in children)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_two_half_precision_parts_are_added_as_in_fp32_and_rounded_once(
    dtype: object, op: str
) -> None:
    """The short cut for two parts: every number of the format, with itself shuffled."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    other = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(1))]
    found = torch.empty_like(every)
    combine_parts(found, (every, other), op)
    wide = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op](
        every.float(), other.float()
    ).to(dtype)
    same = (found.view(torch.int16) == wide.view(torch.int16)) | (found.isnan() & wide.isnan())
    assert bool(same.all())


def test_the_output_may_be_any_of_the_parts() -> None:
    for count, place in itertools.product(range(2, 5), range(4)):
        if place < count:
            parts = [torch.full((200_000,), float(2**number)) for number in range(count)]
            combine_parts(parts[place], parts, "sum")
            assert bool((parts[place] == 2**count - 1).all())
