"""Messages of 8 or 4 bits on the device of `tests.support.device`: kernels against references."""

import pytest
import torch
from torch import Tensor

from hpczero_kernels import cpu_streams, quantised
from hpczero_kernels.cpu import Pool
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.message_sizes import MOST, QUANTISED_BLOCK, quantised_blocks, quantised_bytes
from hpczero_kernels.quantised import (
    average_quantised,
    average_quantised_reference,
    quantise,
    quantise_reference,
    restore,
    restore_reference,
)
from tests.support.assembly import assembly_of, is_vectorised
from tests.support.device import DEVICE, KERNELS, drawn

NAN, INF = float("nan"), float("inf")
BOTH = pytest.mark.parametrize(
    ("pack", "unpack"), [(quantise, restore), (quantise_reference, restore_reference)]
)
BITS = pytest.mark.parametrize("bits", [8, 4])
COUNTS = pytest.mark.parametrize(
    "count", [0, 1, 7, 257] if SIMULATED else [0, 1, 7, 8, 255, 256, 257, 2047, 2048, 2049, 5000]
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOT_SIMULATED = pytest.mark.skipif(SIMULATED, reason="CUDA's kernels run in their place")


def message(count: int, bits: int, workers: int | None = None) -> tuple[Tensor, Tensor]:
    """Return a poisoned message, or one of each worker."""
    rows = () if workers is None else (workers,)
    size = quantised_bytes(count, bits)
    packed = torch.full((*rows, size), 0xA5, dtype=torch.uint8, device=DEVICE)
    return packed, torch.full((*rows, quantised_blocks(count)), NAN, device=DEVICE)


def integers_of(packed: Tensor, count: int, bits: int) -> Tensor:
    """Return the integers by the description of the format, one after the other."""
    codes = packed.tolist()
    if bits == 4:
        codes = [code >> shift & 0xF for code in codes for shift in (0, 4)]
    half = 1 << bits - 1
    return torch.tensor([(code ^ half) - half for code in codes[:count]], device=DEVICE)


def decoded(packed: Tensor, scales: Tensor, count: int, bits: int) -> Tensor:
    scale = scales.repeat_interleave(QUANTISED_BLOCK)[:count]
    return integers_of(packed, count, bits).float() * scale


@pytest.mark.parametrize("pack", [quantise, quantise_reference])
@BITS
@COUNTS
@pytest.mark.few(simulated=8)
def test_the_message_is_by_the_formula(pack, count: int, bits: int) -> None:
    values, error = (drawn((count,), seed, torch.float32) for seed in (1, 2))
    total = values + error
    packed, scales = message(count, bits)
    pack(values, error, packed, scales, bits)
    for number in range(quantised_blocks(count)):
        block = total[number * QUANTISED_BLOCK : (number + 1) * QUANTISED_BLOCK]
        assert scales[number].cpu() == block.abs().max().cpu() / MOST[bits]
    scale = scales.repeat_interleave(QUANTISED_BLOCK)[:count]
    assert torch.equal(integers_of(packed, count, bits), (total * (1 / scale)).round().long())
    assert count * bits % 8 == 0 or int(packed[-1]) < 16
    left = total - decoded(packed, scales, count, bits)
    assert torch.equal(error, left)
    assert (error.abs() <= scale * 0.50001).all()


@BITS
@COUNTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fed_back", [False, True])
@pytest.mark.few(simulated=6)
def test_kernels_equal_their_references(
    fed_back: bool, dtype: torch.dtype, count: int, bits: int
) -> None:
    values = drawn((count,), 1, dtype)
    error = drawn((count,), 2, torch.float32) if fed_back else None
    expected_error = error.clone() if error is not None else None
    packed, scales = message(count, bits)
    expected_packed, expected_scales = message(count, bits)
    quantise(values, error, packed, scales, bits)
    quantise_reference(values, expected_error, expected_packed, expected_scales, bits)
    assert torch.equal(packed, expected_packed)
    assert torch.equal(scales, expected_scales)
    if error is not None:
        assert torch.equal(error, expected_error)
    out, expected = (torch.full((count,), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
    restore(packed, scales, out, bits)
    restore_reference(packed, scales, expected, bits)
    assert torch.equal(out, expected)
    assert torch.equal(out, decoded(packed, scales, count, bits).to(dtype))


@BITS
@COUNTS
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.few(simulated=6)
def test_the_average_is_that_of_the_workers_in_their_order(
    count: int, workers: int, bits: int
) -> None:
    packed, scales = message(count, bits, workers)
    scales.copy_(drawn(tuple(scales.shape), 3, torch.float32).abs())
    packed.copy_(drawn(tuple(packed.shape), 4, torch.float32).mul(1e3).int() & 0xFF)
    average, expected = (torch.full((count,), NAN, device=DEVICE) for _ in range(2))
    average_quantised(packed, scales, average, bits)
    average_quantised_reference(packed, scales, expected, bits)
    assert torch.equal(average, expected)
    total = torch.zeros(count, device=DEVICE)
    for worker in range(workers):
        total += decoded(packed[worker], scales[worker], count, bits)
    assert torch.equal(expected, total * (1 / workers))


@BITS
def test_rows_of_workers_may_lie_in_messages_of_integers_and_scales(bits: int) -> None:
    count, workers = QUANTISED_BLOCK, 3
    size = quantised_bytes(count, bits)
    length = size + 4 * quantised_blocks(count)
    messages = torch.zeros(workers, length, dtype=torch.uint8, device=DEVICE)
    packed, scales = messages[:, :size], messages[:, size:].view(torch.float32)
    for worker in range(workers):
        quantise(drawn((count,), worker, torch.float32), None, packed[worker], scales[worker], bits)
    average, expected = (torch.full((count,), NAN, device=DEVICE) for _ in range(2))
    average_quantised(packed, scales, average, bits)
    average_quantised(packed.contiguous(), scales.contiguous(), expected, bits)
    assert torch.equal(average, expected)
    assert average.any()


@BOTH
@BITS
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 255, 256])
@pytest.mark.parametrize("in_error", [False, True])
@pytest.mark.few(simulated=6)
def test_what_is_not_finite_makes_its_block_nan(
    pack, unpack, bits: int, bad: float, place: int, in_error: bool
) -> None:
    count = QUANTISED_BLOCK + 33
    values, error = (drawn((count,), seed, torch.float32) for seed in (1, 2))
    (error if in_error else values)[place] = bad
    packed, scales = message(count, bits)
    pack(values, error, packed, scales, bits)
    wrong = torch.arange(count, device=DEVICE) // QUANTISED_BLOCK == place // QUANTISED_BLOCK
    assert not integers_of(packed, count, bits)[wrong].any()
    assert scales.isnan().tolist() == [number == place // QUANTISED_BLOCK for number in range(2)]
    out = torch.zeros(count, device=DEVICE)
    unpack(packed, scales, out, bits)
    assert torch.equal(out.isnan(), wrong)
    assert torch.equal(error.isnan(), wrong)
    average_quantised(packed.repeat(2, 1), scales.repeat(2, 1), out, bits)
    assert torch.equal(out.isnan(), wrong)


@BOTH
@BITS
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 8.2e-38, 1e-37, 1.5e-36, 1e-35, 3e38])
@pytest.mark.few(simulated=6)
def test_tiny_and_huge_numbers_stay_finite(pack, unpack, size: float, bits: int) -> None:
    """A scale that is not normal counts as 0: the total stays in the error."""
    count = 2 * QUANTISED_BLOCK
    values = drawn((count,), 1, torch.float32).clamp(-1, 1) * size
    before, error = values.clone(), torch.zeros(count, device=DEVICE)
    packed, scales = message(count, bits)
    pack(values, error, packed, scales, bits)
    out = torch.full((count,), NAN, device=DEVICE)
    unpack(packed, scales, out, bits)
    assert out.isfinite().all()
    assert error.isfinite().all()
    assert ((scales == 0) | (scales >= 2.0**-126)).all()
    assert (scales == 0).all() == (size / MOST[bits] < 2.0**-126)
    if not scales.any():
        assert torch.equal(error, before)
        assert not packed.any()
        assert not out.any()
    torch.testing.assert_close(out.double() + error, before.double(), rtol=1e-6, atol=1e-44)


