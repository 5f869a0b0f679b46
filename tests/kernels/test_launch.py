"""How a kernel for GPUs gets to one: whose numba.cuda it is, and in which thread's context it is launched."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from hpczero_kernels import gelu
from tests.kernels.device import DEVICE
from tests.kernels.ptx import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

WITHOUT_PTH_FILES = """
import hpczero_kernels.cuda.launch
import numba.cuda
assert numba.cuda.implementation == "NVIDIA", numba.cuda.__file__
"""


def test_numbas_own_target_is_not_taken_where_python_reads_no_pth_files() -> None:
    """As in `pip install --target`: -S leaves out what Python does for its own folders of packages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-S", "-c", WITHOUT_PTH_FILES], env=environment, capture_output=True, text=True, timeout=120, check=False)
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


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
def test_a_kernel_may_be_the_first_that_a_thread_asks_of_a_gpu() -> None:
    """As in backward, which has a thread of its own."""
    x, found = torch.randn(4, 64, device="cuda"), list[torch.Tensor]()
    expected = gelu.gelu(x)
    in_a_thread(lambda: found.append(gelu.gelu(x)))
    assert torch.equal(found[0], expected)
