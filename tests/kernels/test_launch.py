"""Launches of kernels: the package of numba.cuda, contexts of threads, and no wait of the host."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from hpczero_kernels import (
    adamw,
    cross_entropy,
    elementwise,
    frozen_adamw,
    message_sizes,
    norm,
    quantised,
    reduce,
    signs,
)
from hpczero_kernels.adamw import AdamWBuffers
from tests.support.device import DEVICE
from tests.support.ptx import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
ON_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")

WITHOUT_PTH_FILES = """
import hpczero_kernels.cuda.launch
import numba.cuda
assert numba.cuda.implementation == "NVIDIA", numba.cuda.__file__
"""


def test_numbas_own_target_is_not_taken_where_python_reads_no_pth_files() -> None:
    """-S skips Python's reading of .pth files, as for packages of `pip install --target`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_PTH_FILES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def in_a_thread(action) -> None:  # type: ignore[no-untyped-def]
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_every_thread_makes_its_own_streams() -> None:
    from hpczero_kernels.cuda.launch import Streams

    made = list[tuple[str, int]]()
    streams = Streams(lambda pointer: made.append((threading.current_thread().name, pointer)))
    for _ in range(2):
        streams.of(0)
    in_a_thread(lambda: [streams.of(0), streams.of(7), streams.of(7)])
    assert len(made) == len(set(made)) == 3


@ON_A_GPU
def test_a_kernel_may_be_the_first_that_a_thread_asks_of_a_gpu() -> None:
    """Backward has a thread of its own."""
    x, found = torch.randn(4, 64, device="cuda"), list[torch.Tensor]()
    expected = elementwise.gelu(x)
    in_a_thread(lambda: found.append(elementwise.gelu(x)))
    assert torch.equal(found[0], expected)


def step(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    state: AdamWBuffers,
    scalars: adamw.AdamWScalars,
) -> torch.Tensor:
    """Run forward, backward and an update that depends on nothing else."""
    normal, _ = norm.add_layer_norm(x, x, weight, weight)
    loss = cross_entropy.cross_entropy(elementwise.gelu(normal, weight), targets)
    (of_x,) = torch.autograd.grad(loss, x)
    squares = torch.empty(1, device=x.device)
    reduce.sum_pieces([of_x.view(-1), of_x.view(-1)], state.gradient, False, squares)
    scalars.follow(squares.double().sum().sqrt(), 1.0, 1.0)
    send(state.gradient)
    values = (state.moment1, state.gradient, state.moment2, state.gradient.clone())
    frozen_adamw.own_steps(*values, 0.9, 0.1, 1.0, 1e-8)
    frozen_adamw.take_steps(
        values[3], state.moment2, state.moment1, state.master, 1.0, 0.0, 1.0, 1e-8
    )
    adamw.adamw(state, 0.1, scalars)
    return loss.detach()


def send(gradient: torch.Tensor) -> None:
    """Replace the gradient by what messages have of it."""
    count = gradient.numel()
    packed = gradient.new_empty(1, message_sizes.sign_bytes(count), dtype=torch.uint8)
    scales = gradient.new_empty(1, message_sizes.sign_blocks(count))
    signs.pack_signs(gradient.clone(), gradient, None, packed[0], scales[0])
    signs.average_signs(packed, scales, gradient)
    signs.unpack_signs(packed[0], scales[0], None, gradient)
    packed = gradient.new_empty(1, message_sizes.quantised_bytes(count, 8), dtype=torch.uint8)
    scales = gradient.new_empty(1, message_sizes.quantised_blocks(count))
    quantised.quantise(gradient, None, packed[0], scales[0], 8)
    quantised.average_quantised(packed, scales, gradient, 8)
    quantised.restore(packed[0], scales[0], gradient, 8)


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AdamWBuffers, adamw.AdamWScalars]:
    torch.manual_seed(1)
    x, weight = (
        torch.randn(8, 64, device="cuda", requires_grad=True),
        torch.randn(64, device="cuda"),
    )
    state = AdamWBuffers(*(torch.zeros(512, device="cuda") for _ in range(4)), None)
    scalars = adamw.scalars_of_step(1, 0.01, (0.9, 0.95), 1e-8)
    return (
        x,
        weight,
        torch.arange(8, device="cuda"),
        state,
        adamw.AdamWScalars(scalars.values.cuda()),
    )


@ON_A_GPU
def test_the_host_never_waits() -> None:
    one = given()
    step(*one)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*one)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ON_A_GPU
def test_a_step_is_captured_as_a_graph() -> None:
    plain, captured = given(), given()
    with torch.cuda.stream(torch.cuda.Stream()), torch.autograd.set_multithreading_enabled(False):
        step(*captured)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(*captured)
    graph.replay()
    expected = [step(*plain) for _ in range(2)][-1]
    assert torch.equal(loss, expected)
    assert torch.equal(captured[3].master, plain[3].master)


@ON_A_GPU
@pytest.mark.parametrize("operation", ["gelu", "norm", "sum", "cross_entropy"])
def test_there_may_be_more_elements_than_32_bits_count(operation: str) -> None:
    columns = 4096
    rows = 2**32 // columns + 3
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("the GPU has not enough memory free")
    x, last = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda"), slice(rows - 2, rows)
    x[last] = torch.randn(2, columns, device="cuda")
    weight, targets = (
        torch.ones(columns, dtype=torch.bfloat16, device="cuda"),
        torch.full((rows,), cross_entropy.IGNORED, device="cuda"),
    )
    targets[-1] = 5
    with torch.no_grad():
        if operation == "sum":
            reduce.sum_pieces(
                [x.view(-1), x.view(-1)], out := torch.empty_like(x.view(-1)), False, None
            )
            assert torch.equal(out.view(rows, columns)[last], x[last] + x[last])
        elif operation == "cross_entropy":
            torch.testing.assert_close(
                cross_entropy.cross_entropy(x, targets),
                cross_entropy.cross_entropy(x[last], targets[last]),
            )
        else:
            run = elementwise.gelu if operation == "gelu" else lambda x: norm.rms_norm(x, weight)
            assert torch.equal(run(x)[last], run(x[last]))
