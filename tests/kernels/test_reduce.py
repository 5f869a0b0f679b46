"""Sum of pieces: bitwise equal to its reference for any values, alignment, cut and threads."""

import pytest
import torch

from hpczero_kernels import reduce
from hpczero_kernels.cpu import Pool
from hpczero_kernels.reduce import BLOCK, sum_pieces, sum_pieces_reference
from tests.support.assembly import assembly_of, is_vectorised

HALVES = [torch.bfloat16, torch.float16]
PRECISIONS = [*HALVES, torch.float32]
BITS = {2: torch.int16, 4: torch.int32}


def same(left, right):
    """Return True if the bits are equal; a NaN equals any NaN."""
    bits = BITS[left.element_size()]
    return left.dtype == right.dtype and bool(
        ((left.view(bits) == right.view(bits)) | (left.isnan() & right.isnan())).all()
    )


def values(count, dtype, seed):
    """Return values of all magnitudes, among them zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=generator) * torch.exp2(
        torch.randint(-20, 12, (count,), generator=generator).float()
    )
    odd = torch.tensor(
        [
            0.0,
            -0.0,
            float("inf"),
            -float("inf"),
            float("nan"),
            1e-40,
            -1e-40,
            3.39e38,
            65504.0,
            6e-8,
        ]
    )
    where = torch.randint(0, max(count, 1), (count // 50,), generator=generator)
    drawn[where] = odd[torch.arange(len(where)) % len(odd)]
    return drawn.to(dtype)


def poisoned(count, dtype):
    return torch.full((count,), float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 63, BLOCK - 1, BLOCK, 2 * BLOCK + 123])
def test_sums_equal_the_reference(dtype, pieces, count):
    given = [values(count, dtype, seed) for seed in range(pieces)]
    for out_dtype in {dtype, torch.float32}:
        for accumulate in (False, True):
            start = values(count, out_dtype, 99) if accumulate else poisoned(count, out_dtype)
            expected, out = start.clone(), start.clone()
            sum_pieces_reference(given, expected, accumulate, None)
            sum_pieces(given, out, accumulate, None)
            assert same(out, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_widened_exactly(dtype):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    out = poisoned(2**16, torch.float32)
    sum_pieces([halves], out, False, None)
    assert same(out, halves.float())


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_that_of_torch(dtype):
    """Values half-way between two halves, the fp32 values next to them, and random bits."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float().view(torch.int32)
    middle = 0x8000 if dtype == torch.bfloat16 else 0x1000
    near = torch.cat(
        [
            halves + offset
            for offset in (
                -middle - 1,
                -middle,
                1 - middle,
                -1,
                0,
                1,
                middle - 1,
                middle,
                middle + 1,
            )
        ]
    )
    bits = torch.cat(
        [
            near,
            torch.randint(
                -(2**31), 2**31, (2**18,), generator=torch.Generator().manual_seed(1)
            ).int(),
        ]
    )
    single = bits.view(torch.float32)
    out = poisoned(single.numel(), dtype)
    sum_pieces([single], out, False, None)
    assert same(out, single.to(dtype))


def test_the_order_of_the_pieces_is_the_order_of_the_sum():
    given = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    out = torch.empty(1)
    sum_pieces(given, out, False, None)
    assert out == 0.0
    sum_pieces([given[0], given[2], given[1]], out, False, None)
    assert out == 1.0


@pytest.mark.parametrize("place", range(3))
def test_the_sum_may_replace_a_piece(place):
    given = [values(3 * BLOCK + 5, torch.bfloat16, seed) for seed in range(3)]
    expected = poisoned(3 * BLOCK + 5, torch.bfloat16)
    sum_pieces_reference(given, expected, False, None)
    sum_pieces(given, given[place], False, None)
    assert same(given[place], expected)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("count", [1, 100, BLOCK, 3 * BLOCK + 17])
def test_squares_are_those_of_the_sum_as_stored(dtype, count):
    given = [
        torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for seed in range(3)
    ]
    out, squares = poisoned(count, dtype), poisoned(-(-count // BLOCK), torch.float32)
    sum_pieces(given, out, False, squares)
    expected = torch.stack([block.double().square().sum() for block in out.split(BLOCK)])
    torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0)
    sum_pieces_reference(given, out, False, squares)
    torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_squares_show_a_bad_value_in_its_block_alone(bad):
    piece, squares = torch.ones(3 * BLOCK, dtype=torch.bfloat16), torch.zeros(3)
    piece[2 * BLOCK - 1] = bad
    sum_pieces([piece], piece, False, squares)
    assert squares.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_neither_cut_nor_alignment_changes_a_bit(offset):
    count = 5 * BLOCK + 1000
    given = [values(count, torch.bfloat16, seed).nan_to_num(0, 0, 0) for seed in range(3)]
    whole, squares = poisoned(count, torch.float32), poisoned(6, torch.float32)
    sum_pieces(given, whole, False, squares)

    shifted = [torch.cat([piece[:offset], piece])[offset:] for piece in given]
    cut, cut_squares = torch.zeros(count + 2 * offset), poisoned(6, torch.float32)
    for first, last in ((0, 1), (1, 4), (4, 6)):
        part = slice(first * BLOCK, min(last * BLOCK, count))
        sum_pieces(
            [piece[part] for piece in shifted],
            cut[offset : offset + count][part],
            False,
            cut_squares[first:last],
        )
    assert same(cut[offset : offset + count], whole)
    assert same(cut_squares, squares)
    assert not cut[:offset].any()
    assert not cut[offset + count :].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("offset", [1, 16, 32])
@pytest.mark.parametrize("ending", [992, 1000])
def test_cache_lines_that_are_not_read_first_hold_the_same(dtype, offset, ending):
    """Whole cache lines and parts of them are summed; the memory around them must not change."""
    count = 3 * BLOCK + ending
    given = [values(count, dtype, seed) for seed in range(2)]
    expected, around = poisoned(count, dtype), torch.ones(count + 2 * offset, dtype=dtype)
    sum_pieces_reference(given, expected, False, None)
    sum_pieces(given, around[offset : offset + count], False, None)
    assert same(around[offset : offset + count], expected)
    assert (around[:offset] == 1).all()
    assert (around[offset + count :] == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads):
    count = 100 * BLOCK + 7
    given = [
        torch.randn(count, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed in range(2)
    ]
    expected, squares = torch.zeros(count), torch.zeros(101)
    sum_pieces(given, expected, True, squares)
    out, out_squares = torch.zeros(count), poisoned(101, torch.float32)
    with Pool(threads) as pool:
        sum_pieces(given, out, True, out_squares, pool)
    assert torch.equal(out, expected)
    assert torch.equal(out_squares, squares)


def test_tensors_that_do_not_fit_together_are_refused():
    ones = torch.ones(8)
    for arguments in (
        ([ones, ones[:7]], ones, False, None),
        ([ones, ones.bfloat16()], ones, False, None),
        ([ones], torch.ones(16)[::2], False, None),
        ([ones], ones, False, torch.ones(2)),
        ([ones], ones, False, torch.ones(1).bfloat16()),
    ):
        with pytest.raises(AssertionError):
            sum_pieces(*arguments)
    with pytest.raises(KeyError):
        sum_pieces([ones.double()], ones, False, None)


def test_the_kernel_is_vectorised_and_releases_the_lock():
    text = assembly_of(reduce._sum)
    assert is_vectorised(text, "addps")
    assert is_vectorised(text, "pmovzxwd")
    assert reduce._sum.targetoptions["nogil"]
