"""The validation loss and its standard error, from a sample of windows of a split whose
documents differ.
"""

from collections.abc import Sequence
from math import isclose
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpczero.data.samples import window
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Spec, Train
from hpczero.train.batches import Batches, Tally, Validation

SEQ_LEN = 16


def split_of_documents(windows: int, document: int = 25) -> np.ndarray:
    """Each window's loss, in nats per token: documents are easy or hard as a whole, and the hard
    ones come first.
    """
    random = np.random.default_rng(7)
    documents = np.sort(random.gamma(2.0, 0.8, -(-windows // document)))[::-1]
    return np.repeat(documents, document)[:windows] + random.normal(0, 0.1, windows)


def batch_of(samples: int) -> MicroBatch:
    tokens = torch.zeros(samples, SEQ_LEN, dtype=torch.int64)
    return MicroBatch(tokens, tokens, torch.arange(samples), 0, 1)


def evaluated(
    losses: np.ndarray, seed: int, count: int, sizes: Sequence[int], by_sample: bool = True
) -> Validation:
    """Evaluate as a run does it: `count` windows in micro-batches of these sizes in turn."""
    drawn = [float(losses[window(seed, len(losses), sample)]) * SEQ_LEN for sample in range(count)]
    batches, told = [], []
    while drawn:
        size = sizes[len(batches) % len(sizes)]
        own, drawn = drawn[:size], drawn[size:]
        batches.append(batch_of(len(own)))
        told.append(own if by_sample else [sum(own)])
    return Tally.of(batches, told).validation(len(losses), len(losses) * SEQ_LEN)


def covered(losses: np.ndarray, seeds: int, count: int, by_sample: bool = True) -> int:
    """How often the interval of 95 % has the whole split's loss in it."""
    found = [evaluated(losses, seed, count, [4], by_sample) for seed in range(seeds)]
    return sum(abs(one.loss - losses.mean()) <= 1.96 * (one.standard_error or 0) for one in found)


@pytest.mark.parametrize(("windows", "count"), [(5000, 128), (1000, 64), (160, 128)])
def test_the_standard_error_covers_the_whole_splits_loss(windows: int, count: int) -> None:
    losses = split_of_documents(windows)
    assert covered(losses, 20, count) >= 18
    assert 90 <= covered(losses, 100, count) <= 99


def test_one_loss_for_a_micro_batch_tells_the_same_standard_error() -> None:
    losses = split_of_documents(1000)
    assert covered(losses, 20, 128, by_sample=False) >= 18
    assert 90 <= covered(losses, 100, 128, by_sample=False) <= 99


def test_the_first_windows_are_not_the_split() -> None:
    losses = split_of_documents(1000)
    assert losses[:64].mean() > 2 * losses.mean(), "what evaluation read before"
    assert evaluated(losses, 1, 64, [4]).loss == pytest.approx(losses.mean(), rel=0.2)


@pytest.mark.parametrize("sizes", [[1], [3, 5], [8], [37], [0, 7]])
def test_how_windows_are_dealt_out_changes_nothing(sizes: list[int]) -> None:
    losses = split_of_documents(100)
    found, expected = evaluated(losses, 3, 37, sizes), evaluated(losses, 3, 37, [37])
    assert (found.tokens, found.of_tokens) == (37 * SEQ_LEN, 100 * SEQ_LEN)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-9)


def test_a_split_that_is_read_whole_has_no_error() -> None:
    losses = split_of_documents(40)
    found = evaluated(losses, 1, 40, [7])
    assert isclose(found.loss, losses.mean())
    assert found.standard_error == 0


def test_one_window_says_nothing_about_the_others() -> None:
    assert evaluated(split_of_documents(40), 1, 1, [1]).standard_error is None


def test_ranks_add_up() -> None:
    losses = [[16.0, 32.0], [48.0], [8.0, 8.0, 8.0]]
    whole = Tally.of([batch_of(len(own)) for own in losses], losses)
    parts = [Tally.of([batch_of(len(own))], [own]) for own in losses]
    assert whole == parts[0] + parts[1] + parts[2]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_has_no_standard_error(broken: float) -> None:
    losses = np.full(100, 2.0)
    losses[window(1, len(losses), 3)] = broken
    assert evaluated(losses, 1, 20, [4]).standard_error is None


def test_the_standard_error_is_that_of_a_sample_without_replacement() -> None:
    """By numpy: the variance has n - 1 in it, and what was read already is no error."""
    losses = split_of_documents(10)
    drawn = [losses[window(3, 10, sample)] for sample in range(4)]
    expected = np.sqrt(np.var(drawn, ddof=1) / 4 * (1 - 4 / 10))
    assert evaluated(losses, 3, 4, [1]).standard_error == pytest.approx(expected)


@pytest.mark.parametrize(("windows", "batches"), [(0, 0), (5, 1), (8, 1), (9, 2), (100, 3)])
def test_the_last_batch_of_a_small_split_is_a_shorter_one(windows: int, batches: int) -> None:
    spec = Spec(train=Train(global_batch=8, eval_batches=3))
    source = SimpleNamespace(windows=lambda split: windows)
    assert Batches(spec, source, 0, 1).evaluation_batches() == batches
