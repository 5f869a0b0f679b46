"""AdamW on flat buffers, reference and kernel, against torch.optim.AdamW.

Also the gradient's scale, half precision, cuts and threads.
"""

import re

import pytest
import torch

from hpczero_kernels import adamw as module
from hpczero_kernels.adamw import AdamWBuffers, adamw, adamw_reference, scalars_of_step
from hpczero_kernels.cpu import BLOCK, Pool
from tests.support.assembly import assembly_of, is_vectorised

BOTH = pytest.mark.parametrize("update", [adamw_reference, adamw])
HALVES = [torch.bfloat16, torch.float16]


def normal(count, seed, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state_of(count, gradient_dtype=torch.float32, weights_dtype=None):
    """Return buffers as in the middle of a training."""
    weights = (
        None if weights_dtype is None else torch.full((count,), float("nan"), dtype=weights_dtype)
    )
    return AdamWBuffers(
        normal(count, 1),
        normal(count, 2),
        normal(count, 3).square(),
        normal(count, 4, gradient_dtype),
        weights,
    )


def part_of(state, part):
    return AdamWBuffers(
        *(None if buffer is None else buffer[part] for buffer in vars(state).values())
    )


def equal(left, right):
    pairs = zip(vars(left).values(), vars(right).values(), strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@BOTH
@pytest.mark.parametrize("size", [0, 1, 123, 70_000])
@pytest.mark.parametrize(
    ("lr", "betas", "decay"),
    [(0.01, (0.9, 0.95), 0.1), (0.01, (0.9, 0.999), 0.0), (0.0, (0.9, 0.95), 0.1)],
)
def test_ten_steps_equal_torch(update, size, lr, betas, decay):
    start = normal(size, 0)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=lr, betas=betas, eps=1e-8, weight_decay=decay)
    master, moment1, moment2 = start.clone(), torch.zeros(size), torch.zeros(size)
    for step in range(1, 11):
        gradient = normal(size, step)
        theirs.grad = gradient.clone()
        optimizer.step()
        update(
            AdamWBuffers(master, moment1, moment2, gradient * 8, None),
            decay,
            scalars_of_step(step, lr, betas, 1e-8, 1 / 8),
        )
        torch.testing.assert_close(master, theirs.detach(), rtol=1e-6, atol=2e-7)
    if size:
        torch.testing.assert_close(
            moment1, optimizer.state[theirs]["exp_avg"], rtol=1e-5, atol=2e-7
        )
        torch.testing.assert_close(
            moment2, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=0
        )


@BOTH
def test_bad_gradients_go_where_torch_takes_them(update):
    gradient = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, 1e-30])
    theirs = torch.nn.Parameter(torch.ones(7))
    theirs.grad = gradient.clone()
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer.step()
    state = AdamWBuffers(
        torch.ones(7),
        torch.zeros(7),
        torch.zeros(7),
        gradient,
        torch.zeros(7, dtype=torch.bfloat16),
    )
    update(state, 0.1, scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0))
    torch.testing.assert_close(state.master, theirs.detach(), equal_nan=True)
    torch.testing.assert_close(state.moment1, optimizer.state[theirs]["exp_avg"], equal_nan=True)
    torch.testing.assert_close(state.moment2, optimizer.state[theirs]["exp_avg_sq"], equal_nan=True)
    torch.testing.assert_close(
        state.weights, state.master.bfloat16(), equal_nan=True, rtol=0, atol=0
    )


@BOTH
@pytest.mark.parametrize("gradient_dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_weights_follow_the_master(update, gradient_dtype, dtype):
    state = state_of(3000, gradient_dtype, dtype)
    before = state.master.clone()
    update(state, 0.0, scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0))
    assert torch.equal(state.weights, state.master.to(dtype))
    assert not torch.equal(state.master, before)


@pytest.mark.parametrize("gradient_dtype", [torch.float32, *HALVES])
def test_the_kernel_equals_its_reference(gradient_dtype):
    state, expected = state_of(5000, gradient_dtype), state_of(5000, gradient_dtype)
    scalars = scalars_of_step(7, 0.01, (0.9, 0.95), 1e-8, 0.3)
    adamw(state, 0.1, scalars)
    adamw_reference(expected, 0.1, scalars)
    for name in ("master", "moment1", "moment2", "gradient"):
        torch.testing.assert_close(
            getattr(state, name), getattr(expected, name), rtol=1e-6, atol=3e-7
        )


@pytest.mark.parametrize("offset", [1, 3, 32])
def test_neither_cut_nor_alignment_changes_a_bit(offset):
    count = 2 * BLOCK + 777
    scalars = scalars_of_step(3, 0.01, (0.9, 0.95), 1e-8, 0.3)
    inside, whole = (
        slice(offset, offset + count),
        state_of(count + 2 * offset, torch.bfloat16, torch.bfloat16),
    )
    untouched = part_of(whole, slice(0, offset)), part_of(whole, slice(offset + count, None))
    kept = [AdamWBuffers(*(buffer.clone() for buffer in vars(edge).values())) for edge in untouched]
    aligned = AdamWBuffers(*(buffer.clone() for buffer in vars(part_of(whole, inside)).values()))
    adamw(aligned, 0.1, scalars)
    for first, last in (
        (0, BLOCK),
        (BLOCK, BLOCK + 1),
        (BLOCK + 1, BLOCK + 100),
        (BLOCK + 100, count),
    ):
        adamw(part_of(part_of(whole, inside), slice(first, last)), 0.1, scalars)
    assert equal(part_of(whole, inside), aligned)
    for edge, before in zip(untouched, kept, strict=True):
        assert torch.equal(edge.master, before.master)
        assert torch.equal(edge.moment2, before.moment2)
        assert edge.weights.isnan().all()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads):
    count, scalars = 100 * BLOCK + 9, scalars_of_step(3, 0.01, (0.9, 0.95), 1e-8, 0.3)
    alone, shared = (state_of(count, torch.bfloat16, torch.bfloat16) for _ in range(2))
    adamw(alone, 0.1, scalars)
    with Pool(threads) as pool:
        adamw(shared, 0.1, scalars, pool)
    assert equal(alone, shared)


def test_buffers_that_do_not_fit_together_are_refused():
    state, scalars = (
        state_of(100, weights_dtype=torch.bfloat16),
        scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0),
    )
    for name in vars(state):
        for wrong in (getattr(state, name)[:99], getattr(state, name).repeat(2)[::2]):
            with pytest.raises(AssertionError):
                adamw(AdamWBuffers(**{**vars(state), name: wrong}), 0.1, scalars)
    with pytest.raises(AssertionError):
        adamw(
            AdamWBuffers(
                state.master.bfloat16(), state.moment1, state.moment2, state.gradient, None
            ),
            0.1,
            scalars,
        )


def test_the_kernel_is_vectorised_and_releases_the_lock():
    text = assembly_of(module._adamw)
    for operation in ("sqrtps", "divps", "mulps", "pmovzxwd"):
        assert is_vectorised(text, operation), operation
    assert "%rsp" not in text or len(re.findall("sqrtps.*%[yz]mm", text)) >= 2  # both loops
    assert module._adamw.targetoptions["nogil"]