@BOTH
@BITS
def test_ties_go_to_even_and_zeros_stay(pack, unpack, bits: int) -> None:
    most = float(MOST[bits])
    row = torch.tensor([most, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -most, 0.0, -0.0], device=DEVICE)
    packed, scales = message(len(row), bits)
    pack(row, None, packed, scales, bits)
    most = MOST[bits]
    assert integers_of(packed, len(row), bits).tolist() == [most, 0, 2, 2, 0, -2, -2, -most, 0, 0]
    pack(torch.zeros_like(row), None, packed, scales, bits)
    assert scales.tolist() == [0.0]
    assert not packed.any()
    out = torch.ones_like(row)
    unpack(packed, scales, out, bits)
    assert not out.any()


@BOTH
@BITS
@pytest.mark.few(simulated=2)
def test_what_was_sent_and_what_is_left_is_what_was_given(pack, unpack, bits: int) -> None:
    count, steps = (100, 3) if SIMULATED else (1000, 100)
    error, out = torch.zeros(count, device=DEVICE), torch.zeros(count, device=DEVICE)
    given = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    sent = torch.zeros_like(given)
    packed, scales = message(count, bits)
    for step in range(steps):
        values = drawn((count,), step, torch.float32)
        given += values
        pack(values, error, packed, scales, bits)
        unpack(packed, scales, out, bits)
        sent += out
    torch.testing.assert_close(sent + error, given, rtol=0, atol=1e-6 * steps)
    assert float(error.abs().max()) < 0.5, "errors do not grow"


