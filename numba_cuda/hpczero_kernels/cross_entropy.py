"""Cross-entropy of logits whose columns (the vocabulary) are shared out over ranks: what one rank computes before and after the reductions.

    own most, own sums, own logits of targets = part_statistics(own columns)
    most = max of the ranks' own most;  sums = sum of own sums x exp(own most - most);  logits of targets = sum of the ranks' own
    loss = log(sums) + most - logits of targets
    part_gradient_(own columns)     in backward

so that no rank ever has a whole row of logits. Arithmetic is in fp32 and stable: nothing is exponentiated that is above 0.

Legend: logits [rows, columns] of any float type, columns first .. first + columns - 1 of the vocabulary (possibly none); targets int64 [rows],
numbers in the whole vocabulary. A row whose target is IGNORED counts nothing.
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
_BLOCK = 1 << 18  # elements that are in fp32 at a time


def statistics_reference(
    logits: Tensor, targets: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [rows] each: the largest logit (-inf: there is none), the sum of exp(logit - largest), the target's logit (0: it is not here)."""
    rows, columns = logits.shape
    most, sums, of_targets = (
        torch.zeros(rows, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    if not columns:
        return most.fill_(float("-inf")), sums, of_targets
    index, here = _own(targets, first, columns)
    for block in _blocks(rows, columns):
        wide = logits[block].float()
        torch.amax(wide, 1, out=most[block])
        of_targets[block] = torch.where(here[block], wide.gather(1, index[block, None])[:, 0], 0.0)
        shift = torch.where(
            most[block] == -inf, 0.0, most[block]
        )  # which would give NaN where the sum is 0
        torch.sum(wide.sub(shift[:, None]).exp_(), 1, out=sums[block])
    return most, sums, of_targets


def gradient_reference_(
    logits: Tensor, targets: Tensor, first: int, most: Tensor, sums: Tensor, scale: Tensor
) -> None:
    """`scale` (one number) times the gradient of the sum over rows of log(sums) + most - target's logit, written over the logits.

    fp32 [rows], of the whole vocabulary: `most`, the largest logit; `sums`, the sum of exp(logit - most).
    """
    rows, columns = logits.shape
    if not columns:
        return
    index, here = _own(targets, first, columns)
    scales = (targets != IGNORED) * scale.float()
    factors = scales / sums
    for block in _blocks(rows, columns):
        wide = logits[block].float().sub_(most[block, None]).exp_().mul_(factors[block, None])
        logits[block] = wide.scatter_add_(1, index[block, None], -(here * scales)[block, None])


def _own(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """The targets as numbers of own columns (0 where they are others'), and whether they are own ones."""
    index = targets - first
    here = (index >= 0) & (index < columns)
    return torch.where(here, index, 0), here


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    length = max(1, _BLOCK // columns)
    for begin in range(0, rows, length):
        yield slice(begin, begin + length)


_statistics = operator(
    "cross_entropy_statistics(Tensor logits, Tensor targets, int first) -> (Tensor, Tensor, Tensor)",
    statistics_reference, "cross_entropy:part_statistics",
    lambda logits, targets, first: tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3)),
)  # fmt: skip
_gradient_ = operator(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor targets, int first, Tensor most, Tensor sums, Tensor scale) -> ()",
    gradient_reference_, "cross_entropy:part_gradient_", lambda *_: None,
)  # fmt: skip


def part_statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """As statistics_reference."""
    by_kernel = choose("cross_entropy", logits) == CUDA
    return (_statistics if by_kernel else statistics_reference)(
        logits.contiguous(), targets.contiguous(), first
    )


def part_gradient_(
    logits: Tensor, targets: Tensor, first: int, most: Tensor, sums: Tensor, scale: Tensor
) -> Tensor:
    """As gradient_reference_; the logits, which are the gradient now."""
    assert logits.is_contiguous(), logits.stride()
    by_kernel = choose("cross_entropy", logits) == CUDA
    (_gradient_ if by_kernel else gradient_reference_)(
        logits, targets.contiguous(), first, most, sums, scale
    )
    return logits


def losses(most: Tensor, sums: Tensor, of_targets: Tensor, targets: Tensor) -> Tensor:
    """Of each row, from what is known of the whole vocabulary."""
    return torch.where(targets == IGNORED, 0.0, sums.log() + (most - of_targets))


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """One outside of the vocabulary is an error, as in PyTorch, and not a wrong loss. The host does not wait for a device to find that."""
    fits = (targets == IGNORED) | ((targets >= 0) & (targets < vocabulary))
    torch._assert_async(fits.all(), f"a target is outside of the vocabulary of {vocabulary}")


class CrossEntropy(torch.autograd.Function):
    """Of a whole vocabulary. The gradient is written over the logits: nobody else may need them."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.contiguous()
        most, sums, of_targets = part_statistics(logits, targets, 0)
        context.save_for_backward(logits, targets, most, sums)
        return losses(most, sums, of_targets, targets).sum()

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, most, sums = context.saved_tensors
        return part_gradient_(logits, targets, 0, most, sums, gradient), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over rows, in fp32. logits [rows, columns] are used up: backward may write their gradient over them."""
    fits = (
        logits.dim() == 2
        and targets.dtype == torch.int64
        and targets.shape == logits.shape[:1]
        and targets.device == logits.device
    )
    if choose("cross_entropy", logits, fits) == CUDA:
        check_targets(targets, logits.shape[1])
        return CrossEntropy.apply(logits, targets)
    return cross_entropy_reference(logits, targets)


def cross_entropy_reference(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="sum")
