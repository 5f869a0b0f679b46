"""Passes of a step (sum, AdamW) on the device of `tests.support.device`, against their references.

Other tests compare the references with torch.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpczero.model.batch import MicroBatch
from hpczero.model.families import family, layers
from hpczero.model.gpt import Block
from hpczero.model.work import WorkLayout
from hpczero.spec.schema import Model
from hpczero_kernels import adamw, attention, cross_entropy, reduce
from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars, adamw_reference, scalars_of_step
from hpczero_kernels.cpu import BLOCK
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.reduce import sum_pieces_reference
from tests.support.device import DEVICE, KERNELS, drawn

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [0, 1, 123, 2056] if KERNELS and DEVICE == "cpu" else [0, 1, 123, BLOCK, 3 * BLOCK + 77]
NAN = float("nan")


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and bool(
        ((left == right) | (left.isnan() & right.isnan())).all()
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(dtype, out) for dtype in FLOATS for out in {dtype, torch.float32}],
    ids=str,
)
@pytest.mark.few(simulated=3)
def test_sums_equal_the_reference(
    dtype: torch.dtype, out_dtype: torch.dtype, offset: int, count: int
) -> None:
    for pieces, accumulate in ((1, False), (3, True)):
        given = [drawn((count,), seed, dtype, offset) for seed in range(pieces)]
        start = (
            drawn((count,), 9, out_dtype, offset)
            if accumulate
            else torch.full((count + offset,), NAN, dtype=out_dtype, device=DEVICE)[offset:]
        )
        expected, out = start.clone(), start.clone()
        squares, bad = (
            torch.full((-(-count // BLOCK),), NAN, device=DEVICE),
            torch.zeros(1, device=DEVICE),
        )
        sum_pieces_reference(given, expected, accumulate, None)
        reduce.sum_pieces(given, out, accumulate, squares, bad=bad)
        assert same(out, expected)
        blocks = [block.double().square().sum() for block in out.split(BLOCK)] if count else []
        torch.testing.assert_close(
            squares.double(), torch.stack(blocks) if blocks else squares.double(), rtol=2e-6, atol=0
        )
        assert not bad.any()


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.few(simulated=1)
def test_a_sum_that_is_not_finite_is_told(value: float) -> None:
    piece, squares, bad = (
        torch.ones(100, device=DEVICE),
        torch.zeros(1, device=DEVICE),
        torch.zeros(1, device=DEVICE),
    )
    for place in (0, 57, 99):
        piece[place] = value
        for asked in (squares, None):
            bad.zero_()
            reduce.sum_pieces([piece], piece.clone(), False, asked, bad=bad)
            assert bad == 1.0
        assert not squares.isfinite().any()
        piece[place] = 1.0
    large = torch.full((100,), 1e30, device=DEVICE)
    bad.zero_()
    reduce.sum_pieces([large], large, False, squares, bad=bad)
    assert squares.isinf().all()
    assert not bad.any(), "large, and finite"


def state_of(
    count: int, gradient: torch.dtype, weights: torch.dtype | None, offset: int = 0
) -> AdamWBuffers:
    written = (
        None
        if weights is None
        else torch.full((count + offset,), NAN, dtype=weights, device=DEVICE)[offset:]
    )
    moments = (
        drawn((count,), 2, torch.float32, offset),
        drawn((count,), 3, torch.float32, offset).square_(),
    )
    return AdamWBuffers(
        drawn((count,), 1, torch.float32, offset),
        *moments,
        drawn((count,), 4, gradient, offset),
        written,
    )


def copy_of(state: AdamWBuffers) -> AdamWBuffers:
    return AdamWBuffers(
        *(None if buffer is None else buffer.clone() for buffer in vars(state).values())
    )


def on_device(scalars: AdamWScalars) -> AdamWScalars:
    return AdamWScalars(scalars.values.to(DEVICE))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize(
    ("gradient", "weights"),
    [
        (torch.float32, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.few(12)
def test_adamw_equals_the_reference(
    gradient: torch.dtype, weights: torch.dtype | None, offset: int, count: int
) -> None:
    state = state_of(count, gradient, weights, offset)
    expected, scalars = copy_of(state), on_device(scalars_of_step(7, 0.01, (0.9, 0.95), 1e-8, 0.3))
    adamw.adamw(state, 0.1, scalars)
    adamw_reference(expected, 0.1, scalars)
    for name in ("master", "moment1", "moment2", "gradient"):
        torch.testing.assert_close(
            getattr(state, name), getattr(expected, name), rtol=1e-6, atol=3e-7
        )
    if weights is not None:
        assert torch.equal(state.weights, state.master.to(weights))


def test_ten_steps_equal_torchs() -> None:
    count = 123
    state = AdamWBuffers(
        drawn((count,), 0, torch.float32),
        *(torch.zeros(count, device=DEVICE) for _ in range(3)),
        None,
    )
    theirs = torch.nn.Parameter(state.master.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 11):
        theirs.grad = drawn((count,), step, torch.float32)
        state.gradient.copy_(theirs.grad * 8)
        optimizer.step()
        adamw.adamw(
            state,
            0.1,
            on_device(scalars_of_step(step, 0.01, (0.9, 0.95), 1e-8, 1 / 8)),
            zero_gradient=True,
        )
        torch.testing.assert_close(state.master, theirs.detach(), rtol=1e-6, atol=2e-7)
        assert not state.gradient.any()


@pytest.mark.parametrize("update", [adamw.adamw, adamw_reference])
def test_a_step_that_is_skipped_changes_nothing_but_the_gradient_to_zero(update) -> None:
    state, scalars = (
        state_of(123, torch.bfloat16, torch.bfloat16),
        on_device(scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0)),
    )
    scalars.values[-1] = 1.0
    before = copy_of(state)
    update(state, 0.1, scalars)
    assert all(
        same(*pair) for pair in zip(vars(state).values(), vars(before).values(), strict=True)
    )
    update(state, 0.1, scalars, zero_gradient=True)
    assert not state.gradient.any()
    assert torch.equal(state.master, before.master)


def test_gradients_become_zero_in_the_pass() -> None:
    for dtype in FLOATS:
        state = state_of(123, dtype, None)
        expected, scalars = (
            copy_of(state),
            on_device(scalars_of_step(1, 0.1, (0.9, 0.95), 1e-8, 1.0)),
        )
        adamw.adamw(expected, 0.1, scalars)
        adamw.adamw(state, 0.1, scalars, zero_gradient=True)
        assert torch.equal(state.master, expected.master)
        assert not state.gradient.any()


@pytest.mark.parametrize(("clip", "scale"), [(1.0, 1.0), (0.0, 64.0), (0.5, 1024.0), (100.0, 8.0)])
def test_clipping_on_a_device_is_that_of_the_host(clip: float, scale: float) -> None:
    scalars = on_device(scalars_of_step(5, 0.01, (0.9, 0.95), 1e-8))
    norm = torch.tensor(3.0, dtype=torch.float64, device=DEVICE)
    scalars.follow(norm, clip, scale)
    coefficient = min(1.0, clip / (3.0 + 1e-6)) if clip else 1.0
    assert torch.equal(
        scalars.values.cpu(),
        scalars_of_step(5, 0.01, (0.9, 0.95), 1e-8, coefficient / scale).values,
    )
    for bad in (float("inf"), NAN):
        scalars.follow(norm * bad, clip, scale)
        assert scalars.values[-1] == 1.0
    scalars.follow(norm, clip, scale)
    assert scalars.values[-1] == 0.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_target_counts_in_its_own_part_of_the_vocabulary_alone(dtype: torch.dtype) -> None:
    """The last of the part before, first and last of this one, and the first of the next."""
    first, columns = 5, 24
    targets = torch.tensor([4, 5, 28, 29], device=DEVICE)
    logits = drawn((4, columns), 1, dtype)
    found = cross_entropy.shard_statistics(logits, targets, first)
    expected = cross_entropy.statistics_reference(logits, targets, first)
    assert [value != 0 for value in found[2].tolist()] == [False, True, True, False]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    most, sums, _ = expected
    scale = torch.ones((), device=DEVICE)
    ours, theirs = logits.clone(), logits.clone()
    cross_entropy.shard_gradient_(ours, targets, first, most, sums, scale)
    cross_entropy.gradient_reference_(theirs, targets, first, most, sums, scale)
    torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------ a block of BERT


class Counted(TorchDispatchMode):
    """Operations of torch that compute, by name; views and memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.partition("::")[2]
        if name in ("addmm", "mm", "sum", "add", "layer_norm", "gelu", "stack"):
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not SIMULATED, reason="counts launches of the simulator")
def test_a_block_of_bert_launches_what_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/kernels.md: two norms, two dropouts with their sums, one GELU."""
    from hpczero_kernels.cuda.launch import Kernel

    launched, launch = Counter[str](), Kernel.launch

    def count(self: Kernel, *arguments: Any) -> None:
        launched[self.name] += 1
        launch(self, *arguments)

    monkeypatch.setattr(Kernel, "launch", count)
    # attention of CPUs that multiply bf16 has a sum of its own in backward
    monkeypatch.setattr(attention, "supports", lambda q: False)
    model = Model(family="bert", layers=1, hidden=16, heads=2, vocab=9, seq_len=4, dropout=0.1)
    block = Block(model, 0).bfloat16()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.arange(1), 0, 1)
    x = drawn((1, 4, 16), 1, torch.bfloat16, 0).requires_grad_() * 1
    with Counted() as forward:
        y = block(x, batch)
    assert launched == {
        "dropout.forward": 2,
        "norm.forward": 2,
        "elementwise.gelu_forward_kernel": 1,
    }
    assert forward.names == {"addmm": 4}
    launched.clear()
    with Counted() as backward:
        y.backward(torch.ones_like(y))
    assert launched == {
        "dropout.backward": 2,
        "norm.backward": 2,
        "elementwise.gelu_backward_kernel": 1,
    }
    # two products and a bias's sum for each map, two sums of the residual stream's gradients
    assert backward.names == {"mm": 8, "sum": 4, "add": 2, "stack": 1}


def test_the_bytes_of_a_block_of_bert_large_are_those_of_its_table() -> None:
    """The table of docs/kernels.md, which says what a token moves between the products."""
    model = Model(family="bert", layers=1, hidden=1024, heads=16, seq_len=512, vocab=30522)
    work = family(model).work(model, layers(model)[1], WorkLayout(1, 128, 2))
    hidden, wide = 1024, 4096
    assert work.forward.bytes == 128 * 2 * (10 * hidden + 2 * wide + 2 * hidden)
    assert work.backward.bytes == 128 * 2 * (14 * hidden + 4 * wide + 11 * hidden)
    shapes = [(product.m, product.n, product.k) for product in work.forward.products]
    assert shapes == [(128, 3072, 1024), (128, 1024, 1024), (128, 4096, 1024), (128, 1024, 4096)]
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    for size in (work.forward.bytes / 128, work.backward.bytes / 128):
        assert f"| {size:,.0f} |".replace(",", " ") in text
