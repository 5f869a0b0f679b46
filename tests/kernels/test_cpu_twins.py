"""Kernels for CPUs of models' operations: against the references, on several threads, and what
they keep for backward.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from hpczero.model.batch import MicroBatch
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY
from hpczero.model.llama import Block
from hpczero.model.llama_record import LLAMA
from hpczero.model.rotary import Angles
from hpczero.model.shapes import ChunkLayout
from hpczero.spec.schema import Model
from hpczero_kernels import (
    cpu,
    cpu_functions,
    dispatch,
    glu,
    norm,
    rms_norm_cpu,
    rotary,
    soft_cap,
)
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.operations import OPERATIONS
from tests.support.assembly import assembly_of, is_vectorised

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NOT_SIMULATED = pytest.mark.skipif(SIMULATED, reason="CUDA's kernels run in their place")


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls(dtype: torch.dtype, rows: int, columns: int) -> dict[str, list[Any]]:
    """Return the kernel, its reference and the arguments of both."""
    x, gradient = (drawn(rows, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    both = drawn(rows, 2, columns, dtype=dtype, seed=3)
    weight = drawn(columns, dtype=dtype, seed=4)
    heads = drawn(2, rows, 3, columns, dtype=dtype, seed=5)
    tables = (drawn(2, rows, columns // 3, dtype=torch.float32, seed=seed) for seed in (6, 7))
    root = x.float().square().mean(-1).rsqrt()
    nothing, about_rows = torch.empty(0), (None, weight, None, norm.EPS, False, 1.0)
    backward = (gradient, None, x, weight, nothing, root, False, 1.0)
    found: dict[str, list[Any]] = {
        "rms_norm forward": [norm._forward_on_cpu, norm.forward_reference, x, *about_rows],
        "rms_norm backward": [norm._backward_on_cpu, norm.backward_reference, *backward],
        "rotary": [rotary.turn_on_cpu, rotary.turn_reference, heads, *tables, True],
        "soft_cap forward": [soft_cap.forward_on_cpu, soft_cap.forward_reference, x, 2.0],
        "soft_cap backward": [
            soft_cap.backward_on_cpu, soft_cap.backward_reference, gradient, x, 2.0,
        ],
    }  # fmt: skip
    for name in glu.ACTIVATIONS:
        forward = [glu.forward_on_cpu, glu.forward_reference, both, name]
        found[f"{name} forward"] = forward
        forward = [glu.backward_on_cpu, glu.backward_reference, gradient, both, name]
        found[f"{name} backward"] = forward
    return found


OPERATORS = {"rotary": "_turn"}
NAMES = list(calls(torch.float32, 1, 3))


def listed(made: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Take the threads back, and fill new memory with NaN."""
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_gives_what_its_reference_gives(name: str, dtype: torch.dtype) -> None:
    """Rows that one stretch, one vector and one group of rows do not divide."""
    for rows, columns in ((67, 301), (1, 5), (131, 16), (0, 8)):
        kernel, reference, *given = calls(dtype, rows, columns)[name]
        for ours, theirs in zip(listed(kernel(*given)), listed(reference(*given)), strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            distance = (ours.double() - theirs.double()).norm()
            assert distance <= ROUNDING[dtype] * theirs.double().norm(), (rows, columns)


@NOT_SIMULATED
@pytest.mark.parametrize("name", NAMES)
def test_the_compiler_is_told_the_right_shapes(name: str) -> None:
    _, reference, *given = calls(torch.bfloat16, 5, 24)[name]
    module = importlib.import_module(reference.__module__)
    operator = getattr(module, OPERATORS.get(name, f"_{name.split()[-1]}"))
    torch.library.opcheck(operator, tuple(given), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
def test_threads_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _, *given = calls(torch.bfloat16, 700, 300)[name]
    torch.set_num_threads(1)
    expected = listed(kernel(*given))
    cut, cuts = cpu.slices_of, []

    def noted(*arguments: int) -> list[tuple[int, int]]:
        cuts.append(cut(*arguments))
        return cuts[-1]

    monkeypatch.setattr(cpu, "slices_of", noted)
    torch.set_num_threads(3)
    found = listed(kernel(*given))
    assert [len(slices) for slices in cuts] == [3]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("kernel", "operations"),
    [
        (glu._glu_forward, ("divps", "mulps")),
        (glu._glu_backward, ("divps", "mulps")),
        (soft_cap._cap_forward, ("divps", "mulps")),
        (soft_cap._cap_backward, ("divps", "mulps")),
        (rotary._turn_rows, ("mulps",)),
        (rms_norm_cpu._rms_forward, ("mulps", "addps")),
        (rms_norm_cpu._rms_backward, ("mulps", "addps")),
    ],
)
@pytest.mark.few(2)
def test_a_kernel_is_vectorised_and_releases_the_lock(
    kernel: Any, operations: tuple[str, ...]
) -> None:
    text = assembly_of(kernel)
    for operation in operations:
        assert is_vectorised(text, operation), operation
    assert kernel.targetoptions["nogil"]


@njit
def functions_of(x, out):
    for i in range(x.size):
        out[0, i] = cpu_functions.exp_of_negative(-abs(x[i]))
        out[1, i] = cpu_functions.tanh(x[i])
        out[2, i] = cpu_functions.sigmoid(x[i])
        out[3, i] = cpu_functions.erf(x[i], cpu_functions.exp_of_negative(-x[i] * x[i]))


def test_functions_are_exact_to_some_roundings() -> None:
    ends = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 3e38, -3e38]
    x = np.concatenate([np.linspace(-100, 100, 200_001), np.linspace(-1, 1, 2001), ends])
    x = x.astype(np.float32)
    out = np.empty((4, x.size), np.float32)
    functions_of(x, out)
    wide = torch.from_numpy(x).double()
    exact = (-wide.abs()).exp(), wide.tanh(), wide.sigmoid(), wide.erf()
    for number, (relative, absolute) in enumerate(
        [(2e-7, 1e-37), (2e-7, 0), (3e-7, 1e-37), (2.5e-7, 0)]
    ):
        torch.testing.assert_close(
            torch.from_numpy(out[number]).double(),
            exact[number], rtol=relative, atol=absolute, equal_nan=True,
        )  # fmt: skip


