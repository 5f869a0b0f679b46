"""Attention's own backward against the formula in fp64, beside PyTorch's."""

import pytest
import torch

from hpczero_kernels.attention import Reach, attention, attention_reference, supports, tiles

SHAPES = [
    (4, 16, 128, 64),
    (2, 3, 33, 64),
    (1, 2, 1, 16),
    (3, 5, 255, 32),
    (1, 4, 256, 64),
    (2, 1, 7, 8),
]


def gradients(how, x: torch.Tensor, above: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and gradient for x [3, samples, heads, seq, head_dim]."""
    x = x.clone().requires_grad_()
    out = how(*x)
    out.backward(above.to(x.dtype))
    assert x.grad is not None
    return out.detach().double(), x.grad.double()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [1.0, 3.0, 10.0])
def test_it_is_as_exact_as_pytorchs(shape: tuple[int, ...], spread: float) -> None:
    """`spread` is that of queries and keys; logits reach some hundreds."""
    random = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(3, *shape, generator=random)
    x[:2] *= spread
    x = x.bfloat16()
    above = torch.randn(shape, generator=random).bfloat16()
    if not supports(x[0]):
        pytest.skip("this processor has no bf16 products: attention is PyTorch's")
    exact = gradients(attention_reference, x.double(), above)
    ours, torchs = gradients(attention, x, above), gradients(attention_reference, x, above)
    for own, other, right in zip(ours, torchs, exact, strict=True):
        assert error(own, right) <= 2 * error(other, right) + 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("documents", "window", "cap"), [(None, 0, 0.0), (((3, 9), (9,)), 4, 0.0), (None, 0, 5.0)]
)
def test_a_tensor_rank_without_heads(documents, window, cap, dtype) -> None:
    x = torch.zeros(3, 2, 0, 9, 8, dtype=dtype, requires_grad=True)
    out = attention(*x, documents, window, cap)
    out.sum().backward()
    assert out.shape == x.shape[1:]
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_it_is_repeatable_and_takes_parts_of_a_tensor() -> None:
    x = torch.randn(2, 33, 3, 3, 64).bfloat16().requires_grad_()
    found = []
    for _ in range(2):
        x.grad = None
        attention(*x.permute(2, 0, 3, 1, 4)).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("dtype", "seq"), [(torch.float32, 16), (torch.bfloat16, 257), (torch.bfloat16, 0)]
)
def test_what_it_does_not_support_is_pytorchs(dtype: torch.dtype, seq: int) -> None:
    x = torch.randn(3, 2, 2, seq, 8).to(dtype)
    assert not supports(x[0])
    if seq:
        assert all(
            torch.equal(*pair)
            for pair in zip(
                *(gradients(how, x, x[0]) for how in (attention, attention_reference)), strict=True
            )
        )


# -- what a query may see: its document, a window, with logits that are capped, fewer keys' heads

DOCUMENTS = ((3, 4, 33), (33,), (1, 32, 33))
REACHES = [
    {"documents": DOCUMENTS},
    {"window": 1},
    {"window": 5},
    {"window": 40},
    {"documents": DOCUMENTS, "window": 7},
    {"cap": 2.0},
    {"scale": 0.4},
    {"documents": DOCUMENTS, "window": 7, "cap": 2.0, "scale": 0.4},
    {"causal": False},
    {"causal": False, "documents": DOCUMENTS},
    {"causal": False, "cap": 2.0},
    {"causal": False, "documents": DOCUMENTS, "cap": 2.0, "scale": 0.4},
]


def all_of(how, parts: list[torch.Tensor], above: torch.Tensor, **reach) -> list[torch.Tensor]:
    parts = [part.clone().requires_grad_() for part in parts]
    out = how(*parts, **reach)
    return [out.detach(), *torch.autograd.grad(out, parts, above.to(out.dtype))]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_a_query_sees_what_it_may(reach, dtype, heads, monkeypatch) -> None:
    monkeypatch.setattr("hpczero_kernels.attention._ROWS", 16)
    random = torch.Generator().manual_seed(1)
    parts = [
        torch.randn(3, count, 33, 10, generator=random).to(dtype) for count in (*heads, heads[1])
    ]
    above = torch.randn(3, heads[0], 33, 10, generator=random).to(dtype)
    exact = all_of(attention_reference, [part.double() for part in parts], above, **reach)
    found = all_of(attention, parts, above, **reach)
    expected = all_of(attention_reference, parts, above, **reach)
    for own, others, right in zip(found, expected, exact, strict=True):
        assert own.dtype == dtype
        # gradients of queries that see one key are zero
        whole = right.norm() + 0.1 * right.numel() ** 0.5
        errors = [((one.double() - right).norm() / whole).item() for one in (own, others)]
        assert errors[0] <= 2 * errors[1] + 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reach", [{}, {"window": 7}, {"cap": 2.0}, {"causal": False}], ids=str)
def test_another_document_changes_no_bit_of_this_one(reach, dtype) -> None:
    ends, changed = ((9, 20, 33),), slice(9, 20)
    random = torch.Generator().manual_seed(1)
    parts = [torch.randn(1, 4, 33, 10, generator=random).to(dtype) for _ in range(3)]
    others = [part.clone() for part in parts]
    for part in others:
        part[:, :, changed] = torch.randn(1, 4, 11, 10, generator=random).to(dtype)
    above = torch.randn(1, 4, 33, 10, generator=random).to(dtype)
    one, other = (
        all_of(attention, each, above, documents=ends, **reach) for each in (parts, others)
    )
    for before, after in zip(one, other, strict=True):
        assert torch.equal(before[:, :, :9], after[:, :, :9])
        assert torch.equal(before[:, :, 20:], after[:, :, 20:])
        assert not torch.equal(before[:, :, changed], after[:, :, changed])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=str)
def test_a_query_sees_later_keys_too_unless_it_is_causal(documents) -> None:
    """Judged by a formula of its own: softmax over the keys of the query's document."""
    q, k, v = torch.randn(3, 3, 2, 33, 8, dtype=torch.float64).float()
    found = attention(q, k, v, documents, causal=False)
    for sample, ends in enumerate(documents or [(33,)] * 3):
        for begin, end in zip((0, *ends), ends, strict=False):
            part = sample, slice(None), slice(begin, end)
            shares = (q[part] @ k[part].transpose(1, 2) / 8**0.5).softmax(-1)
            assert torch.allclose(found[part], shares @ v[part], atol=1e-6)


def test_no_mask_of_all_positions_is_made() -> None:
    """Each pair of a query and a key lies in one tile; tiles have few that are not seen."""
    reach = Reach(((100, 1000), (1000,)), window=64, cap=0.0, scale=1.0)
    pairs = torch.zeros(2, 1000, 1000, dtype=torch.int64)
    inside = 0
    for tile in tiles(reach, 2, 1000):
        pairs[tile.samples, tile.rows, tile.keys] += 1
        inside += (tile.rows.stop - tile.rows.start) * (tile.keys.stop - tile.keys.start)
    sees = reach(1000, torch.device("cpu"))[:, 0]
    assert (pairs[sees] == 1).all()
    assert inside < 2 * 1000 * 4 * 64
