"""The gradient of a piece of the loss is the one that autograd finds."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpczero.parallel.activations.loss_by_pieces import Pieces


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_the_gradient_of_a_piece_is_that_of_autograd(cap: float) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(7, 12), torch.randn(40, 12)
    targets = torch.randint(40, (7,))
    product = (rows @ weight.t()).requires_grad_()
    capped = torch.tanh(product / cap) * cap if cap else product
    (cross_entropy(capped, targets, reduction="sum") * 0.25).backward()
    pieces = Pieces(rows=7, vocab=40, cap=cap, layout=None, group=None)
    logits = pieces.logits(rows, weight)
    most, sums, _ = pieces.statistics(logits, targets)
    found = pieces.gradient(logits, targets, most, sums, torch.tensor(0.25))
    torch.testing.assert_close(found, product.grad)
