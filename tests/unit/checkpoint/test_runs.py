"""Reading in few goes gives what reading one by one gives."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpczero.checkpoint.index import Index
from hpczero.checkpoint.load import Checkpoint, Wanted
from hpczero.checkpoint.piece_table import Table, Tensor
from hpczero.checkpoint.shard_file import SLOTS, Array, Damaged, Unreadable

TENSORS = Tensor("a", (4, 8)), Tensor("b", (6,)), Tensor("c", (3, 2))
PIECES = [  # tensor, rank, offset, start, stop
    (0, 0, 0, (0, 0), (4, 5)),
    (0, 1, 0, (0, 5), (4, 8)),
    (1, 0, 20, (0, 0), (4, 1)),
    (1, 1, 12, (4, 0), (6, 1)),
    (2, 1, 14, (0, 0), (3, 2)),
]
BOXES = {
    "whole": [("a", [(0, 4), (0, 8)]), ("b", [(0, 6)]), ("c", [(0, 3), (0, 2)])],
    "as rank 0 has them": [("a", [(0, 4), (0, 5)]), ("b", [(0, 4)])],
    "as rank 1 has them": [("a", [(0, 4), (5, 8)]), ("b", [(4, 6)]), ("c", [(0, 3), (0, 2)])],
    "a part with gaps that is as long as what is wanted": [
        ("a", [(0, 4), (4, 8)])
    ],  # in rank 0's piece: every fifth of 16 elements
    "rows": [("a", [(1, 3), (0, 5)]), ("a", [(3, 4), (0, 5)]), ("c", [(1, 3), (0, 2)])],
    "one after the other, of two ranks": [
        ("a", [(2, 3), (0, 2)]),
        ("b", [(4, 6)]),
    ],  # rank 0 up to element 12, rank 1 from there
    "a row left out": [("a", [(0, 1), (0, 5)]), ("a", [(2, 3), (0, 5)])],
    "nothing": [("b", [(2, 2)])],
}


class Data:
    """Data of two ranks; counts readings."""

    def __init__(self, damaged: int = -1, error: type[Exception] = Damaged) -> None:
        self.damaged, self.error, self.readings = damaged, error, 0
        self.of_rank = [np.arange(24, dtype=np.float32), 100 + np.arange(20, dtype=np.float32)]

    def read(self, rank: int, slot: int, first: int, out: Array, what: str) -> None:
        self.readings += 1
        if rank == 1 and first <= self.damaged < first + out.size:
            raise self.error(f"damaged, in {what}")
        out[:] = self.of_rank[rank][first : first + out.size]


def opened(data: Data) -> Checkpoint:
    columns = [np.array([piece[column] for piece in PIECES], np.uint64) for column in range(5)]
    content: Any = SimpleNamespace(shards=[], slots=SLOTS)
    checkpoint = Checkpoint(Path(), content, Index(Table(TENSORS, *columns), {}, {}))
    checkpoint.shards = data  # type: ignore[assignment]
    return checkpoint


def wanted_of(name: str, gap: int) -> list[Wanted]:
    found: list[Wanted] = []
    at = gap
    for tensor, cuts in BOXES[name]:
        found.append((at, tensor, tuple(slice(*cut) for cut in cuts)))
        at += int(np.prod([stop - start for start, stop in cuts])) + gap
    return found


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("name", BOXES)
def test_runs_are_what_one_by_one_would_be(name: str, gap: int) -> None:
    checkpoint, wanted = opened(Data()), wanted_of(name, gap)
    found = np.full(100, -1, np.float32)
    checkpoint.read_runs(0, checkpoint.runs(wanted), found)
    for at, tensor, box in wanted:
        alone = checkpoint.read(0, tensor, box).reshape(-1)
        assert (found[at : at + alone.size] == alone).all()
        found[at : at + alone.size] = -1
    assert (found == -1).all()


@pytest.mark.parametrize(
    ("name", "readings"), [("as rank 0 has them", 1), ("as rank 1 has them", 1), ("rows", 2)]
)
def test_what_lies_together_is_read_in_one_go(name: str, readings: int) -> None:
    checkpoint = opened(data := Data())
    checkpoint.read_runs(0, checkpoint.runs(wanted_of(name, 0)), np.empty(100, np.float32))
    assert data.readings == readings


def test_damage_in_a_run_names_the_tensor_that_has_it() -> None:
    checkpoint = opened(Data(damaged=13))
    with pytest.raises(Damaged, match="in b"):
        checkpoint.read_runs(
            0, checkpoint.runs(wanted_of("as rank 1 has them", 0)), np.empty(100, np.float32)
        )


def test_what_cannot_be_read_is_not_tried_again() -> None:
    checkpoint = opened(data := Data(damaged=13, error=Unreadable))
    with pytest.raises(Unreadable):
        checkpoint.read_runs(
            0, checkpoint.runs(wanted_of("as rank 1 has them", 0)), np.empty(100, np.float32)
        )
    assert data.readings == 1


def test_a_range_that_ends_before_it_begins_is_empty_as_numpys() -> None:
    tensor = opened(Data())["/model/a"]
    assert tensor[3:1].shape == tensor.numpy()[3:1].shape == (0, 8)