KEPT: dict[str, tuple[Callable[..., Tensor], int]] = {
    "rms_norm": (lambda on, x: on.rms_norm(x, torch.ones_like(x[0, 0]), 1e-5, 1.0), 3 * 5 * 4),
    "rotary": (lambda on, x: on.rotary(x.unflatten(-1, (2, 8)), *TABLES), 2 * 5 * 4 * 4),
    "glu": (lambda on, x: on.glu(x.unflatten(-1, (2, 8)), "gelu"), 0),
    "soft_cap": (lambda on, x: on.soft_cap(x, 3.0), 0),
}
TABLES = rotary.angles(torch.arange(5), 8)


def kept_bytes(run: Callable[[], object], known: list[Tensor]) -> int:
    """Return the bytes that backward keeps beside those of known tensors."""
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = run()
    assert alive is not None
    addresses = {tensor.untyped_storage().data_ptr() for tensor in known}
    return sum(each.nbytes() for address, each in kept.items() if address not in addresses)


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_kept_but_the_input_and_a_number_a_row(name: str) -> None:
    operation, expected = KEPT[name]
    x = drawn(3, 5, 16, dtype=torch.bfloat16, seed=1).requires_grad_()
    ones = 16 * 2 if name == "rms_norm" else 0
    assert kept_bytes(lambda: operation(OPERATIONS["auto"], x), [x]) == expected + ones


@NOT_SIMULATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "more",
    [{}, {"qk_norm": True}, {"norm_offset": True, "post_norms": True, "activation": "gelu"}],
    ids=str,
)
@pytest.mark.parametrize("word", OPERATIONS)
def test_a_block_of_llama_keeps_what_its_record_says(
    word: str, more: dict[str, Any], dtype: torch.dtype
) -> None:
    """Count a block alone; tables of angles are all blocks' together."""
    sizes = {"hidden": 64, "heads": 4, "head_dim": 24, "ffn": 112, "seq_len": 40, "vocab": 9}
    model = Model(family="llama", layers=1, kernels=word, **sizes, **more)
    angles = Angles(model, False), Angles(model, True)
    block = Block(model, 0, angles).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.zeros(3, 40, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.arange(3), 0, 1)
    x = drawn(3, 40, 64, dtype=dtype, seed=1).requires_grad_()
    shared = [*block.parameters(), *angles[0](40, None, x.device)]
    kept = kept_bytes(lambda: block(x, batch), shared)
    ours = KERNELS_THAT_CHANGE_MEMORY["cpu"] if word == "auto" else frozenset[str]()
    part = ChunkLayout(Counter({"blocks": 1}), 1, False, False, ours)
    predicted = LLAMA.activations(model, 120, dtype.itemsize, part).kept
    weights = sum(p.numel() for p in block.parameters() if p.dim() == 1)
    assert abs(kept - predicted) <= 4 * weights, "weights + 1 in fp32"


@NOT_SIMULATED
def test_models_take_them_unless_they_want_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(1, 5, 16, dtype=torch.float32, seed=1)
    for operation in ("rms_norm", "rotary", "glu", "soft_cap"):
        assert dispatch.choose(operation, x) == dispatch.NUMBA
        assert dispatch.choose(operation, x.double()) == dispatch.TORCH
    for function in (norm.Norm, rotary.Rotary, glu.Glu, soft_cap.SoftCap):
        monkeypatch.setattr(function, "apply", lambda *_: "hpczero's")
    for operation, _ in KEPT.values():
        assert operation(OPERATIONS["auto"], x) == "hpczero's"
        assert isinstance(operation(OPERATIONS["torch"], x), Tensor)
