"""The loss of a long sequence, or a large vocabulary, by pieces: its logits never exist as a whole.

A forward that training follows leaves everything to backward, where one pass over pieces of the
positions makes the logits of a piece, its loss, its gradient over the logits, and from that the
gradients of the head's input and weight: the products are those of the usual way, each once, and
what a piece has made is used while it is near. The loss is known when backward has run: until then
it is NaN. The two usual ways would make the weight's gradient in forward and keep it, which is as
large as the weight, or make the logits twice, which costs a third more products.

Without gradients (evaluation) forward makes the loss, by pieces too.

Legend: x [samples, positions, hidden], whole; rows are positions of all samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpczero.comm.group import Group
from hpczero.model import maps
from hpczero.model.batch import MicroBatch
from hpczero.parallel.tensor.linear import StreamLayout
from hpczero.parallel.tensor.vocabulary import of_whole_vocabulary, own_tokens
from hpczero_kernels.cross_entropy import (
    check_targets,
    losses,
    scaled,
    shard_gradient_,
    shard_statistics,
)


@dataclass(frozen=True)
class Pieces:
    """The way in which a head's rows are worked through.

    `rows`: of a piece. `layout`: of the residual stream among tensor ranks; None: there is one.
    """

    rows: int
    vocab: int
    cap: float
    layout: Callable[[], StreamLayout] | None
    group: Group | None

    @property
    def first(self) -> int:
        """The first of this rank's tokens."""
        return own_tokens(self.vocab, self.group).start if self.group else 0

    def of(self, count: int) -> Iterator[slice]:
        """Yield the pieces of so many rows, at least one."""
        for start in range(0, max(count, 1), self.rows):
            yield slice(start, start + self.rows)

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        product = rows @ weight.t()
        return torch.tanh_(product.div_(self.cap)).mul_(self.cap) if self.cap else product

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's largest logit, sum of exponentials, and logit of its target."""
        if self.group is None:
            return shard_statistics(logits, targets, 0)
        return of_whole_vocabulary(logits, targets, self.first, self.group)

    def gradient(
        self, logits: Tensor, targets: Tensor, most: Tensor, sums: Tensor, scale: Tensor
    ) -> Tensor:
        """Return the gradient of the product; the logits may be overwritten."""
        slope = 1 - (logits / self.cap).square_() if self.cap else None
        gradient = shard_gradient_(logits, targets, self.first, most, sums, scale)
        return gradient if slope is None else gradient.mul_(slope)


def head_by_pieces(
    head: Any, pieces_of: Callable[[int], Pieces | None]
) -> Callable[[Tensor, MicroBatch], Tensor]:
    """Return the forward of a head whose logits are made by pieces.

    `pieces_of` so many positions; None: the loss of these is whole.
    """
    whole = head.forward

    def forward(x: Tensor, batch: MicroBatch) -> Tensor:
        pieces = pieces_of(batch.targets.numel())
        if pieces is None:
            loss: Tensor = whole(x, batch)
            return loss
        x = head.norm(x)
        check_targets(batch.targets, pieces.vocab)
        if torch.is_grad_enabled():
            weights = None if batch.weights is None else batch.weights.flatten()
            targets = batch.targets.flatten()
            return _Loss.apply(x, head.logits.weight, targets, weights, pieces)
        of_rows = _loss_of_rows(x, head.logits.weight, batch, pieces)
        return of_rows.sum(1) if batch.by_sample else of_rows.sum()

    return forward


def _loss_of_rows(x: Tensor, weight: Tensor, batch: MicroBatch, pieces: Pieces) -> Tensor:
    rows = _whole(x, pieces).flatten(0, 1)
    targets = batch.targets.flatten()
    weights = None if batch.weights is None else batch.weights.flatten()
    found = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
    for piece in pieces.of(len(rows)):
        logits = pieces.logits(rows[piece], weight)
        of_piece = None if weights is None else weights[piece]
        statistics = pieces.statistics(logits, targets[piece])
        found[piece] = losses(*statistics, targets[piece], of_piece)
    return found.view(batch.targets.shape)


def _whole(x: Tensor, pieces: Pieces) -> Tensor:
    return pieces.layout().start_gather(x)() if pieces.layout else x


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        pieces: Pieces,
    ) -> Tensor:
        context.save_for_backward(x, weight, targets, weights)
        context.parameter = weight
        context.pieces = pieces
        context.layout = pieces.layout() if pieces.layout else None
        context.maps = maps.redirected()
        context.loss = torch.full((), torch.nan, dtype=torch.float32, device=x.device)
        return context.loss.detach()  # it shares its memory, and is no part of the graph

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, weights = context.saved_tensors
        pieces, layout = context.pieces, context.layout
        whole = layout.start_gather(x)() if layout else x
        rows = whole.flatten(0, 1)
        for_x, for_weight, *_ = context.needs_input_grad
        of_rows = torch.empty_like(rows)
        context.loss.zero_()

        def work(of_weight: Tensor | None) -> None:
            for piece in pieces.of(len(rows)):
                some = targets[piece]
                of_piece = None if weights is None else weights[piece]
                logits = pieces.logits(rows[piece], weight)
                most, sums, of_targets = pieces.statistics(logits, some)
                context.loss.add_(losses(most, sums, of_targets, some, of_piece).sum())
                scale = scaled(gradient, of_piece)
                of_logits = pieces.gradient(logits, some, most, sums, scale)
                torch.mm(of_logits, weight, out=of_rows[piece])
                if of_weight is None:
                    continue
                if piece.start == 0:
                    torch.mm(of_logits.t(), rows[piece], out=of_weight)
                else:
                    of_weight.addmm_(of_logits.t(), rows[piece])

        of_weight = None
        if for_weight:
            of_weight = maps.gradient_of(context.maps, context.parameter, work)
        else:
            work(None)
        of_whole = of_rows.view(whole.shape)
        of_x = None
        if for_x:
            of_x = layout.start_sum(of_whole)() if layout else of_whole
        return of_x, of_weight, None, None, None
