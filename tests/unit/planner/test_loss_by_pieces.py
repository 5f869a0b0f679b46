"""A loss by pieces of "auto" positions counts as one by pieces of as many as it says."""

from collections.abc import Iterator

import pytest

from hpczero.comm.grid import Grid
from hpczero.model import families
from hpczero.model.shapes import Peak
from hpczero.parallel.activations.choice import loss_rows
from hpczero.planner.activations import activations
from hpczero.planner.sent import Sent
from hpczero.planner.volumes import Volumes
from hpczero.spec.schema import Memory, Model, Parallel, Spec, Train

Counted = tuple[dict[str, dict[str, Sent]], Peak]


def counted(seq_len: int, *chunks: int | str) -> Iterator[Counted]:
    """Yield for each value of memory.loss_chunk what a tensor rank sends, and its activations."""
    for chunk in chunks:
        spec = Spec(
            model=Model(layers=2, hidden=64, heads=4, vocab=9999, seq_len=seq_len),
            train=Train(global_batch=2, micro_batch=2),
            parallel=Parallel(tensor=2, sequence_parallel=True),
            memory=Memory.model_validate({"loss_chunk": chunk}),
        )
        grid = Grid.build(spec.parallel, [0, 0])
        sent = Volumes(spec, families.layers(spec.model), 1).of_rank(grid, 0)
        yield sent, activations(spec, 2)


def test_of_few_positions_the_loss_is_whole() -> None:
    auto, whole, pieces = counted(1000, "auto", 0, 2048)
    assert auto == whole
    assert auto[0] != pieces[0], "whose backward gathers the head's input once less"


def test_of_many_it_is_made_by_pieces() -> None:
    auto, pieces, whole = counted(8192, "auto", 2048, 0)
    assert auto == pieces
    assert auto[0] != whole[0]
    logits = 2 * 2 * 8192 * 9999 // 2  # bytes of a tensor rank's
    assert whole[1].widest - auto[1].widest > 0.8 * logits


@pytest.mark.parametrize(
    ("positions", "rows"),
    [(0, 0), (2047, 0), (2048, 2048), (16_384, 2048), (16_385, 2049), (10**6, 125_000)],
)
def test_pieces_are_few_and_not_small(positions: int, rows: int) -> None:
    assert loss_rows(Memory(loss_chunk="auto"), positions) == rows
    for chunk in (0, 64):
        assert loss_rows(Memory(loss_chunk=chunk), positions) == chunk
