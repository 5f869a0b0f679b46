"""Attention's own backward against the formula in fp64, beside PyTorch's."""

import pytest
import torch

from hpczero_kernels.operations import attention, attention_reference, supports

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
