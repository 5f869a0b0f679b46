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

import torch

IGNORED = -100  # torch's own
_BLOCK = 1 << 18  # elements that are in fp32 at a time


def part_statistics(logits: torch.Tensor, targets: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 [rows] each: the largest logit (-inf: there is none), the sum of exp(logit - largest), the target's logit (0: it is not here)."""
    rows, columns = logits.shape
    most, sums, of_targets = (torch.zeros(rows, device=logits.device) for _ in range(3))
    if not columns:
        return most.fill_(float("-inf")), sums, of_targets
    index, here = _own(targets, first, columns)
    for block in _blocks(rows, columns):
        wide = logits[block].float()
        torch.amax(wide, 1, out=most[block])
        of_targets[block] = torch.where(here[block], wide.gather(1, index[block, None])[:, 0], 0.0)
        shift = most[block].nan_to_num(0.0, 0.0, 0.0)  # infinite ones would give NaN where the sum has a value
        torch.sum(wide.sub(shift[:, None]).exp_(), 1, out=sums[block])
    return most, sums, of_targets


def part_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, first: int, most: torch.Tensor, sums: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """`scale` (one number) times the gradient of the sum over rows of log(sums) + most - target's logit, written over the logits.

    fp32 [rows], of the whole vocabulary: `most`, the largest logit; `sums`, the sum of exp(logit - most).
    """
    rows, columns = logits.shape
    if not columns:
        return logits
    index, here = _own(targets, first, columns)
    scales = (targets != IGNORED) * scale.float()
    factors = scales / sums
    for block in _blocks(rows, columns):
        wide = logits[block].float().sub_(most[block, None]).exp_().mul_(factors[block, None])
        logits[block] = wide.scatter_add_(1, index[block, None], -(here * scales)[block, None])
    return logits


def _own(targets: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets as numbers of own columns (0 where they are others'), and whether they are own ones."""
    index = targets - first
    here = (index >= 0) & (index < columns)
    return torch.where(here, index, 0), here


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    length = max(1, _BLOCK // columns)
    for begin in range(0, rows, length):
        yield slice(begin, begin + length)
