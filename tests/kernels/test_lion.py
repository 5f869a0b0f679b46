"""Lion on the device of `tests.support.device`: by the formula in fp64, reference and kernel."""

import pytest
import torch

from hpczero_kernels import lion as module
from hpczero_kernels.adamw import AdamWScalars, scalars_of_step
from hpczero_kernels.cpu import BLOCK, SKIP, Pool
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.lion import LionBuffers, lion, lion_reference
from tests.support.assembly import assembly_of, is_vectorised
from tests.support.device import DEVICE, drawn

COUNTS = pytest.mark.parametrize(
    "count", [0, 1, 9, 2049] if SIMULATED else [0, 1, 7, 255, 257, 40_000]
)
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
BOTH = pytest.mark.parametrize("update", [lion, lion_reference])
FEW = pytest.mark.few(simulated=4)
DECAY, LR, BETAS, SCALE = 0.1, 0.02, (0.9, 0.99), 0.3


def scalars() -> AdamWScalars:
    return AdamWScalars(scalars_of_step(3, LR, BETAS, 1e-8, SCALE).values.to(DEVICE))


def state_of(count: int, dtype: torch.dtype = torch.float32) -> LionBuffers:
    return LionBuffers(
        drawn((count,), 1, torch.float32),
        drawn((count,), 2, torch.float32),
        drawn((count,), 4, dtype),
        None if dtype == torch.float32 else torch.zeros(count, dtype=dtype, device=DEVICE),
    )


@COUNTS
@PRECISIONS
@BOTH
@FEW
def test_a_step_is_by_the_formula(update, count: int, dtype: torch.dtype) -> None:
    state = state_of(count, dtype)
    gradient, moment = state.gradient.double() * SCALE, state.moment.double()
    mixed = BETAS[0] * moment + (1 - BETAS[0]) * gradient
    expected = (1 - LR * DECAY) * state.master.double() - LR * mixed.sign()
    after = BETAS[1] * moment + (1 - BETAS[1]) * gradient
    update(state, DECAY, scalars())
    torch.testing.assert_close(state.moment.double(), after, rtol=1e-6, atol=2e-7)
    clear = mixed.abs() > 1e-7  # elsewhere rounding may turn the sign
    torch.testing.assert_close(state.master.double()[clear], expected[clear], rtol=2e-6, atol=1e-6)
    if state.weights is not None:
        assert torch.equal(state.weights, state.master.to(dtype))


@BOTH
def test_what_has_no_sign_is_not_moved_and_nan_stays_in_the_moment(update) -> None:
    gradient = torch.tensor([0.0, -0.0, float("nan"), float("inf")], device=DEVICE)
    zeros = torch.zeros(4, dtype=torch.float32, device=DEVICE)
    state = LionBuffers(zeros + 1, zeros.clone(), gradient, None)
    update(state, 0.0, scalars())
    assert state.master[:2].tolist() == [1.0, 1.0]
    assert float(state.master[2]) == 1.0
    assert bool(state.moment[2].isnan())
    assert float(state.master[3]) == pytest.approx(1 - LR)


@BOTH
def test_a_step_that_is_skipped_changes_nothing(update) -> None:
    state, left_out = state_of(300, torch.bfloat16), scalars()
    left_out.values[SKIP] = 1.0
    before = [None if value is None else value.clone() for value in vars(state).values()]
    update(state, DECAY, left_out)
    for value, was in zip(vars(state).values(), before, strict=True):
        assert value is was or torch.equal(value, was)


@pytest.mark.skipif(SIMULATED or DEVICE == "cuda", reason="CUDA's kernels run in their place")
def test_threads_change_no_bit() -> None:
    count, found = 100 * BLOCK + 9, []
    for threads in (1, 3):
        state = state_of(count, torch.bfloat16)
        with Pool(threads) as pool:
            lion(state, DECAY, scalars(), pool)
        found.append(tuple(vars(state).values()))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


@pytest.mark.slow
@pytest.mark.skipif(SIMULATED or DEVICE == "cuda", reason="CUDA's kernels run in their place")
def test_the_kernel_is_vectorised() -> None:
    assert is_vectorised(assembly_of(module._lion), "mulps")
