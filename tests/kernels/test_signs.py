"""Messages of signs on the device of `tests.support.device`: kernels against their references."""

import pytest
import torch
from torch import Tensor

from hpczero_kernels import cpu_streams, signs
from hpczero_kernels.cpu import Pool
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.message_sizes import SIGN_BLOCK, sign_blocks, sign_bytes
from hpczero_kernels.signs import (
    average_signs,
    average_signs_reference,
    pack_signs,
    pack_signs_reference,
    unpack_signs,
    unpack_signs_reference,
)
from tests.support.assembly import assembly_of, is_vectorised
from tests.support.device import DEVICE, KERNELS, drawn

NAN, INF = float("nan"), float("inf")
PACKS = pytest.mark.parametrize("pack", [pack_signs, pack_signs_reference])
BOTH = pytest.mark.parametrize(
    ("pack", "unpack"),
    [(pack_signs, unpack_signs), (pack_signs_reference, unpack_signs_reference)],
)
COUNTS = pytest.mark.parametrize(
    "count", [0, 1, 9, 2049] if SIMULATED else [0, 1, 7, 8, 9, 2047, 2048, 2049, 5000]
)
FEW = pytest.mark.few(simulated=2)
NOT_SIMULATED = pytest.mark.skipif(SIMULATED, reason="CUDA's kernels run in their place")


def message(count: int, workers: int | None = None) -> tuple[Tensor, Tensor]:
    """Return a poisoned message, or one of each worker."""
    rows = () if workers is None else (workers,)
    packed = torch.full((*rows, sign_bytes(count)), 0xA5, dtype=torch.uint8, device=DEVICE)
    return packed, torch.full((*rows, sign_blocks(count)), NAN, device=DEVICE)


def half_dead(count: int) -> Tensor:
    return (torch.arange(count, device=DEVICE) * 7 % 5).float()