@NOT_SIMULATED
@BITS
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int, bits: int) -> None:
    count = 100 * 4096 + 77
    values = drawn((count,), 1, torch.float32)
    results = []
    for number in (1, threads):
        error = drawn((count,), 2, torch.float32)
        packed, scales = message(count, bits)
        out, average = torch.zeros(count, device=DEVICE), torch.zeros(count, device=DEVICE)
        with Pool(number) as pool:
            quantise(values, error, packed, scales, bits, pool)
            restore(packed, scales, out, bits, pool)
            average_quantised(packed.repeat(3, 1), scales.repeat(3, 1), average, bits, pool)
        results.append((error, packed, scales, out, average))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@BITS
@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.few(simulated=3)
def test_alignment_changes_no_bit(dtype: torch.dtype, offset: int, bits: int) -> None:
    count = 2 * QUANTISED_BLOCK + 77
    values, error = drawn((count,), 1, dtype), drawn((count,), 2, torch.float32)
    shifted, shifted_error = (
        torch.cat((x.new_ones(offset), x, x.new_ones(offset))) for x in (values, error)
    )
    packed, scales = message(count, bits)
    quantise(values, error, packed, scales, bits)
    shifted_packed, shifted_scales = message(count, bits)
    inside = slice(offset, offset + count)
    quantise(shifted[inside], shifted_error[inside], shifted_packed, shifted_scales, bits)
    assert torch.equal(shifted_packed, packed)
    assert torch.equal(shifted_scales, scales)
    assert torch.equal(shifted_error[inside], error)
    restore(packed, scales, values, bits)
    restore(packed, scales, shifted[inside], bits)
    assert torch.equal(shifted[inside], values)
    for edge in (shifted, shifted_error):
        assert (edge[:offset] == 1).all()
        assert (edge[-offset:] == 1).all()


@NOT_SIMULATED
@BITS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [256, 2048, 5000, 8192])
def test_stores_past_the_caches_store_the_same(
    count: int, dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, scales = message(count, bits, 3)
    for worker in range(3):
        quantise(drawn((count,), worker, torch.float32), None, packed[worker], scales[worker], bits)
    usual, around = (torch.ones(count + 64, dtype=dtype, device=DEVICE) for _ in range(2))
    average, expected = (torch.ones(count + 64, device=DEVICE) for _ in range(2))
    restore(packed[0], scales[0], usual[:count], bits)
    average_quantised(packed, scales, expected[:count], bits)
    monkeypatch.setattr(cpu_streams, "_LARGE", 0)
    assert KERNELS or cpu_streams.streams(around)
    restore(packed[0], scales[0], around[:count], bits)
    average_quantised(packed, scales, average[:count], bits)
    assert torch.equal(around, usual)
    assert torch.equal(average, expected)


@BITS
def test_tensors_that_do_not_fit_together_are_refused(bits: int) -> None:
    values, (packed, scales) = torch.ones(100, device=DEVICE), message(100, bits)
    for arguments in (
        (values, values[:99], packed, scales, bits),
        (values, values.bfloat16(), packed, scales, bits),
        (values, None, packed[:-1], scales, bits),
        (values, None, packed.int(), scales, bits),
        (values, None, packed, scales.repeat(2), bits),
        (values, None, packed, scales, 5),
        (values.double(), None, packed, scales, bits),
        (values.repeat(2)[::2], None, packed, scales, bits),
    ):
        with pytest.raises(AssertionError):
            quantise(*arguments)
    with pytest.raises(AssertionError):
        average_quantised(packed.repeat(2, 1), scales.repeat(3, 1), values, bits)


@pytest.mark.slow
@NOT_SIMULATED
def test_kernels_are_vectorised_and_release_the_lock() -> None:
    for kernel, operation in (
        (quantised._quantise, "mulps"),
        (quantised._average_integers, "mulps"),
    ):
        assert is_vectorised(assembly_of(kernel), operation), kernel
        assert kernel.targetoptions["nogil"]
