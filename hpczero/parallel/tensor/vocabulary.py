"""The vocabulary shared out over the tensor ranks: each has some tokens' vectors, and computes the logits of those tokens only.

No rank ever has the logits of the whole vocabulary: cross-entropy needs two sums of one number per target (Shoeybi et al. 2019).
Legend: tokens, targets [samples, seq]; logits [samples, seq, own part of the vocabulary].
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hpczero.comm.group import Group
from hpczero.model import maps
from hpczero.parallel.layout import shard_range
from hpczero.parallel.tensor.linear import Residual, sum_of_parts
from hpczero_kernels.cross_entropy import check_targets, losses, shard_gradient_, shard_statistics


def own_tokens(vocab: int, group: Group) -> slice:
    return shard_range(vocab, 1, group.size, group.rank)


class VocabularyLookup(nn.Module):
    """Of a lookup: every rank gives the vectors that it has, and the sum over ranks has all of them."""

    tokens: nn.Parameter
    positions: nn.Parameter

    def __init__(self, serial: Any, residual: Residual) -> None:
        super().__init__()
        self.vocab = serial.tokens.shape[0]
        self.tokens, self.positions = serial.tokens, serial.positions
        self._residual = residual

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # as on one rank: a number that no rank has is an error, not a zero
        torch._assert_async(
            ((tokens >= 0) & (tokens < self.vocab)).all(),
            f"a token is outside of the vocabulary of {self.vocab}",
        )
        own = own_tokens(self.vocab, self._residual.group)
        return sum_of_parts(
            part_of_lookup(tokens, self.tokens, own.start),
            self.positions[: tokens.shape[1]],
            self._residual,
        )


class VocabularyCrossEntropy(nn.Module):
    def __init__(self, serial: Any, residual: Residual) -> None:
        super().__init__()
        self.vocab = serial.vocab
        self._group = residual.group

    def forward(
        self, logits: torch.Tensor, targets: torch.Tensor, by_sample: bool = False
    ) -> torch.Tensor:
        """The sum over all targets, in fp32, equal on all ranks. Backward writes the gradient over the logits.

        `by_sample`: [samples], the sum over each sample's targets; for evaluation, without a backward.
        """
        check_targets(targets, self.vocab)
        first = own_tokens(self.vocab, self._group).start
        if by_sample:
            most, sums, of_targets = _of_whole_vocabulary(
                logits.flatten(0, 1).contiguous(), targets.flatten(), first, self._group
            )
            return (
                losses(most, sums, of_targets, targets.flatten()).unflatten(0, targets.shape).sum(1)
            )
        return _CrossEntropy.apply(
            logits.flatten(0, 1).contiguous(), targets.flatten(), first, self._group
        )


def part_of_lookup(tokens: torch.Tensor, vectors: torch.Tensor, first: int) -> torch.Tensor:
    """[samples, seq, hidden]: the vectors of the tokens first, first + 1, ... that are here, zeros elsewhere."""
    if not len(vectors):  # fewer tokens than ranks
        return vectors.sum() + vectors.new_zeros(*tokens.shape, vectors.shape[1])
    index = tokens - first
    here = (index >= 0) & (index < vectors.shape[0])
    found = maps.embedding(
        index.where(here, 0), vectors
    )  # how many there are, the host would have to wait for
    return found.masked_fill(~here.unsqueeze(-1), 0.0)


def _of_whole_vocabulary(
    logits: torch.Tensor, targets: torch.Tensor, first: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each row the largest logit, the sum of exp(logit - largest) and the target's logit.

    These are the same on all ranks.
    """
    own_most, own_sums, of_targets = shard_statistics(logits, targets, first)
    most = own_most.clone()
    group.all_reduce(most, "max")
    together = torch.stack([own_sums * (own_most - most).exp(), of_targets])
    group.all_reduce(together)
    sums, of_targets = together
    return most, sums, of_targets


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: Group
    ) -> torch.Tensor:
        most, sums, of_targets = _of_whole_vocabulary(logits, targets, first, group)
        context.save_for_backward(logits, targets, most, sums)
        context.first = first
        return losses(most, sums, of_targets, targets).sum()

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, most, sums = context.saved_tensors
        return (
            shard_gradient_(logits, targets, context.first, most, sums, gradient),
            None,
            None,
            None,
        )
