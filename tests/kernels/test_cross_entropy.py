"""Cross-entropy in parts of the vocabulary, against torch on the whole vocabulary in fp64."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from hpczero_kernels import cross_entropy
from hpczero_kernels.cross_entropy import (
    IGNORED,
    CrossEntropy,
    shard_gradient_,
    shard_statistics,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def in_parts(
    logits: torch.Tensor, targets: torch.Tensor, bounds: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's loss, and the gradient of twice their sum.

    The parts are bounds[0] .. bounds[1] - 1 and so on.
    """
    parts = [(logits[:, first:stop].clone(), first) for first, stop in pairwise(bounds)]
    own_most, own_sums, of_targets = map(
        torch.stack,
        zip(*(shard_statistics(part, targets, first) for part, first in parts), strict=True),
    )
    most = own_most.amax(0)
    sums = (own_sums * (own_most - most).exp()).sum(0)
    gradient = torch.cat(
        [
            shard_gradient_(part, targets, first, most, sums, torch.tensor(2.0))
            for part, first in parts
        ],
        1,
    )
    return sums.log() + (most - of_targets.sum(0)), gradient


def exactly(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.double().requires_grad_()
    losses = functional.cross_entropy(wide, targets, reduction="none")
    (2 * losses.sum()).backward()
    return losses.detach(), wide.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "bounds", [[0, 257], [0, 65, 129, 193, 257], [0, 1, 1, 256, 257, 257]], ids=str
)
@pytest.mark.parametrize("block", [1, 300, 1 << 18])
def test_parts_together_are_the_whole(bounds, dtype, block, monkeypatch):
    """Logits up to +-80 and a common offset of 1000 (fp16: 100), which no exponential survives."""
    monkeypatch.setattr(cross_entropy, "_BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    logits = (
        torch.randn(41, 257, generator=generator) * 20 + (100 if dtype == torch.float16 else 1000)
    ).to(dtype)
    targets = torch.randint(0, 257, (41,), generator=generator)
    losses, gradient = exactly(logits, targets)
    own_losses, own_gradient = in_parts(logits, targets, bounds)
    torch.testing.assert_close(own_losses.double(), losses, rtol=1e-6, atol=1e-6)
    assert own_gradient.dtype is dtype
    assert ((own_gradient.double() - gradient).norm() / gradient.norm()) < max(
        2e-6, torch.finfo(dtype).eps / 2
    )


def test_no_rows_and_no_columns():
    none = torch.zeros(0, dtype=torch.int64)
    assert [part.shape for part in shard_statistics(torch.zeros(0, 5), none, 0)] == [(0,)] * 3
    assert shard_gradient_(
        torch.zeros(0, 5), none, 0, torch.zeros(0), torch.zeros(0), torch.tensor(1.0)
    ).shape == (0, 5)
    most, sums, of_targets = shard_statistics(torch.zeros(2, 0), torch.tensor([0, 1]), 5)
    assert most.tolist() == [-float("inf")] * 2
    assert sums.tolist() == of_targets.tolist() == [0, 0]


def test_logits_that_are_not_finite_give_what_torch_gives():
    """A token of logit -inf never comes, even in a part without others; NaN and inf give NaN."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [
            [-inf, -inf, 1.0, 2.0],
            [0.0, nan, 1.0, 2.0],
            [0.0, 1.0, inf, 2.0],
            [-inf] * 4,
            [0.0, -inf, 1.0, -500.0],
        ]
    )
    targets = torch.tensor([3, 0, 0, 0, 1])
    expected = functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(in_parts(logits, targets, [0, 2, 4])[0], expected, equal_nan=True)
    assert expected.isfinite().tolist() == [True, False, False, False, False]
    torch.testing.assert_close(
        in_parts(logits[:1], targets[:1], [0, 2, 4])[1], exactly(logits[:1], targets[:1])[1].float()
    )


def test_ignored_rows_have_no_gradient():
    logits, targets = torch.randn(4, 6), torch.tensor([1, IGNORED, 5, IGNORED])
    gradient = in_parts(logits, targets, [0, 3, 6])[1]
    torch.testing.assert_close(gradient, exactly(logits, targets)[1].float())
    assert not gradient[1].any()


def test_the_gradient_lies_where_the_logits_were():
    logits = torch.randn(3, 7)
    assert (
        shard_gradient_(
            logits, torch.tensor([0, 1, 2]), 0, torch.zeros(3), torch.ones(3), torch.tensor(1.0)
        ).data_ptr()
        == logits.data_ptr()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_loss_of_half_precision_logits_has_full_precision(dtype):
    """40,000 rows of it are more than fp16 can hold, and more digits than bf16 has."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40_000, 9, generator=generator).to(dtype)
    targets = torch.randint(0, 9, (40_000,), generator=generator)
    loss = cross_entropy.cross_entropy(logits, targets)
    expected = functional.cross_entropy(logits.double(), targets, reduction="sum")
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_factors_of_the_rows_losses(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 31, generator=generator).to(dtype)
    targets = torch.randint(0, 31, (9,), generator=generator)
    targets[2] = IGNORED
    weights = torch.tensor([1.0, 0.0, 3.0, 0.5, 1.0, 2.0, 0.0, 1.0, 0.25])
    wide = logits.double().requires_grad_()
    losses = functional.cross_entropy(wide, targets, reduction="none")
    exact = (losses * weights).sum()
    (2 * exact).backward()
    for how in (CrossEntropy.apply, cross_entropy.cross_entropy_reference):
        own = logits.clone().requires_grad_()
        loss = how(own * 1, targets, weights)
        assert loss.dtype == torch.float32
        (2 * loss).backward()
        assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
        assert (own.grad.double() - wide.grad).norm() / wide.grad.norm() < torch.finfo(dtype).eps
        assert (own.grad[[1, 2, 6]] == 0).all()
