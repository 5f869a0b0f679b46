"""Cross-entropy of logits whose columns (the vocabulary) are sharded over ranks.

No rank ever has a whole row of logits. Each computes one part before and one after the reductions:

    most_r, sums_r, target_logits_r = shard_statistics(columns of rank r)
    most = max over ranks of most_r
    sums = sum over ranks of sums_r x exp(most_r - most)
    target_logits = sum over ranks of target_logits_r
    loss = log(sums) + most - target_logits
    shard_gradient_(columns of rank r)       in backward

Arithmetic is in fp32 and stable: nothing above 0 is exponentiated.

Legend: logits [rows, columns] of any float type, columns first .. first + columns - 1 of the
vocabulary (possibly none); targets int64 [rows], numbers in the whole vocabulary; weights fp32
[rows], factors of the rows' losses. A row whose target is IGNORED counts nothing.
"""

from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.dispatch import CUDA, choose, operator

IGNORED = -100  # torch's own
_BLOCK = 1 << 18  # elements: converted to fp32 at a time


def statistics_reference(
    logits: Tensor, targets: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of exp(logit - largest), and the target's logit.

    Each is fp32 [rows]. Without columns the largest is -inf; a target elsewhere has the logit 0.
    """
    rows, columns = logits.shape
    most, sums, target_logits = (
        torch.zeros(rows, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    if not columns:
        return most.fill_(-inf), sums, target_logits
    index, is_local = _local_targets(targets, first, columns)
    for block in _blocks(rows, columns):
        wide = logits[block].float()
        torch.amax(wide, 1, out=most[block])
        gathered = wide.gather(1, index[block, None])[:, 0]
        target_logits[block] = torch.where(is_local[block], gathered, 0.0)
        # Subtracting -inf would give NaN where the sum is 0.
        shift = torch.where(most[block] == -inf, 0.0, most[block])
        torch.sum(wide.sub(shift[:, None]).exp_(), 1, out=sums[block])
    return most, sums, target_logits


def gradient_reference_(
    logits: Tensor, targets: Tensor, first: int, most: Tensor, sums: Tensor, scale: Tensor
) -> None:
    """Overwrite the logits with `scale` (one number, or one a row) times their gradient.

    It is the gradient of the sum over rows of log(sums) + most - the target's logit. `most`, the
    largest logit, and `sums`, the sum of exp(logit - most), are those of the whole vocabulary,
    fp32 [rows].
    """
    rows, columns = logits.shape
    if not columns:
        return
    index, is_local = _local_targets(targets, first, columns)
    scales = (targets != IGNORED) * scale.float()
    factors = scales / sums
    for block in _blocks(rows, columns):
        wide = logits[block].float().sub_(most[block, None]).exp_().mul_(factors[block, None])
        logits[block] = wide.scatter_add_(1, index[block, None], -(is_local * scales)[block, None])


def _local_targets(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the targets as local columns (0 where they lie elsewhere), and which are local."""
    index = targets - first
    is_local = (index >= 0) & (index < columns)
    return torch.where(is_local, index, 0), is_local


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    length = max(1, _BLOCK // columns)
    for begin in range(0, rows, length):
        yield slice(begin, begin + length)


def _fake_statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))


_statistics = operator(
    "cross_entropy_statistics(Tensor logits, Tensor targets, int first)"
    " -> (Tensor, Tensor, Tensor)",
    statistics_reference, "cross_entropy:shard_statistics", _fake_statistics,
)  # fmt: skip
_gradient_ = operator(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor targets, int first, Tensor most,"
    " Tensor sums, Tensor scale) -> ()",
    gradient_reference_, "cross_entropy:shard_gradient_", lambda *_: None,
)  # fmt: skip


def shard_statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute statistics_reference, by the implementation chosen."""
    by_kernel = choose("cross_entropy", logits) == CUDA
    statistics = _statistics if by_kernel else statistics_reference
    return statistics(logits.contiguous(), targets.contiguous(), first)


def shard_gradient_(
    logits: Tensor, targets: Tensor, first: int, most: Tensor, sums: Tensor, scale: Tensor
) -> Tensor:
    """Overwrite the logits as gradient_reference_ does, and return them."""
    assert logits.is_contiguous(), logits.stride()
    by_kernel = choose("cross_entropy", logits) == CUDA
    gradient_ = _gradient_ if by_kernel else gradient_reference_
    gradient_(logits, targets.contiguous(), first, most, sums, scale)
    return logits


def losses(
    most: Tensor,
    sums: Tensor,
    target_logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the loss of each row from the statistics of the whole vocabulary."""
    of_rows = torch.where(targets == IGNORED, 0.0, sums.log() + (most - target_logits))
    return of_rows if weights is None else of_rows * weights


def scaled(gradient: Tensor, weights: Tensor | None) -> Tensor:
    """Return the gradient of each row's loss, or the one number that is that of all rows."""
    return gradient if weights is None else gradient * weights


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Refuse targets outside of the vocabulary, as PyTorch does, instead of a wrong loss.

    The check runs on the targets' device; the host does not wait for it.
    """
    fits = (targets == IGNORED) | ((targets >= 0) & (targets < vocabulary))
    torch._assert_async(fits.all(), f"a target is outside of the vocabulary of {vocabulary}")


class CrossEntropy(torch.autograd.Function):
    """Cross-entropy over a whole vocabulary; backward overwrites the logits with their gradient."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logits = logits.contiguous()
        most, sums, target_logits = shard_statistics(logits, targets, 0)
        context.save_for_backward(logits, targets, weights, most, sums)
        return losses(most, sums, target_logits, targets, weights).sum()

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, weights, most, sums = context.saved_tensors
        scale = scaled(gradient, weights)
        return shard_gradient_(logits, targets, 0, most, sums, scale), None, None


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum over rows, in fp32; backward may overwrite logits [rows, columns]."""
    fits = (
        logits.dim() == 2
        and targets.dtype == torch.int64
        and targets.shape == logits.shape[:1]
        and targets.device == logits.device
    )
    if choose("cross_entropy", logits, fits) == CUDA:
        check_targets(targets, logits.shape[1])
        return CrossEntropy.apply(logits, targets, weights)
    return cross_entropy_reference(logits, targets, weights)


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    if weights is None:
        return functional.cross_entropy(logits.float(), targets, reduction="sum")
    return (functional.cross_entropy(logits.float(), targets, reduction="none") * weights).sum()
