"""Threads of one rank: how ranges are cut and run, errors, and the end of the threads."""

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero_kernels.cpu import BLOCK, INLINE, Pool, slices_of

LARGE = 1000 * BLOCK


@given(st.integers(0, 1 << 24), st.integers(1, 100))
def test_slices_are_the_range(count, most):
    slices = slices_of(count, most)
    assert 1 <= len(slices) <= most
    assert slices[0][0] == 0
    assert slices[-1][1] == count
    assert all(stop == start for (_, stop), (start, _) in pairwise(slices))
    assert all(start % BLOCK == 0 for start, _ in slices)
    lengths = [stop - start for start, stop in slices]
    assert max(lengths) - min(lengths) < 2 * BLOCK
    assert len(slices) == 1 or min(lengths) > 0


@given(st.integers(0, 10_000), st.integers(1, 100), st.integers(1, 99), st.integers(1, 9))
def test_slices_of_rows_are_cut_between_blocks(rows, most, block, least):
    slices = slices_of(rows, most, block, least)
    assert slices[0][0] == 0
    assert slices[-1][1] == rows
    assert all(stop == start for (_, stop), (start, _) in pairwise(slices))
    assert all(start % block == 0 for start, _ in slices)
    assert len(slices) == 1 or all(stop - start > block * (least - 1) for start, stop in slices)


def test_one_thread_is_the_calling_one():
    seen = []
    for pool in (INLINE, Pool(1)):
        pool.run(lambda start, stop: seen.append((start, stop, threading.get_ident())), LARGE + 1)
        pool.close()
    assert seen == [(0, LARGE + 1, threading.get_ident())] * 2


def test_threads_work_at_the_same_time():
    together, parts = threading.Barrier(3), []

    def kernel(start, stop):
        together.wait(timeout=30)
        parts.append((start, stop))

    with Pool(3) as pool:
        for _ in range(3):
            parts.clear()
            pool.run(kernel, LARGE)
            assert sorted(parts) == slices_of(LARGE, 3)


def test_little_work_is_not_handed_out():
    seen = []
    with Pool(4) as pool:
        pool.run(lambda start, stop: seen.append((start, stop, threading.get_ident())), 2 * BLOCK)
        pool.run(lambda start, stop: seen.append((start, stop, threading.get_ident())), 0)
    assert seen == [(0, 2 * BLOCK, threading.get_ident()), (0, 0, threading.get_ident())]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_a_slice_raises_is_raised_once_all_have_ended(failing):
    slices, ended = slices_of(LARGE, 3), []
    others_may_end = threading.Event()

    def kernel(start, stop):
        if start == slices[failing][0]:
            others_may_end.set()
            raise ValueError(f"slice {failing}")
        assert others_may_end.wait(timeout=30)
        ended.append(start)

    with Pool(3) as pool:
        with pytest.raises(ValueError, match=f"slice {failing}"):
            pool.run(kernel, LARGE)
        assert len(ended) == 2
        pool.run(lambda start, stop: ended.append(start), LARGE)
    assert len(ended) == 5


def test_close_ends_the_threads():
    before = set(threading.enumerate())
    pool, together = Pool(3), threading.Barrier(3)
    pool.run(lambda start, stop: together.wait(timeout=30) and None, LARGE)
    assert len(set(threading.enumerate()) - before) == 2
    pool.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(RuntimeError):
        pool.run(lambda start, stop: None, LARGE)
