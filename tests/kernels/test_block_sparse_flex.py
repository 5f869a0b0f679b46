"""Flex attention gets the layouts of block-sparse attention; what it refuses is done in chunks."""

import pytest
import torch
from torch import Tensor

from hpczero_kernels import block_sparse, block_sparse_flex
from hpczero_kernels.block_sparse import (
    block_sparse_attention,
    block_sparse_attention_reference,
)
from hpczero_kernels.dispatch import FLEX
from tests.support.block_layouts import Case, distances
from tests.support.device import DEVICE

COMPILED = {
    "causal": Case(300, head_dim=64),
    "not causal, blocks of 128": Case(300, 128, causal=False, head_dim=64),
    "heads share keys": Case(300, heads=6, patterns=3, samples=2, head_dim=64),
    "everything": Case(
        391, 24, True, 6, 2, 2, 128, 0.6, 2, ((100, 300, 391), (391,)), cap=2.0, scale=0.3
    ),
}


@pytest.mark.parametrize("block", [16, 24, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_flex_attention_gets_is_the_same_mask(
    block: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    case = Case(
        391, block, causal, 4, 2, 2, 8, 0.6, 2, ((100, 300, 391), (391,)), cap=2.0, scale=0.3
    )
    *parts, _ = case.tensors()
    layout = case.layout()
    monkeypatch.setattr(block_sparse_flex, "_compiled", lambda: flex.flex_attention)
    found = block_sparse_flex.flex_block_sparse(*parts, layout, case.documents, 2.0, 0.3)
    expected = block_sparse_attention_reference(*parts, layout, case.documents, 2.0, 0.3)
    assert found is not None
    assert max(distances([found], [expected])) <= 1e-5
    mask = block_sparse_flex.mask_of(layout, 2, 391, case.documents, parts[0].device)
    theirs = flex.create_block_mask(mask.mask_mod, 2, 4, 391, 391, device="cpu")
    for of_tiles in ("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"):
        ours, right = (
            numbers_to_tiles(*(getattr(one, name) for name in of_tiles)) for one in (mask, theirs)
        )
        assert torch.equal(ours, right)


def numbers_to_tiles(count: Tensor, numbers: Tensor) -> Tensor:
    tiles = torch.zeros(numbers.shape, dtype=torch.bool)
    within = torch.arange(numbers.shape[-1]) < count[..., None]
    return tiles.scatter_(-1, numbers.long(), within)


def test_what_flex_attention_refuses_is_done_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuses(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("no shared memory")

    monkeypatch.setattr(block_sparse_flex, "_compiled", lambda: refuses)
    for kept in ("_refused", "_taken"):
        monkeypatch.setattr(block_sparse_flex, kept, set())
    *parts, _ = Case().tensors()
    for _ in range(2):
        assert block_sparse_flex.flex_block_sparse(*parts, Case().layout(), None, 0.0, 1.0) is None
    assert len(calls) == 1


def test_with_a_bias_it_is_always_done_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "choose", lambda *_: FLEX)
    monkeypatch.setattr(block_sparse_flex, "flex_block_sparse", lambda q, *_: torch.zeros_like(q))
    plain, biased = (Case(biased=biased) for biased in (False, True))
    *parts, _ = plain.tensors()
    assert not block_sparse.block_sparse_attention(*parts, plain.layout()).any()
    found = biased.carried_out(block_sparse.block_sparse_attention)
    assert max(distances(found, biased.carried_out(block_sparse_attention_reference))) <= 1e-5


def test_no_more_cases_are_compiled_than_pytorch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse_flex, "_compiled", lambda: lambda *_: "compiled")
    monkeypatch.setattr(block_sparse_flex, "_taken", set())

    def computed(seq: int) -> object:
        case = Case(seq)
        *parts, _ = case.tensors()
        return block_sparse_flex.flex_block_sparse(*parts, case.layout(), None, 0.0, 1.0)

    first = [computed(seq) for seq in range(1, block_sparse_flex._MOST + 1)]
    assert set(first) == {"compiled"}
    assert computed(1000) is None
    assert computed(3) == "compiled"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_gives_the_masked_dense_formula(name: str) -> None:
    """Forward alone: PyTorch has no backward of it on CPUs."""
    case = COMPILED[name]
    *parts, _ = case.tensors()
    given = case.layout(), case.documents, case.cap, case.scale or 0.1
    with torch.no_grad():
        found = block_sparse_flex.flex_block_sparse(*parts, *given)
    assert found is not None
    assert max(distances([found], [block_sparse_attention_reference(*parts, *given)])) <= 1e-5


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_a_gpu_gives_values_and_gradients_by_flex_attention(name: str, dtype: torch.dtype) -> None:
    case = COMPILED[name]
    parts = [one.to(DEVICE, dtype) for one in case.tensors()]
    exact, dense, found = (
        case.carried_out(how, kind, parts)
        for how, kind in (
            (block_sparse_attention_reference, torch.float64),
            (block_sparse_attention_reference, dtype),
            (block_sparse_attention, dtype),
        )
    )
    assert not block_sparse_flex._refused
    for own, other, right in zip(found, dense, exact, strict=True):
        errors = [float((one.double() - right).norm() / right.norm()) for one in (own, other)]
        assert errors[0] <= max(1e-5, 2 * errors[1])
