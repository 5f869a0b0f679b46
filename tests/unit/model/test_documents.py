"""A document's loss does not depend on what other documents of its sequence say."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hpczero.data.documents import Cut
from hpczero.model.batch import MicroBatch
from hpczero.train.batches import with_documents
from tests.support.inference import MODELS, model_of, random_module

BEGINS = (7, 8, 21)  # of the documents of a sequence of 40, but the first


def losses(module: Any, tokens: torch.Tensor, begins: Sequence[int]) -> torch.Tensor:
    """Return the loss of each target [samples, seq]."""
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.arange(len(tokens)), 0, 0)
    cut = Cut(begins, [begin - 1 for begin in begins])
    batch = with_documents(batch, [cut] * len(tokens))
    x = batch.tokens
    *layers, head = module.layers()
    with torch.no_grad():
        for layer in layers:
            x = layer(x, batch)
        scores = head.scores(x).float()
    return torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), batch.targets.flatten(), reduction="none"
    ).view(batch.targets.shape)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", range(4))
@pytest.mark.few(12)
def test_another_document_in_its_place_changes_no_bit_of_the_others(
    name: str, dtype: torch.dtype, changed: int
) -> None:
    module = random_module(model_of(name)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (2, 41), generator=generator)
    begin, end = (0, *BEGINS, 40)[changed : changed + 2]
    other = tokens.clone()
    other[:, begin:end] = (other[:, begin:end] + 1 + torch.arange(end - begin)) % 50
    before, after = (losses(module, text, BEGINS) for text in (tokens, other))
    # the last token of a document is the target of nothing; the first is that of the one before
    silent = torch.zeros(40, dtype=torch.bool)
    silent[[at - 1 for at in BEGINS]] = True
    apart = torch.ones(40, dtype=torch.bool)
    apart[begin:end] = False
    compared = apart & ~silent
    assert torch.equal(before[:, compared], after[:, compared])
    inside = ~apart & ~silent
    assert not torch.equal(before[:, inside], after[:, inside]) or not inside.any()
    packed = [losses(module, text, ()) for text in (tokens, other)]
    later = torch.arange(40) >= end
    assert not later.any() or not torch.equal(packed[0][:, later], packed[1][:, later])
