"""Block-sparse attention against the masked dense formula, whatever the layout.

Legend: q [samples, heads, seq, head_dim], k and v with kv_heads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpczero_kernels import block_layout, block_sparse_plan
from hpczero_kernels.block_layout import BlockLayout
from hpczero_kernels.block_sparse import (
    _visible,
    block_sparse_attention,
    block_sparse_attention_reference,
)
from hpczero_kernels.block_sparse_cpu import CpuPasses
from hpczero_kernels.block_sparse_plan import plan_of
from hpczero_kernels.dispatch import force
from tests.support.block_layouts import Case, distances


def check(case: Case) -> None:
    exact = case.carried_out(block_sparse_attention_reference, torch.float64)
    assert max(distances(case.carried_out(block_sparse_attention), exact)) <= 1e-5


DOCUMENTS = ((30, 33, 77), (77,))
CASES = {
    "causal": Case(),
    "not causal": Case(causal=False),
    "blocks of 24": Case(block=24, seq=100),
    "blocks of 32": Case(block=32, seq=129, causal=False),
    "blocks of 64": Case(block=64, seq=200),
    "blocks of 128": Case(block=128, seq=300),
    "one block": Case(seq=16, density=1.0),
    "shorter than a block": Case(seq=5, density=1.0),
    "one position": Case(seq=1, density=1.0),
    "rows that see nothing": Case(density=0.15),
    "nothing at all": Case(density=0.0),
    "all": Case(density=1.0, causal=False),
    "patterns of heads": Case(heads=6, patterns=3, kv_heads=6),
    "heads share keys": Case(heads=6, patterns=3, samples=2),
    "documents": Case(documents=DOCUMENTS, samples=2, heads=4, patterns=2),
    "documents, not causal": Case(documents=DOCUMENTS, samples=2, causal=False),
    "cap": Case(cap=2.0),
    "scale": Case(scale=0.7),
    "a negative scale": Case(scale=-0.7, cap=3.0),
    "everything": Case(
        99, 24, True, 6, 2, 2, 10, 0.6, 2, ((3, 50, 99), (98, 99)), cap=2.0, scale=0.4
    ),
    "bias": Case(scale=1.0, biased=True),
    "bias, not causal": Case(block=24, seq=100, causal=False, samples=3, biased=True),
    "bias, blocks of 128": Case(block=128, seq=300, biased=True),
    "bias, one block": Case(seq=16, density=1.0, causal=False, biased=True),
    "bias, one position": Case(seq=1, density=1.0, biased=True),
    "bias, rows that see nothing": Case(density=0.15, biased=True),
    "bias, nothing at all": Case(density=0.0, biased=True),
    "bias, all": Case(density=1.0, heads=4, biased=True),
    "bias, everything": Case(
        99, 24, False, 6, 2, 2, 10, 0.6, 2, ((3, 50, 99), (98, 99)), 2.0, 0.4, biased=True
    ),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@EACH
def test_it_is_the_masked_dense_formula(case: Case) -> None:
    check(case)


@EACH
def test_bf16_is_as_exact_as_the_dense_formula(case: Case) -> None:
    halves = [one.bfloat16() for one in case.tensors()]
    exact, dense, found = (
        case.carried_out(how, dtype, halves)
        for how, dtype in (
            (block_sparse_attention_reference, torch.float64),
            (block_sparse_attention_reference, torch.bfloat16),
            (block_sparse_attention, torch.bfloat16),
        )
    )
    for own, other, right in zip(found, dense, exact, strict=True):
        errors = [float((one.double() - right).norm()) for one in (own, other)]
        assert errors[0] <= 2 * errors[1]


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.few(12)
def test_passes_by_numba_are_those_in_pytorchs_operations(case: Case, dtype: torch.dtype) -> None:
    found = case.carried_out(block_sparse_attention, dtype)
    force("block_sparse=torch")
    try:
        reference = case.carried_out(block_sparse_attention, dtype)
    finally:
        force("")
    most = 2e-6 if dtype == torch.float32 else 4e-3
    assert max(distances(found, reference)) <= most


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    seq, samples = draw(st.integers(1, 70)), draw(st.integers(1, 2))
    documents = st.lists(st.integers(1, seq), max_size=3).map(lambda e: (*sorted({*e, seq}),))
    return Case(
        seq, draw(st.sampled_from((1, 3, 8, 16, 32))), draw(st.booleans()), kv_heads * groups,
        kv_heads, samples, draw(st.integers(1, 9)), draw(st.sampled_from((0.1, 0.5, 1.0))),
        draw(st.integers(1, 2)),
        draw(st.none() | st.lists(documents, min_size=samples, max_size=samples).map(tuple)),
        draw(st.sampled_from((0.0, 2.0))), draw(st.sampled_from((None, 0.5))),
        draw(st.integers(0, 1 << 20)), draw(st.booleans()),
    )  # fmt: skip


@settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(any_case())
def test_any_layout(case: Case) -> None:
    check(case)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(any_case())
def test_the_pairs_that_are_computed_are_those_of_blocks_with_something_to_see(case: Case) -> None:
    layout, block = case.layout(), case.block
    visible = _visible(layout, case.samples, case.seq, case.documents)
    padding = -case.seq % block
    of_blocks = torch.nn.functional.pad(visible, (0, padding, 0, padding))
    blocks = of_blocks.unflatten(3, (-1, block)).unflatten(2, (-1, block)).any(5).any(3)
    plan = plan_of(layout, case.samples, case.heads, case.kv_heads, case.seq, case.documents)
    assert plan.computed_pairs == int(blocks.sum()) * block**2


@dataclass
class Products(TorchDispatchMode):
    """The pairs of a query and a key of the products of queries and keys."""

    head_dim: int
    pairs: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None):
        if function.overloadpacket is torch.ops.aten.bmm and given[1].shape[1] == self.head_dim:
            self.pairs += given[0].shape[0] * given[0].shape[1] * given[1].shape[2]
        return function(*given, **(named or {}))


@EACH
def test_the_products_touch_no_other_pairs(case: Case, threads: Callable[[int], None]) -> None:
    threads(1)  # others' products are not seen
    case = replace(case, head_dim=7)  # no number of keys
    with Products(case.head_dim) as products:
        case.carried_out(block_sparse_attention)
    plan = plan_of(case.layout(), case.samples, case.heads, case.kv_heads, case.seq, case.documents)
    assert products.pairs == 3 * plan.computed_pairs  # logits, again in backward; their gradients


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of one item or a few, and parts of 32 keys."""
    monkeypatch.setattr(block_sparse_plan, "_CHUNK", 1 << 13)
    monkeypatch.setattr(block_sparse_plan, "PART", 32)


