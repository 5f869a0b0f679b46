"""LAMB on the device of `tests.support.device`: by the formula in fp64, reference and kernel."""

import pytest
import torch
from torch import Tensor

from hpczero_kernels import lamb
from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars, scalars_of_step
from hpczero_kernels.cpu import BLOCK, SKIP, Pool
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.lamb import (
    block_count,
    lamb_moments,
    lamb_moments_reference,
    lamb_step,
    lamb_step_reference,
)
from tests.support.assembly import assembly_of, is_vectorised
from tests.support.device import DEVICE, drawn

COUNTS = pytest.mark.parametrize(
    "count", [0, 1, 9, 4100] if SIMULATED else [0, 1, 7, 255, 4097, 40_000]
)
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
FEW = pytest.mark.few(simulated=4)
DECAY, RATIO, STEP, LR, BETAS, EPS, SCALE = 0.1, 1.7, 3, 0.02, (0.9, 0.95), 1e-6, 0.3


def scalars(step: int = STEP) -> AdamWScalars:
    return AdamWScalars(scalars_of_step(step, LR, BETAS, EPS, SCALE).values.to(DEVICE))


def state_of(count: int, dtype: torch.dtype = torch.float32) -> AdamWBuffers:
    return AdamWBuffers(
        drawn((count,), 1, torch.float32),
        drawn((count,), 2, torch.float32),
        drawn((count,), 3, torch.float32).square(),
        drawn((count,), 4, dtype),
        None if dtype == torch.float32 else torch.zeros(count, dtype=dtype, device=DEVICE),
    )


def squares_of(count: int) -> Tensor:
    return torch.full((block_count(count), 2), float("nan"), device=DEVICE, dtype=torch.float32)


def ratio() -> Tensor:
    return torch.tensor([RATIO], device=DEVICE, dtype=torch.float32)


def exact(state: AdamWBuffers) -> tuple[Tensor, Tensor, Tensor]:
    """Return both moments after the step, and u, by the formula."""
    gradient = state.gradient.double() * SCALE
    moment1 = BETAS[0] * state.moment1.double() + (1 - BETAS[0]) * gradient
    moment2 = BETAS[1] * state.moment2.double() + (1 - BETAS[1]) * gradient**2
    roots = (moment2 / (1 - BETAS[1] ** STEP)).sqrt() + EPS
    step = moment1 / (1 - BETAS[0] ** STEP) / roots + DECAY * state.master.double()
    return moment1, moment2, step


@COUNTS
@PRECISIONS
@pytest.mark.parametrize("by", ["kernel", "reference"])
@FEW
def test_both_passes_are_by_the_formula(by: str, count: int, dtype: torch.dtype) -> None:
    first = lamb_moments if by == "kernel" else lamb_moments_reference
    second = lamb_step if by == "kernel" else lamb_step_reference
    state, squares = state_of(count, dtype), squares_of(count)
    before = state.master.clone()
    moment1, moment2, step = exact(state)
    first(state, DECAY, scalars(), squares)
    assert torch.equal(state.master, before)
    torch.testing.assert_close(state.moment1.double(), moment1, rtol=1e-6, atol=2e-7)
    torch.testing.assert_close(state.moment2.double(), moment2, rtol=1e-6, atol=1e-9)
    for block, (of_weights, of_steps) in enumerate(squares.tolist()):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        assert of_weights == pytest.approx(float(before[part].double().square().sum()), rel=1e-5)
        assert of_steps == pytest.approx(float(step[part].square().sum()), rel=1e-5)
    second(state, DECAY, scalars(), ratio())
    expected = before.double() - LR * RATIO * step
    torch.testing.assert_close(state.master.double(), expected, rtol=2e-6, atol=2e-6)
    if state.weights is not None:
        assert torch.equal(state.weights, state.master.to(dtype))


@pytest.mark.parametrize("by", ["kernel", "reference"])
def test_a_step_that_is_skipped_changes_nothing(by: str) -> None:
    state, left_out = state_of(300, torch.bfloat16), scalars()
    left_out.values[SKIP] = 1.0
    before = [None if value is None else value.clone() for value in vars(state).values()]
    first, second = (lamb_moments, lamb_step)
    if by == "reference":
        first, second = (lamb_moments_reference, lamb_step_reference)
    first(state, DECAY, left_out, squares_of(300))
    second(state, DECAY, left_out, ratio())
    for value, was in zip(vars(state).values(), before, strict=True):
        assert value is was or torch.equal(value, was)


@pytest.mark.skipif(SIMULATED or DEVICE == "cuda", reason="CUDA's kernels run in their place")
def test_threads_change_no_bit() -> None:
    count, found = 100 * BLOCK + 9, []
    for threads in (1, 3):
        state, squares = state_of(count, torch.bfloat16), squares_of(count)
        with Pool(threads) as pool:
            lamb_moments(state, DECAY, scalars(), squares, pool)
            lamb_step(state, DECAY, scalars(), ratio(), pool)
        found.append((*vars(state).values(), squares))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


@pytest.mark.slow
@pytest.mark.skipif(SIMULATED or DEVICE == "cuda", reason="CUDA's kernels run in their place")
def test_the_kernels_are_vectorised() -> None:
    for kernel, operations in (
        (lamb._lamb_moments, ("sqrtps", "divps", "mulps")),
        (lamb._lamb_step, ("sqrtps", "divps")),
    ):
        text = assembly_of(kernel)
        for operation in operations:
            assert is_vectorised(text, operation), (kernel, operation)
