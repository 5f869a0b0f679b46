"""Lint of the compiled CUDA kernels.

They have wide accesses where they should, fp32 arithmetic, and all values in registers, few enough.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ptx import accesses, assembled, assembler, compiled, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

# kernel -> 128-bit loads and stores at least, registers of a thread at most
EXPECTED = {
    "adamw.step": (8, 7, 64),
    "frozen_adamw.own": (5, 4, 64),
    "frozen_adamw.take": (6, 4, 64),
    "lamb.first_pass": (8, 4, 96),
    "lamb.second_pass": (6, 3, 64),
    "lion.update": (6, 5, 64),
    "reduce.add": (4, 2, 64),
    "norm.forward": (8, 4, 64),
    "norm.backward": (6, 2, 128),
    "elementwise.gelu_forward_kernel": (2, 1, 64),
    "elementwise.gelu_backward_kernel": (4, 2, 80),
    "glu.forward": (2, 1, 64),
    "glu.backward": (3, 2, 80),
    "dropout.forward": (4, 1, 80),
    "dropout.backward": (1, 2, 80),
    "cross_entropy.statistics": (1, 0, 40),
    "cross_entropy.gradient": (1, 1, 40),
    "signs.pack": (6, 2, 64),
    "signs.average": (2, 2, 64),
    "quantised.pack": (4, 2, 64),
    "quantised.average": (0, 2, 64),
    "soft_cap.forward": (2, 2, 40),
    "soft_cap.backward": (4, 2, 64),
    "rotary.turn": (5, 3, 80),
}


def kernels() -> dict[str, Any]:
    from hpczero_kernels.cuda.launch import all_kernels

    return {kernel.name: kernel for kernel in all_kernels()}


def test_every_kernel_is_looked_at() -> None:
    assert kernels().keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.few(6)
def test_a_kernel(name: str, tmp_path: Path) -> None:
    loads, stores, most = EXPECTED[name]
    kernel = kernels()[name]
    text = compiled(kernel)
    assert accesses(text, "ld") >= loads
    assert accesses(text, "st") >= stores
    assert not re.search(
        r"\b(ld|st)(\.\w+)*\.v[24]", re.sub(r"\b(ld|st)\.(global|param|shared)", "", text)
    ), "accesses of unknown memory"
    assert not re.findall(r"\.f64\b", text), "fp64 arithmetic"
    assert not re.findall(r"\.local\b|\bcall\b", text), "memory of a thread, or a call"
    if assembler() is None:
        pytest.skip(
            "no assembler (ptxas): registers and spills are not checked;"
            " pip install nvidia-cuda-nvcc"
        )
    registers, spilled = assembled(text, tmp_path, kernel.registers)
    assert registers <= most
    assert spilled == 0


def test_the_lint_sees_what_it_must() -> None:
    assert accesses("ld.global.v4.u32 {%r1} ld.global.nc.v4.f32 st.global.u32 ld.v4.u32", "ld") == 2
    assert accesses("st.global.v4.u32", "ld") == 0
