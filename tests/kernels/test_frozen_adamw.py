"""AdamW with a frozen second moment on the device of `tests.support.device`: by the formula in
fp64, and against its reference.
"""

import pytest
import torch
from torch import Tensor

from hpczero_kernels import frozen_adamw
from hpczero_kernels.cpu import Pool
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.frozen_adamw import (
    own_steps,
    own_steps_reference,
    take_steps,
    take_steps_reference,
)
from tests.support.assembly import assembly_of, is_vectorised
from tests.support.device import DEVICE, drawn

COUNTS = pytest.mark.parametrize(
    "count", [0, 1, 9, 2049] if SIMULATED else [0, 1, 7, 255, 257, 40_000]
)
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
OWN = (0.9, 0.03, 1.7, 1e-8)  # beta1, factor, scale, eps
TAKEN = (0.999, 0.02, 1.7, 1e-8)  # keep, size, scale, eps
FEW = pytest.mark.few(simulated=4)


def variance_of(count: int) -> Tensor:
    """Return second moments, of which some are 0."""
    values = drawn((count,), 3, torch.float32).square()
    return values.where(torch.arange(count, device=DEVICE) % 5 > 0, 0.0)


def exact_roots(variance: Tensor) -> Tensor:
    return (variance.double() * 1.7).sqrt() + 1e-8


@COUNTS
@PRECISIONS
@pytest.mark.parametrize("own", [own_steps, own_steps_reference])
@FEW
def test_own_steps_are_by_the_formula(own, count: int, dtype: torch.dtype) -> None:
    moment, gradient = drawn((count,), 1, torch.float32), drawn((count,), 2, dtype)
    variance, steps = variance_of(count), torch.full((count,), float("nan"), device=DEVICE)
    expected = 0.9 * moment.double() + 0.03 * gradient.double()
    own(moment, gradient, variance, steps, *OWN)
    torch.testing.assert_close(moment.double(), expected, rtol=1e-6, atol=1e-7)
    quotients = expected / exact_roots(variance)
    torch.testing.assert_close(
        steps.double(), quotients.where(variance != 0, 0.0), rtol=2e-6, atol=1e-6
    )
    assert not steps[variance == 0].any()


@COUNTS
@pytest.mark.parametrize("take", [take_steps, take_steps_reference])
@FEW
def test_steps_are_taken_by_the_formula(take, count: int) -> None:
    steps, master = drawn((count,), 1, torch.float32), drawn((count,), 2, torch.float32)
    variance, moment = variance_of(count), torch.full((count,), float("nan"), device=DEVICE)
    expected = 0.999 * master.double() - 0.02 * steps.double()
    given = steps.clone()
    take(steps, variance, moment, master, *TAKEN)
    assert torch.equal(steps, given)
    torch.testing.assert_close(master.double(), expected, rtol=1e-6, atol=1e-6)
    roots = given.double() * exact_roots(variance)
    torch.testing.assert_close(moment.double(), roots, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("own", [own_steps, own_steps_reference])
def test_what_is_not_finite_stays_so(own) -> None:
    gradient = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], device=DEVICE)
    moment, steps = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    own(moment, gradient, torch.ones(4, device=DEVICE), steps, *OWN)
    assert moment.isfinite().tolist() == steps.isfinite().tolist() == [False, False, False, True]


@pytest.mark.skipif(SIMULATED or DEVICE == "cuda", reason="CUDA's kernels run in their place")
def test_threads_and_cuts_change_no_bit() -> None:
    count, found = 300_001, []
    for threads in (1, 3):
        moment, master = drawn((count,), 1, torch.float32), drawn((count,), 4, torch.float32)
        variance, steps = variance_of(count), torch.empty(count)
        with Pool(threads) as pool:
            own_steps(moment, drawn((count,), 2, torch.bfloat16), variance, steps, *OWN, pool)
            take_steps(steps, variance, moment, master, *TAKEN, pool)
        found.append((moment, steps, master))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


@pytest.mark.slow
@pytest.mark.skipif(SIMULATED or DEVICE == "cuda", reason="CUDA's kernels run in their place")
def test_the_kernels_are_vectorised() -> None:
    for kernel, operations in (
        (frozen_adamw._own_steps, ("sqrtps", "divps")),
        (frozen_adamw._take_steps, ("sqrtps", "mulps")),
    ):
        text = assembly_of(kernel)
        for operation in operations:
            assert is_vectorised(text, operation), (kernel, operation)
