"""Choice of implementations; no import of CUDA on machines without it."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest
import torch

from hpczero_kernels import dispatch, table
from hpczero_kernels.norm import layer_norm
from hpczero_kernels.operations import OPERATIONS
from hpczero_kernels.table import TABLE, Implementation
from tests.support.launch import CHECKOUT


@pytest.fixture(autouse=True)
def nothing_forced() -> Iterator[None]:
    dispatch.force("")
    yield
    dispatch.force("")


def test_the_best_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Implementation, "missing_reason", lambda self: "")
    on_gpu, on_cpu = (
        dispatch._decide(operation, device, "bfloat16", True)
        for operation, device in (("adamw", "cuda"), ("adamw", "cpu"))
    )
    assert (on_gpu, on_cpu) == ("cuda", "numba")
    assert dispatch._decide("norm", "cpu", "bfloat16", True) == "torch"
    assert dispatch._decide("norm", "cuda", "bfloat16", False) == "torch", (
        "a shape that no kernel has"
    )
    assert dispatch._decide("norm", "cuda", "float64", True) == "torch"
    assert dispatch._decide("norm", "xpu", "bfloat16", True) == "torch"


def test_every_operation_can_be_had_everywhere() -> None:
    for operation, entries in TABLE.items():
        assert entries[-1] == Implementation("torch"), operation
    assert table.available("cpu").keys() == table.available("cuda").keys() == TABLE.keys()


def test_a_gpu_that_is_too_old_gets_no_kernel() -> None:
    assert set(table.available("cuda", (7, 5)).values()) == {"torch"}


def test_what_is_missing_is_passed_over_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        Implementation,
        "missing_reason",
        lambda self: "the package numba-cuda is not installed" if self.name == "cuda" else "",
    )
    with caplog.at_level(logging.INFO, "hpczero_kernels"):
        for _ in range(3):
            assert dispatch._decide("gelu", "cuda", "float16", True) == "torch"
    assert caplog.messages == [
        "gelu on cuda in float16: torch (the package numba-cuda is not installed)"
    ]
    assert dispatch.choices()["gelu on cuda in float16"] == "torch"


def test_a_folder_of_the_packages_name_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numba_cuda").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(util, "find_spec", lambda name: util._find_spec(name, [str(tmp_path)]))  # type: ignore[attr-defined]
    assert "numba-cuda is not installed" in Implementation("cuda", "cuda").missing_reason()


@pytest.mark.parametrize(
    ("capability", "cuda", "name", "reason"),
    [
        ((9, 0), "13.0", "cuda", ""),
        ((8, 0), "13.0", "cuda", ""),
        ((7, 5), "13.0", "torch", "the kernels need a GPU of compute capability 8.0"),
        ((9, 4), None, "torch", "the kernels are for NVIDIA's GPUs"),
    ],
)
def test_a_gpu_that_the_kernels_are_not_for_has_torchs(
    capability: tuple[int, int],
    cuda: str | None,
    name: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Implementation, "missing_reason", lambda self: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert dispatch._best("gelu", "cuda", "bfloat16") == (name, reason)
    assert dispatch.on_gpus() == (name == "cuda")
    dispatch.force("torch")
    assert not dispatch.on_gpus()


def test_a_choice_can_be_forced_and_taken_back() -> None:
    x = torch.ones(3)
    usual = dispatch.choose("adamw", x)
    assert usual == "numba"
    dispatch.force("norm=torch, adamw=torch")
    assert dispatch.choose("adamw", x) == "torch"
    assert dispatch.choose("sum", x) == "numba"
    dispatch.force("torch")
    assert dispatch.choose("sum", x) == "torch"
    dispatch.force("cuda")
    assert dispatch.choose("sum", x) == "numba", "there is none for this device"
    dispatch.force("")
    assert dispatch.choose("adamw", x) == usual


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nrom=torch", "no operation nrom; there are adamw"),
        ("norm=numba", "no implementation numba of norm; there are cuda, torch"),
        ("x", "no implementation x"),
    ],
)
def test_a_mistake_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch.force(text)


def test_a_forced_sum_and_step_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpczero_kernels import adamw, reduce

    dispatch.force("torch")
    monkeypatch.setattr(reduce, "_sum_pieces", None)
    monkeypatch.setattr(adamw, "_adamw_on_cpu", None)
    out = torch.zeros(5)
    reduce.sum_pieces([torch.ones(5), torch.ones(5)], out, False, None)
    assert out.eq(2).all()
    state = adamw.AdamWBuffers(*(torch.ones(5) for _ in range(4)), None)
    adamw.adamw(state, 0.0, adamw.scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0))
    assert not state.master.eq(1).any()


def test_what_is_chosen_is_a_constant_of_compiled_code() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, torch.ones(8), torch.zeros(8))

    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(norm, backend="aot_eager", fullgraph=True)(x), norm(x))


def test_the_word_torch_means_pytorchs_own() -> None:
    assert OPERATIONS["torch"].layer_norm is not OPERATIONS["auto"].layer_norm
    samples, x = torch.arange(2), torch.randn(2, 3, 8)
    dropped = [OPERATIONS[word].dropout(x, 0.5, 7, samples) for word in ("auto", "torch")]
    assert torch.equal(*dropped)
    assert dropped[0].eq(0).any()


WITHOUT_CUDA = """
import sys, warnings
warnings.simplefilter("error")
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba_cuda", "cuda") or name.startswith("numba.cuda"):
            if name not in ALLOWED: raise ModuleNotFoundError(name)
ALLOWED = ("numba_cuda",)  # may be asked for, and is not there
before = set(sys.modules)
sys.meta_path.insert(0, Refuses())
import torch
from hpczero.model.gpt import GPT
from hpczero.spec.schema import Model
from hpczero.model.batch import MicroBatch
from hpczero_kernels import adamw, reduce
model = Model(layers=1, hidden=16, heads=2, seq_len=8, vocab=11, dropout=0.1)
module = GPT(model)
for parameter in module.parameters():
    torch.nn.init.normal_(parameter, std=0.02)
tokens = torch.arange(16).view(2, 8) % 11
module(MicroBatch(tokens, tokens, torch.arange(2), 0, 1)).backward()
flat = torch.zeros(10)
reduce.sum_pieces([flat, flat], flat, False, None)
state = adamw.AdamWBuffers(flat, flat.clone(), flat.clone(), flat.clone(), None)
adamw.adamw(state, 0.1, adamw.scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0))
cuda = ("numba_cuda", "numba.cuda", "hpczero_kernels.cuda")
assert not [name for name in set(sys.modules) - before if name.startswith(cuda)], sys.modules.keys()
assert not torch.cuda.is_initialized()
"""


def test_without_any_cuda_package_nothing_changes_and_nothing_is_said() -> None:
    """CUDA is not imported for a step on the CPU, whatever is installed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CUDA],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
