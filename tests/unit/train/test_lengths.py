"""schedule.seq_len: sequences grow over the steps, batches keep their tokens, any rank reads its
part.
"""

import pytest
import torch

from hpczero.data.dataset import SyntheticSource
from hpczero.data.samples import window
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Data, Model, Schedule, Spec, Train
from hpczero.train.batches import Batches

LONGEST = 24


def spec_of(seq_len: tuple[tuple[int, int], ...], documents: str = "packed") -> Spec:
    return Spec(
        seed=5,
        model=Model(vocab=1000, seq_len=LONGEST),
        data=Data(source="synthetic", documents=documents),
        train=Train(steps=9, global_batch=6, micro_batch=2),
        schedule=Schedule(seq_len=seq_len),
    )


def batches(spec: Spec, rank: int = 0, ranks: int = 1) -> Batches:
    return Batches(spec, SyntheticSource(5, 1000, spec.seq_len), rank, ranks)


def tokens_of(of: Batches, step: int) -> torch.Tensor:
    return torch.cat([batch.tokens for batch in of.training(step)])


GROWING = spec_of(((0, 6), (3, 12), (5, 24)))


@pytest.mark.parametrize(("step", "length"), [(0, 6), (2, 6), (3, 12), (4, 12), (5, 24), (8, 24)])
def test_each_step_has_its_length_and_all_tokens(step: int, length: int) -> None:
    micro_batches = batches(GROWING).training(step)
    assert {batch.tokens.shape for batch in micro_batches} == {(48 // length, length)}
    assert sum(batch.tokens.numel() for batch in micro_batches) == 6 * LONGEST
    assert {batch.step for batch in micro_batches} == {step}


@pytest.mark.parametrize("step", [0, 3, 4, 7])
def test_the_samples_are_those_of_a_run_that_had_this_length_from_the_beginning(step: int) -> None:
    found = tokens_of(batches(GROWING), step)
    length = found.shape[1]
    source, count = SyntheticSource(5, 1000, length), 6 * LONGEST // length
    expected = torch.empty(count, length + 1, dtype=torch.int64)
    for row, number in enumerate(range(step * count, (step + 1) * count)):
        source.fill("train", window(5, source.windows("train"), number), expected[row].numpy())
    assert torch.equal(found, expected[:, :-1])


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_read_together_what_one_reads(ranks: int) -> None:
    for step in range(7):
        parts = [tokens_of(batches(GROWING, rank, ranks), step) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), tokens_of(batches(GROWING), step))
        counts = {len(batches(GROWING, rank, ranks).training(step)) for rank in range(ranks)}
        assert counts == {len(batches(GROWING, 0, ranks).parts())}


def test_evaluations_have_the_longest() -> None:
    found = batches(GROWING).evaluation(0)
    assert {batch.tokens.shape[1] for batch in found} == {LONGEST}


@pytest.mark.parametrize(
    ("seq_len", "text"),
    [
        (((1, 6),), "schedule.seq_len = [[1, 6]]: must begin at step 0"),
        (((0, 6), (0, 12)), "and each entry at a later step than the one before"),
        (((0, 6), (6, 12), (3, 24)), "and each entry at a later step than the one before"),
        (((0, 7),), "has sequences of 7, which do not divide the longest of 24"),
        (((0, 48),), "has sequences of 48, which do not divide the longest of 24"),
    ],
)
def test_what_is_refused(seq_len: tuple[tuple[int, int], ...], text: str) -> None:
    (found,) = contradictions(spec_of(seq_len))
    assert text in found.text
