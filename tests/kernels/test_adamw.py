"""AdamW on flat buffers against torch.optim.AdamW, and the scaling of the gradient."""

import pytest
import torch

from hpczero_kernels.adamw import State, adamw_reference, scalars_of_step


@pytest.mark.parametrize("size", [0, 1, 123, 70_000])
def test_ten_steps_equal_torch(size):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master, moment1, moment2 = start.clone(), torch.zeros(size), torch.zeros(size)
    for step in range(1, 11):
        gradient = torch.randn(size, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        adamw_reference(State(master, moment1, moment2, gradient * 8, None), 0.1, scalars_of_step(step, 0.01, (0.9, 0.95), 1e-8, 1 / 8))
        torch.testing.assert_close(master, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_follow_the_master(dtype):
    master = torch.randn(1000)
    weights, gradient = torch.full((1000,), float("nan"), dtype=dtype), torch.randn(1000).to(dtype)
    adamw_reference(State(master, torch.zeros(1000), torch.zeros(1000), gradient, weights), 0.0, scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0))
    assert torch.equal(weights, master.to(dtype))
