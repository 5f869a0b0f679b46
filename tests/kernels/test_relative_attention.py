"""Attention with a bias for distances: held against its plain form, and classes against T5's."""

from itertools import product
from math import log

import pytest
import torch
from torch import Tensor

from hpczero_kernels import relative_attention as kernel
from hpczero_kernels.relative_attention import (
    Distances,
    bias_of_distances,
    relative_attention,
    relative_attention_reference,
)

SHAPES = [(2, 3, 17, 5), (1, 6, 40, 8), (3, 2, 1, 4), (2, 1, 2, 3)]  # samples, heads, seq, head_dim


def inputs(shape: tuple[int, ...], classes: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [shape, shape, shape, (classes, shape[1])]
    return [
        torch.randn(size, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
        for size in sizes
    ]


def outcome(function: object, given: list[Tensor], distances: Distances) -> list[Tensor]:
    """The result and the gradients of all inputs."""
    out = function(*given, distances)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(9)
    seen = torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out.dtype)
    return [out, *torch.autograd.grad(out, given, seen)]


@pytest.mark.parametrize("tile", [1, 2000, 1 << 18])
@pytest.mark.parametrize(("shape", "causal"), product(SHAPES, (False, True)))
def test_result_and_gradients_are_those_of_the_plain_form(
    shape: tuple[int, ...], causal: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_TILE", tile)  # so few heads at a time
    distances = Distances(8, 12, causal)
    given = inputs(shape, 8, torch.float32)
    found = outcome(relative_attention, given, distances)
    expected = outcome(relative_attention_reference, given, distances)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.shape == plain.shape
        assert (ours - plain).abs().max() < 1e-5 * max(1.0, plain.abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_is_off_by_roundings(causal: bool) -> None:
    distances = Distances(8, 12, causal)
    halves = inputs((2, 3, 33, 8), 8, torch.bfloat16)
    wide = [one.detach().float().requires_grad_() for one in halves]
    found = outcome(relative_attention, halves, distances)
    expected = outcome(relative_attention_reference, wide, distances)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", [1, 2, 9, 40])
def test_the_bias_of_each_distance_is_that_of_its_class(seq: int, causal: bool) -> None:
    distances = Distances(8, 12, causal)
    table = inputs((1, 3, seq, 1), 8, torch.bfloat16)[3]
    found = bias_of_distances(table, distances, seq)
    classes = distances.class_of(torch.arange(1 - seq, seq, dtype=torch.int64))
    assert found.dtype == torch.float32
    assert torch.equal(found, table[classes].t().float())
    above = torch.ones(3, 2 * seq - 1, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(found, table, above)
    counts = torch.bincount(classes, minlength=8)
    assert torch.equal(gradient, counts[:, None].expand(-1, 3).to(torch.bfloat16))


def by_formula(distance: int, classes: int, reach: int, causal: bool) -> int:
    """The class of a key's position less the query's, in numbers, as T5's paper has it."""
    first = 0
    if not causal:
        classes //= 2
        first = classes if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    each = classes // 2
    if distance < each:
        return first + distance
    share = log(distance / each) / log(reach / each)
    # log(8) / log(2) is 3 or a little less: no distance of these tests lies at such a place
    return first + min(classes - 1, each + int(share * (classes - each)))


@pytest.mark.parametrize(("classes", "reach"), [(32, 128), (8, 12), (64, 1000), (4, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_classes_are_those_of_the_formula(classes: int, reach: int, causal: bool) -> None:
    at = torch.arange(-2 * reach, 2 * reach + 1, dtype=torch.int64)
    found = Distances(classes, reach, causal).class_of(at).tolist()
    expected = [by_formula(distance, classes, reach, causal) for distance in at.tolist()]
    off = [one for one, two in zip(found, expected, strict=True) if one != two]
    assert not off
    assert set(found) == set(range(classes)) - ({classes // 2} if not causal else set())


def test_a_rank_without_heads_has_nothing_to_mix() -> None:
    given = inputs((2, 0, 5, 3), 8, torch.float32)
    out, *gradients = outcome(relative_attention, given, Distances(8, 12, causal=True))
    assert out.shape == (2, 0, 5, 3)
    assert [one.numel() for one in gradients] == [0, 0, 0, 0]
