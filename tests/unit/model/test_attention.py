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


# the one family looks behind a query alone, the other one to both sides
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": KV_HEADS, "attention_cap": 3.0},
    "bert": {},
}


def results(
    family: str, kernels: str, seq: int, cuts: Any, dtype: torch.dtype = torch.float32, **keys: Any
) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    model = Model(
        family=family, heads=HEADS, hidden=HEADS * HEAD_DIM, seq_len=128,
        kernels=kernels, attention=Attention(block=16, **keys), **FAMILIES[family],
    )  # fmt: skip
    of_keys = model.kv_heads or HEADS
    draw = torch.Generator().manual_seed(seq)
    tokens = torch.zeros(2, seq, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.arange(2), 0, 0, documents=cuts)
    *parts, above = [
        torch.randn(2, heads, seq, HEAD_DIM, generator=draw, dtype=torch.float32)
        # the same numbers in every precision
        .bfloat16()
        .to(dtype)
        for heads in (HEADS, of_keys, of_keys, HEADS)
    ]
    for part in parts:
        part.requires_grad_()
    out = AttentionCore(model, 1)(*parts, batch)
    return [out.detach(), *torch.autograd.grad(out, parts, above)]


@pytest.mark.parametrize("heads", ["alike", "different"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq", [1, 15, 77, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_is_the_masked_dense_formula(
    family: str, kind: str, heads: str, seq: int
) -> None:
    keys = {"kind": kind, "heads": heads, "window": 2, "groups": (1, 3), "random": 2}
    documents = ((seq // 3, seq), (seq,)) if seq > 15 else None
    found, expected = (
        results(family, kernels, seq, documents, **keys) for kernels in ("auto", "torch")
    )
    for one, right in zip(found, expected, strict=True):
        assert (one - right).abs().max() <= 1e-5 * max(1.0, right.abs().max())
    dense = results(family, "torch", seq, documents, kind="dense")[0]
    if family == "llama":
        assert torch.equal(expected[0][:, :, :16], dense[:, :, :16])  # the first block sees itself
    assert seq < 128 or not torch.allclose(expected[0], dense)  # fewer blocks may all be seen


@pytest.mark.parametrize("heads", ["alike", "different"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_is_as_exact_as_the_dense_formula_in_bf16(
    family: str, kind: str, heads: str
) -> None:
    keys = {"kind": kind, "heads": heads, "window": 2, "groups": (1, 3), "random": 2}
    exact, dense, found = (
        results(family, kernels, 77, None, dtype, **keys)
        for kernels, dtype in (
            ("torch", torch.float64),
            ("torch", torch.bfloat16),
            ("auto", torch.bfloat16),
        )
    )
    for one, other, right in zip(found, dense, exact, strict=True):
        assert (one - right).norm() <= 2 * (other - right).norm()
