"""The vocabulary cut among the tensor ranks: each has the vectors and the logits of some tokens.

No rank ever has the logits of the whole vocabulary: cross-entropy needs two sums of one number per
target (Shoeybi et al. 2019).

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
from hpczero_kernels.cross_entropy import (
    check_targets,
    losses,
    scaled,
    shard_gradient_,
    shard_statistics,
)


def own_tokens(vocab: int, group: Group) -> slice:
    return shard_range(vocab, 1, group.size, group.rank)


class VocabularyLookup(nn.Module):
    """A lookup in this rank's vectors; the sum over the ranks has those of all tokens.

    Learned positions and segments, where the serial lookup has any, are added once.
    """

    tokens: nn.Parameter
    positions: nn.Parameter | None
    segments: nn.Parameter | None

    def __init__(self, serial: Any, residual: Residual) -> None:
        super().__init__()
        self.vocab = serial.tokens.shape[0]
        self.tokens = serial.tokens
        self.positions = getattr(serial, "positions", None)
        self.segments = getattr(serial, "segments", None)
        self._residual = residual

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # a number that no rank has is an error, as on one rank, and not a zero
        torch._assert_async(
            ((tokens >= 0) & (tokens < self.vocab)).all(),
            f"a token is outside of the vocabulary of {self.vocab}",
        )
        first = own_tokens(self.vocab, self._residual.group).start
        partial = part_of_lookup(tokens, self.tokens, first)
        learned = None
        if self.positions is not None:
            learned = maps.of_positions(self.positions, tokens.shape[1], positions)
        if self.segments is not None and segments is not None:
            of_segments = maps.of_segments(self.segments, segments)
            learned = of_segments if learned is None else learned + of_segments
        return sum_of_parts(partial, learned, self._residual.layout)


class VocabularyCrossEntropy(nn.Module):
    """The loss of logits that are cut along the vocabulary."""

    def __init__(self, serial: Any, residual: Residual) -> None:
        super().__init__()
        self.vocab = serial.vocab
        self._group = residual.group

    def forward(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        by_sample: bool = False,
    ) -> torch.Tensor:
        """Return the weighted sum over all targets, in fp32, equal on all ranks.

        Backward overwrites the logits with their gradient.

        `by_sample`: return [samples], the sum over each sample's targets; for evaluation, without a
        backward.
        """
        check_targets(targets, self.vocab)
        first = own_tokens(self.vocab, self._group).start
        rows = logits.flatten(0, 1).contiguous()
        row_targets = targets.flatten()
        row_weights = None if weights is None else weights.flatten()
        if not by_sample:
            return _CrossEntropy.apply(rows, row_targets, row_weights, first, self._group)
        statistics = of_whole_vocabulary(rows, row_targets, first, self._group)
        return losses(*statistics, row_targets, row_weights).unflatten(0, targets.shape).sum(1)


def likeliest(logits: torch.Tensor, vocab: int, group: Group | None) -> torch.Tensor:
    """Return the token with the largest logit [samples, seq]; of equal ones the first.

    The ranks of a group have the logits of their own tokens each. Collective.
    """
    if group is None:
        return logits.argmax(-1)
    if logits.shape[-1]:
        most, tokens = logits.max(-1)
        most = most.float()
    else:  # fewer tokens than ranks
        tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        most = torch.full_like(tokens, -torch.inf, dtype=torch.float32)
    of_ranks = group.stack(most)
    tokens_of_ranks = group.stack(tokens + own_tokens(vocab, group).start)
    return tokens_of_ranks.gather(0, of_ranks.argmax(0, keepdim=True))[0]


def part_of_lookup(tokens: torch.Tensor, vectors: torch.Tensor, first: int) -> torch.Tensor:
    """Return [samples, seq, hidden]: the vectors of this rank's tokens, zeros for the others.

    This rank has those of the tokens first, first + 1, ...
    """
    if not len(vectors):  # fewer tokens than ranks
        return vectors.sum() + vectors.new_zeros(*tokens.shape, vectors.shape[1])
    index = tokens - first
    here = (index >= 0) & (index < vectors.shape[0])
    # looks every token up: to select those that are here, the host would wait for their number
    looked_up = maps.embedding(index.where(here, 0), vectors)
    return looked_up.masked_fill(~here.unsqueeze(-1), 0.0)


def of_whole_vocabulary(
    logits: torch.Tensor, targets: torch.Tensor, first: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's largest logit, sum of exp(logit - largest) and logit of its target.

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
        context: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        first: int,
        group: Group,
    ) -> torch.Tensor:
        most, sums, of_targets = of_whole_vocabulary(logits, targets, first, group)
        context.save_for_backward(logits, targets, weights, most, sums)
        context.first = first
        return losses(most, sums, of_targets, targets, weights).sum()

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, weights, most, sums = context.saved_tensors
        scale = scaled(gradient, weights)
        own_gradient = shard_gradient_(logits, targets, context.first, most, sums, scale)
        return own_gradient, None, None, None, None