def bits_of(packed: Tensor, count: int) -> Tensor:
    """Return the signs by the description of the format, one byte after the other."""
    numbers = packed.tolist()
    return torch.tensor([numbers[i // 8] >> i % 8 & 1 for i in range(count)], device=DEVICE).bool()


def decoded(packed: Tensor, scales: Tensor, count: int) -> Tensor:
    scale = scales.repeat_interleave(SIGN_BLOCK)[:count]
    return torch.where(bits_of(packed, count), -scale, scale)


@PACKS
@COUNTS
@pytest.mark.parametrize("dead", [False, True])
@FEW
def test_the_message_is_by_the_formula(pack, count: int, dead: bool) -> None:
    values, error = (drawn((count,), seed, torch.float32) for seed in (1, 2))
    variance = half_dead(count) if dead else None
    living = torch.ones(count, device=DEVICE).bool() if variance is None else variance != 0
    total = (values + error).where(living, 0.0)
    packed, scales = message(count)
    pack(values, error, variance, packed, scales)
    for number in range(sign_blocks(count)):
        block = slice(number * SIGN_BLOCK, (number + 1) * SIGN_BLOCK)
        lives = total[block][living[block]]
        mean = float(lives.double().abs().mean()) if lives.numel() else 0.0
        assert float(scales[number]) == pytest.approx(mean, rel=1e-6, abs=0)
    bits = bits_of(packed, 8 * sign_bytes(count))
    assert torch.equal(bits[:count], total < 0)
    assert not bits[count:].any()
    left = (total - decoded(packed, scales, count)).where(living, 0.0)
    assert torch.equal(error, left)


@COUNTS
@pytest.mark.parametrize("dead", [False, True])
@FEW
def test_kernels_equal_their_references(count: int, dead: bool) -> None:
    values, error = (drawn((count,), seed, torch.float32) for seed in (1, 2))
    variance = half_dead(count) if dead else None
    expected_error = error.clone()
    packed, scales = message(count)
    expected_packed, expected_scales = message(count)
    pack_signs(values, error, variance, packed, scales)
    pack_signs_reference(values, expected_error, variance, expected_packed, expected_scales)
    assert torch.equal(packed, expected_packed)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(error, expected_error, rtol=0, atol=2e-6)
    out, expected = (torch.full((count,), NAN, device=DEVICE) for _ in range(2))
    unpack_signs(packed, scales, variance, out)
    unpack_signs_reference(packed, scales, variance, expected)
    assert torch.equal(out, expected)


@COUNTS
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@FEW
def test_the_average_is_that_of_the_workers_in_their_order(count: int, workers: int) -> None:
    packed, scales = message(count, workers)
    scales.copy_(drawn(tuple(scales.shape), 3, torch.float32).abs())
    packed.copy_(drawn(tuple(packed.shape), 4, torch.float32).mul(1e3).int() & 0xFF)
    average, expected = (torch.full((count,), NAN, device=DEVICE) for _ in range(2))
    average_signs(packed, scales, average)
    average_signs_reference(packed, scales, expected)
    assert torch.equal(average, expected)
    total = torch.zeros(count, device=DEVICE)
    for worker in range(workers):
        total += decoded(packed[worker], scales[worker], count)
    assert torch.equal(average, total * (1 / workers))


def test_rows_of_workers_may_lie_in_messages_of_signs_and_scales() -> None:
    count, workers = (32, 2) if SIMULATED else (2 * SIGN_BLOCK, 3)
    size = sign_bytes(count)
    messages = torch.zeros(workers, size + 4 * sign_blocks(count), dtype=torch.uint8, device=DEVICE)
    packed, scales = messages[:, :size], messages[:, size:].view(torch.float32)
    for worker in range(workers):
        values = drawn((count,), worker, torch.float32)
        pack_signs(values, torch.zeros_like(values), None, packed[worker], scales[worker])
    average, expected = (torch.full((count,), NAN, device=DEVICE) for _ in range(2))
    average_signs(packed, scales, average)
    average_signs(packed.contiguous(), scales.contiguous(), expected)
    assert torch.equal(average, expected)
    assert average.any()


@BOTH
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 2000, 2049])
@pytest.mark.parametrize("in_error", [False, True])
@pytest.mark.few(simulated=1)
def test_what_is_not_finite_shows_in_its_block_alone(
    pack, unpack, bad: float, place: int, in_error: bool
) -> None:
    count = SIGN_BLOCK + 100
    values, error = (drawn((count,), seed, torch.float32) for seed in (1, 2))
    (error if in_error else values)[place] = bad
    packed, scales = message(count)
    pack(values, error, None, packed, scales)
    wrong = place // SIGN_BLOCK
    assert scales.isfinite().tolist() == [number != wrong for number in range(2)]
    out = torch.zeros(count, device=DEVICE)
    unpack(packed, scales, None, out)
    numbers = torch.arange(count, device=DEVICE) // SIGN_BLOCK
    assert torch.equal(out.isfinite(), numbers != wrong)
    averaged = torch.zeros(count, device=DEVICE)
    average_signs(packed.repeat(2, 1), scales.repeat(2, 1), averaged)
    assert torch.equal(averaged.isfinite(), numbers != wrong)
    assert torch.equal(error.isfinite(), numbers != wrong)


@BOTH
def test_a_dead_element_takes_no_part(pack, unpack) -> None:
    count = 100
    values, error = (drawn((count,), seed, torch.float32) for seed in (1, 2))
    variance = half_dead(count)
    dead = variance == 0
    values[dead] = NAN
    variance[3] = NAN  # lives
    packed, scales = message(count)
    pack(values, error, variance, packed, scales)
    assert scales.isfinite().all()
    assert (error[dead] == 0).all()
    assert not bits_of(packed, count)[dead].any()
    out = torch.full((count,), NAN, device=DEVICE)
    unpack(packed, scales, variance, out)
    assert (out[dead] == 0).all()
    assert torch.equal(out[~dead].abs(), scales.expand(int((~dead).sum())))
    unpack(packed, torch.full_like(scales, NAN), variance, out)
    assert torch.equal(out.isnan(), ~dead)


@PACKS
def test_a_block_in_which_nothing_lives_has_scale_0(pack) -> None:
    values, error = torch.ones(9, device=DEVICE), torch.ones(9, device=DEVICE)
    packed, scales = message(9)
    pack(values, error, torch.zeros(9, device=DEVICE), packed, scales)
    assert scales.tolist() == [0.0]
    assert packed.tolist() == [0, 0]
    assert not error.any()


@PACKS
def test_zeros_have_the_signs_of_their_bits(pack) -> None:
    values = torch.tensor([0.0, -0.0, -0.0, 2.0], device=DEVICE)
    error = torch.tensor([0.0, 0.0, -0.0, -0.0], device=DEVICE)
    packed, scales = message(4)
    pack(values, error, None, packed, scales)
    assert packed.tolist() == [4]
    assert scales.tolist() == [0.5]
    assert error.tolist() == [-0.5, -0.5, 0.5, 1.5]


@BOTH
@pytest.mark.few(simulated=1)
def test_what_was_sent_and_what_is_left_is_what_was_given(pack, unpack) -> None:
    count, steps = (100, 3) if SIMULATED else (3000, 100)
    error, out = torch.zeros(count, device=DEVICE), torch.zeros(count, device=DEVICE)
    given = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    sent = torch.zeros_like(given)
    packed, scales = message(count)
    for step in range(steps):
        values = drawn((count,), step, torch.float32)
        given += values
        pack(values, error, None, packed, scales)
        unpack(packed, scales, None, out)
        sent += out
    torch.testing.assert_close(sent + error, given, rtol=0, atol=1e-6 * steps)
    assert float(error.abs().mean()) < 4, "errors do not grow"


@NOT_SIMULATED
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    count = 300 * SIGN_BLOCK + 77
    values, variance = drawn((count,), 1, torch.float32), half_dead(count)
    results = []
    for number in (1, threads):
        error = drawn((count,), 2, torch.float32)
        packed, scales = message(count)
        out, average = torch.zeros(count, device=DEVICE), torch.zeros(count, device=DEVICE)
        with Pool(number) as pool:
            pack_signs(values, error, variance, packed, scales, pool)
            unpack_signs(packed, scales, variance, out, pool)
            average_signs(packed.repeat(3, 1), scales.repeat(3, 1), average, pool)
        results.append((error, packed, scales, out, average))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.few(simulated=1)
def test_neither_cut_nor_alignment_changes_a_bit(offset: int) -> None:
    count = SIGN_BLOCK + 77
    values, variance = drawn((count,), 1, torch.float32), half_dead(count)
    error = drawn((count,), 2, torch.float32)
    packed, scales = message(count)
    cut_values, cut_error = (
        torch.cat((x.new_ones(offset), x, x.new_ones(offset)))[offset:-offset]
        for x in (values, error)
    )
    cut_packed, cut_scales = message(count)
    pack_signs(values, error, variance, packed, scales)
    for part in (slice(0, SIGN_BLOCK), slice(SIGN_BLOCK, count)):
        bytes_ = slice(sign_bytes(part.start), sign_bytes(part.stop))
        blocks = slice(sign_blocks(part.start), sign_blocks(part.stop))
        pack_signs(
            cut_values[part], cut_error[part], variance[part].clone(), cut_packed[bytes_],
            cut_scales[blocks],
        )  # fmt: skip
    assert torch.equal(cut_packed, packed)
    assert torch.equal(cut_scales, scales)
    assert torch.equal(cut_error, error)
    around = torch.ones(count + 2 * offset, device=DEVICE)
    out = torch.zeros(count, device=DEVICE)
    unpack_signs(packed, scales, None, out)
    unpack_signs(packed, scales, None, around[offset:-offset])
    assert torch.equal(around[offset:-offset], out)
    assert (around[:offset] == 1).all()
    assert (around[-offset:] == 1).all()


@NOT_SIMULATED
@pytest.mark.parametrize("count", [64, 2048, 5000, 8192])
@pytest.mark.parametrize("dead", [False, True])
def test_stores_past_the_caches_store_the_same(
    count: int, dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    variance = half_dead(count) if dead else None
    packed, scales = message(count, 3)
    for worker in range(3):
        values = drawn((count,), worker, torch.float32)
        pack_signs(values, torch.zeros_like(values), None, packed[worker], scales[worker])
    results = []
    for large in (cpu_streams._LARGE, 0):
        monkeypatch.setattr(cpu_streams, "_LARGE", large)
        out, average = (torch.ones(count + 64, device=DEVICE) for _ in range(2))
        assert KERNELS or cpu_streams.streams(out) == (large == 0)
        unpack_signs(packed[0], scales[0], variance, out[:count])
        average_signs(packed, scales, average[:count])
        results.append((out, average))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    values, (packed, scales) = torch.ones(100, device=DEVICE), message(100)
    for arguments in (
        (values, values[:99], None, packed, scales),
        (values.bfloat16(), values, None, packed, scales),
        (values, values, values[:1], packed, scales),
        (values, values, None, packed[:-1], scales),
        (values, values, None, packed.int(), scales),
        (values, values, None, packed, scales.repeat(2)),
        (values, values.repeat(2)[::2], None, packed, scales),
    ):
        with pytest.raises(AssertionError):
            pack_signs(*arguments)
    with pytest.raises(AssertionError):
        average_signs(packed.repeat(2, 1), scales.repeat(3, 1), values)


@pytest.mark.slow
@NOT_SIMULATED
def test_kernels_are_vectorised_and_release_the_lock() -> None:
    for kernel, operation in ((signs._pack_signs, "addps"), (signs._average_signs, "mulps")):
        assert is_vectorised(assembly_of(kernel), operation), kernel
        assert kernel.targetoptions["nogil"]