@EACH
@pytest.mark.usefixtures("small")
def test_long_rows_go_in_parts(case: Case) -> None:
    check(case)


@pytest.mark.usefixtures("small")
def test_parts_are_merged_in_fp32() -> None:
    case = Case(seq=400, density=1.0, causal=False)
    halves = [one.bfloat16() for one in case.tensors()]
    found = case.carried_out(block_sparse_attention, torch.bfloat16, halves)
    exact = case.carried_out(block_sparse_attention_reference, torch.float64, halves)
    assert max(distances(found, exact)) <= 2e-2


def test_parts_of_a_tensor_give_gradients_as_whole_ones_do() -> None:
    case = Case(seq=64)
    x = torch.randn(3, 1, 64, 2, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    above = case.tensors()[-1]
    found = []
    for whole in (False, True):
        parts = [one.contiguous() if whole else one for one in x.transpose(2, 3)]
        out = block_sparse_attention(*parts, case.layout())
        found.append((out, *torch.autograd.grad(out, x, above)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(1, 0, 9), (0, 2, 9), (2, 2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_gives_nothing(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = Case(shape[2], 4, True, shape[1], shape[1], shape[0], biased=shape[2] > 0)
    found = case.carried_out(block_sparse_attention, dtype)
    *parts, above = case.tensors()
    for one, part in zip(found, (above, *parts), strict=True):
        assert one.shape == part.shape
        assert one.dtype == dtype


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["heads share keys", "everything", "not causal", "bias, not causal", "bias, everything"],
)
def test_threads_change_no_bit(
    name: str, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(CASES[name].carried_out(block_sparse_attention, dtype))
        assert torch.get_num_threads() == count
    for others in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], others, strict=True))


@pytest.mark.usefixtures("small")
def test_an_error_in_a_thread_is_raised_and_nothing_waits(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(2)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(CpuPasses, "differentiate", fails)
    with pytest.raises(ZeroDivisionError):
        CASES["everything"].carried_out(block_sparse_attention)
    assert torch.get_num_threads() == 2


def test_what_is_not_finite_stays_in_its_rows() -> None:
    case = Case(seq=64, density=1.0)
    q, k, v, _ = case.tensors()
    q[0, 0, 20] = float("nan")
    out = block_sparse_attention(q, k, v, case.layout())
    assert out[0, 0, 20].isnan().all()
    assert int(out.isnan().sum()) == case.head_dim


def test_a_block_behind_its_row_is_an_error_of_a_causal_layout() -> None:
    layout = BlockLayout(8, True, (((1,), (0, 1)),), (0,))
    with pytest.raises(AssertionError, match="a block behind its row"):
        plan_of(layout, 1, 1, 1, 16)
    assert plan_of(replace(layout, causal=False), 1, 1, 1, 16).computed_pairs == 3 * 64


def test_some_plans_are_kept() -> None:
    case = Case(samples=2)
    layout = case.layout()
    first = plan_of(layout, 2, 2, 2, 77)
    assert plan_of(layout, 2, 2, 2, 77, ((77,), (77,))) is first
    for end in range(1, 20):
        plan_of(layout, 2, 2, 2, 77, ((end, 77), (77,)))
    assert len(layout._kept["plan"]) == block_layout.KEPT
    assert plan_of(layout, 2, 2, 2, 77) is not first


def window(blocks: int, width: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(max(0, row - width + 1), row + 1)) for row in range(blocks))


@pytest.mark.parametrize("causal", [True, False])
def test_no_chunk_has_blocks_of_other_documents(causal: bool) -> None:
    layout = BlockLayout(16, causal, (window(8, 8),), (0,))
    plan = plan_of(layout, 1, 1, 1, 128, ((64, 128),))
    assert len(plan.keys) == 2 * (4 * 5 // 2)
    assert plan.computed_pairs == 16 * 16 * 20


@dataclass
class Made(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    largest: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None):
        made = function(*given, **(named or {}))
        if isinstance(made, Tensor):
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("biased", [False, True])
def test_memory_grows_as_the_positions_do(biased: bool, threads: Callable[[int], None]) -> None:
    """A window of 4 blocks; and one row that sees all does not make a tensor of its length."""
    threads(1)  # others' tensors are not seen
    sizes = []
    saved: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    for seq in (8192, 16384):
        blocks = seq // 64
        layout = BlockLayout(64, True, ((*window(blocks - 1, 4), tuple(range(blocks))),), (0, 0))
        parts = [torch.zeros(1, 2, seq, 8).requires_grad_() for _ in range(3)]
        bias = torch.zeros(2, 2 * seq - 1).requires_grad_() if biased else None
        saved.clear()
        with Made() as made, keep:
            block_sparse_attention(*parts, layout, bias=bias).sum().backward()
        of_bias = 0 if bias is None else bias.nbytes
        assert sum(x.nbytes for x in saved) == 2 * seq * (4 * 8 + 1) * 4 + of_bias
        sizes.append(made.largest)
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] <= 8 << 20
