"""Random numbers by address: kernels equal their references, and pieces equal the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from hpczero_kernels import cpu, dropout, random

KEY = random.key_of(7, "test")


@njit("float32(uint32)")
def _radius_of(word):
    return random._radius(word)


@njit("UniTuple(float32, 2)(uint32)")
def _angle_of(word):
    return random._cosine_and_sine(word)


def test_philox_known_answers():
    """The published vectors for Philox 4x32-10 with counter and key all zeros and all ones."""
    zeros = random.words_reference(0, 0, 0, 4).tolist()
    assert zeros == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = random.block_of_words(2**64 - 1, 2**64 - 1, 2**64 - 1)
    assert list(ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62), st.integers(0, 2**40), st.integers(0, 70))
@settings(max_examples=50, deadline=None)
def test_words_equal_their_reference(key, stream, first, count):
    assert torch.equal(
        random.words(key, stream, first, count), random.words_reference(key, stream, first, count)
    )


@pytest.mark.parametrize(
    ("first", "count"), [(0, 0), (0, 1), (1, 1), (3, 1000), (511, 2), (2**33 + 1, 77)]
)
def test_normal_equals_its_reference(first, count):
    out = torch.full((count,), math.nan)
    random.fill_normal(out, KEY, first, 0.02)
    torch.testing.assert_close(
        out, random.normal_reference(KEY, first, count, 0.02), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 256, 2**32 - 2, 2**32 - 1])
def test_the_radius_of_a_word_is_right_at_the_ends_of_its_range(word):
    uniform = float(torch.tensor(word >> 1).float() + 1) * 2.0**-31
    assert math.isclose(_radius_of(word), math.sqrt(-2 * math.log(uniform)), rel_tol=1e-6)


@pytest.mark.parametrize("eighth", range(8))
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_cosine_and_sine_are_right_beside_each_eighth_of_a_turn(eighth, beside):
    word = (eighth * 2**29 + beside) % 2**32
    cosine, sine = _angle_of(word)
    assert abs(cosine - math.cos(2 * math.pi * word / 2**32)) < 1.2e-7
    assert abs(sine - math.sin(2 * math.pi * word / 2**32)) < 1.2e-7


def test_normal_has_the_values_of_its_rule():
    """Checkpoints store the rule's number: a change of these values needs another number."""
    out = torch.empty(6)
    random.fill_normal(out, 2026, 1, 1.0)
    expected = [-1103507551, -1099424927, 1062080107, -1112079296, 1040169337, 1057553284]
    assert random.RULE == 2
    assert out.view(torch.int32).tolist() == expected


def test_the_threads_of_a_rank_change_no_value():
    alone, shared = torch.empty(3 * 65536 + 5), torch.empty(3 * 65536 + 5)
    random.fill_normal(alone, KEY, 1, 1.0)
    with cpu.Pool(3) as threads:
        random.fill_normal(shared, KEY, 1, 1.0, threads)
    assert torch.equal(alone, shared)


def test_a_million_normal_values_have_the_distribution():
    """A sample's Kolmogorov-Smirnov distance is above 1.95 / sqrt(n) once in a thousand."""
    out = torch.empty(1 << 20)
    random.fill_normal(out, KEY, 0, 1.0)
    below = torch.special.ndtr(out.double().sort().values)
    ranks = torch.arange(1, out.numel() + 1) / out.numel()
    assert (below - ranks).abs().max() < 1.95 / out.numel() ** 0.5


def test_normal_is_normal():
    out = torch.empty(200_000)
    random.fill_normal(out, KEY, 0, 1.0)
    assert abs(out.mean()) < 0.01
    assert abs(out.std() - 1) < 0.01
    assert abs((out.abs() < 1).float().mean() - 0.6827) < 0.01
    assert abs((out[:-1] * out[1:]).mean()) < 0.01
    assert out.isfinite().all()


def test_a_piece_of_normal_equals_the_whole():
    whole, piece = torch.empty(101), torch.empty(40)
    random.fill_normal(whole, KEY, 0, 1.0)
    random.fill_normal(piece, KEY, 33, 1.0)
    assert torch.equal(piece, whole[33:73])


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 123), (0, 5, 8), (2, 0, 8), (2, 3, 4)])
def test_dropout_equals_its_reference(shape):
    samples = torch.arange(shape[0]) * 1_000_003
    place = dropout.ActivationWindow(all_columns=shape[2] + 3, first_row=2, first_column=1)
    expected = dropout.keep_mask_reference(KEY, 0.3, samples, shape, place)
    assert torch.equal(dropout.keep_mask(KEY, 0.3, samples, shape, place), expected)


def test_dropout_of_a_piece_equals_the_whole():
    samples = torch.tensor([4, 9])
    whole = dropout.keep_mask(KEY, 0.4, samples, (2, 16, 33), dropout.ActivationWindow(33))
    piece = dropout.keep_mask(
        KEY, 0.4, samples[1:], (1, 5, 7), dropout.ActivationWindow(33, first_row=6, first_column=21)
    )
    assert torch.equal(piece[0], whole[1, 6:11, 21:28])


def test_dropout_forward_and_backward():
    x = torch.randn(4, 50, 60, requires_grad=True)
    samples = torch.arange(4)
    y = dropout.dropout(x, 0.25, KEY, samples)
    kept = dropout.keep_mask(KEY, 0.25, samples, (4, 50, 60), dropout.ActivationWindow(60))
    assert abs(kept.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(y, x * kept / 0.75)
    gradient = torch.randn_like(x)
    y.backward(gradient)
    torch.testing.assert_close(x.grad, gradient * kept / 0.75)


@pytest.mark.parametrize("probability", [1e-12, 0.999999])
def test_dropout_at_its_limits(probability):
    kept = dropout.keep_mask(
        KEY, probability, torch.arange(2), (2, 8, 8), dropout.ActivationWindow(8)
    )
    assert kept.all() if probability < 0.5 else not kept.all()
