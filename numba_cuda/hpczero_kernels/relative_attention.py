"""Attention whose logits have a learned bias for the distance of key and query (T5).

    out = softmax(q k^T + bias) v,   bias[head, i, j] = table[class of j - i, head]

Distances are in classes (Raffel et al. 2020): near ones each have their own, further ones share
one, ever more of them, and from `reach` on all are in the last. Forward and backward compute the
probabilities of few heads at a time, so that neither they nor the bias or its gradient exist for
more than 2^18 pairs of positions, or for one head. A bias is alike along each diagonal: its
gradient is summed along these, then by class.

Legend: q, k, v [samples, heads, seq, head_dim]; table [classes, heads].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.dispatch import upcast_half

_TILE = 1 << 18  # probabilities at a time: they stay in a core's cache


@dataclass(frozen=True)
class Distances:
    """So many classes of distances; `causal`: of those to keys before the query alone."""

    classes: int
    reach: int
    causal: bool

    def class_of(self, distance: Tensor) -> Tensor:
        """Return the classes of these differences: position of a key less that of a query."""
        classes = self.classes if self.causal else self.classes // 2
        behind = torch.zeros_like(distance) if self.causal else (distance > 0) * classes
        length = (-distance).clamp(min=0) if self.causal else distance.abs()
        each = classes // 2  # these have a class of their own
        share = torch.log(length.float() / each) / log(self.reach / each)  # log(0) is not taken
        of_far = each + (share * (classes - each)).to(torch.int64).clamp(max=classes - 1 - each)
        return behind + torch.where(length < each, length, of_far)


def relative_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, distances: Distances
) -> Tensor:
    if not q.shape[1]:  # no head on this tensor rank
        return q + k + v + table.sum()
    at = torch.arange(q.shape[2], dtype=torch.int64, device=q.device)
    bias = table[distances.class_of(at - at[:, None])].permute(2, 0, 1).float()
    logits = (q @ k.transpose(2, 3)).float() + bias
    if distances.causal:
        logits = logits.masked_fill(at > at[:, None], -inf)
    return logits.softmax(-1).to(v.dtype) @ v


def relative_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, distances: Distances
) -> Tensor:
    """Return relative_attention_reference of the same, up to rounding."""
    if not q.shape[1]:
        return relative_attention_reference(q, k, v, table, distances)
    out: Tensor = _RelativeAttention.apply(q, k, v, table, distances)
    return out


def bias_of_distances(table: Tensor, distances: Distances, seq: int) -> Tensor:
    """Return the bias of each distance, from 1 - seq to seq - 1: [heads, distances].

    Distances of a class follow each other, so that its gradient is a sum over them.
    """
    of_classes = upcast_half(table).unsqueeze(-1).unbind()  # each [heads, 1]
    runs = _runs(distances, seq)
    return torch.cat([of_classes[number].expand(-1, count) for number, count in runs], 1)


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, distances: Distances
    ) -> Tensor:
        # laid out as the next product reads it
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        out = out.transpose(1, 2)
        sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        for heads in _chunks(q):
            logits = _logits(q[:, heads], k[:, heads], table[:, heads], distances)
            sums[:, heads] = torch.logsumexp(logits, -1)
            probabilities = logits.sub_(sums[:, heads].unsqueeze(-1)).exp_()
            out[:, heads] = probabilities.to(v.dtype) @ v[:, heads]
        context.save_for_backward(q, k, v, table, out, sums)
        context.distances = distances
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, out, sums = context.saved_tensors
        seq = q.shape[2]
        row_sums = (gradient.float() * out.float()).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = (
            torch.empty_like(of, memory_format=torch.contiguous_format) for of in (q, k, v)
        )
        of_distances = q.new_empty(q.shape[1], 2 * seq - 1, dtype=torch.float32)
        for heads in _chunks(q):
            logits = _logits(q[:, heads], k[:, heads], table[:, heads], context.distances)
            probabilities = logits.sub_(sums[:, heads].unsqueeze(-1)).exp_()
            grad_v[:, heads] = probabilities.to(q.dtype).transpose(2, 3) @ gradient[:, heads]
            scores = gradient[:, heads].float() @ v[:, heads].float().transpose(2, 3)
            scores = scores.sub_(row_sums[:, heads]).mul_(probabilities)
            of_distances[heads] = along_diagonals(scores.sum(0))
            scores = scores.to(q.dtype)
            grad_q[:, heads] = scores @ k[:, heads]
            grad_k[:, heads] = scores.transpose(2, 3) @ q[:, heads]
        classes = _classes(context.distances, seq, q.device)
        belongs = functional.one_hot(classes, table.shape[0]).to(torch.float32)
        grad_table = (of_distances @ belongs).t().to(table.dtype)
        return grad_q, grad_k, grad_v, grad_table, None


def _logits(q: Tensor, k: Tensor, table: Tensor, distances: Distances) -> Tensor:
    """Return the logits of some heads in fp32: products that are rounded do not fit their sums."""
    logits = q.float() @ k.float().transpose(2, 3)
    seq = q.shape[2]
    of_distances = table[_classes(distances, seq, q.device)].t().float()
    # row i has the distances from -i on
    logits += of_distances.unfold(1, seq, 1).flip(1)
    return logits.masked_fill_(_later(seq, q.device), -inf) if distances.causal else logits


@lru_cache(maxsize=64)
def _classes(distances: Distances, seq: int, device: torch.device) -> Tensor:
    """Return the classes of all distances, from 1 - seq to seq - 1."""
    return distances.class_of(torch.arange(1 - seq, seq, dtype=torch.int64, device=device))


@lru_cache(maxsize=64)
def _runs(distances: Distances, seq: int) -> list[tuple[int, int]]:
    """Return the classes of all distances, in order, and how many distances are in each."""
    classes = _classes(distances, seq, torch.device("cpu"))
    numbers, counts = classes.unique_consecutive(return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True))


@lru_cache(maxsize=8)
def _later(seq: int, device: torch.device) -> Tensor:
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu(1)


def along_diagonals(scores: Tensor) -> Tensor:
    """Sum [heads, seq, seq] along the diagonals: [heads, distances]."""
    seq = scores.shape[-1]
    # rows of 2 seq numbers, read as rows of 2 seq - 1: each moves by one more
    moved = functional.pad(scores.flip(1), (0, seq)).flatten(1)
    return moved[:, : seq * (2 * seq - 1)].unflatten(1, (seq, -1)).sum(1)


def _chunks(q: Tensor) -> Iterator[slice]:
    """Yield the heads that are worked on together."""
    samples, heads, seq, _ = q.shape
    at_once = max(1, _TILE // max(1, samples * seq * seq))
    for first in range(0, heads, at_once):
        yield slice(first, first + at_once)
