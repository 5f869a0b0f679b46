"""Attention in blocks as a model has it, of each kind, against the masked dense formula."""

from typing import Any

import pytest
import torch

from hpczero.model.attention import AttentionCore
from hpczero.model.attention_layouts import EFFECT
from hpczero.model.batch import MicroBatch
from hpczero.spec.attention import Attention
from hpczero.spec.model import Model

KINDS = [kind for kind in EFFECT if kind != "dense"]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def results(kernels: str, seq: int, cuts: Any, **keys: Any) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    model = Model(
        family="llama", heads=HEADS, kv_heads=KV_HEADS, hidden=HEADS * HEAD_DIM, seq_len=128,
        kernels=kernels, attention_cap=3.0, attention=Attention(block=16, **keys),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seq)
    tokens = torch.zeros(2, seq, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.arange(2), 0, 0, documents=cuts)
    *parts, above = [
        torch.randn(2, heads, seq, HEAD_DIM, generator=draw, dtype=torch.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    for part in parts:
        part.requires_grad_()
    out = AttentionCore(model, 1)(*parts, batch)
    return [out.detach(), *torch.autograd.grad(out, parts, above)]


@pytest.mark.parametrize("heads", ["alike", "different"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq", [1, 15, 77, 128])
def test_each_kind_is_the_masked_dense_formula(kind: str, heads: str, seq: int) -> None:
    keys = {"kind": kind, "heads": heads, "window": 2, "groups": (1, 3), "random": 2}
    documents = ((seq // 3, seq), (seq,)) if seq > 15 else None
    found, expected = (results(kernels, seq, documents, **keys) for kernels in ("auto", "torch"))
    for one, right in zip(found, expected, strict=True):
        assert (one - right).abs().max() <= 1e-5 * max(1.0, right.abs().max())
    dense = results("torch", seq, documents, kind="dense")[0]
    assert torch.equal(expected[0][:, :, :16], dense[:, :, :16])  # the first block sees itself
    assert seq < 128 or not torch.allclose(expected[0], dense)  # fewer blocks may all be seen
