"""The background reader: order, bounds, errors, and that it always ends."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from hpczero.data.samples import Prefetcher

WAIT = 10.0  # seconds after which something that must happen has not


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hpczero-prefetch"]


def test_items_come_in_order_with_both_ends() -> None:
    prefetcher = Prefetcher(lambda step: step * step, 3, 20, ahead=4)
    items = [prefetcher.next() for _ in range(3, 21)]
    assert [item for item, _ in items] == [step * step for step in range(3, 21)]
    assert all(waited >= 0 for _, waited in items)
    with pytest.raises(AssertionError, match="all 18 items"):
        prefetcher.next()
    prefetcher.close()
    assert not threads()


def test_it_reads_ahead_so_far_and_no_further() -> None:
    started, allowed = [], threading.Semaphore(0)
    full = threading.Event()

    def fetch(step: int) -> int:
        started.append(step)
        if len(started) == 3:
            full.set()
        allowed.release()
        return step

    prefetcher = Prefetcher(fetch, 0, 100, ahead=3)
    assert full.wait(WAIT)  # without any next()
    for _ in range(3):
        assert allowed.acquire(timeout=WAIT)
    assert not allowed.acquire(timeout=0.05)  # a fourth would be too many
    assert prefetcher.next()[0] == 0
    assert allowed.acquire(timeout=WAIT)  # room for one more
    assert started == [0, 1, 2, 3]
    prefetcher.close()


def test_the_wait_is_measured_and_it_is_zero_when_the_item_is_there() -> None:
    gate, second = threading.Event(), threading.Event()

    def fetch(step: int) -> int:
        if step == 0:
            gate.wait(WAIT)
        else:
            second.set()
        return step

    prefetcher = Prefetcher(fetch, 0, 1, ahead=2)
    threading.Timer(0.1, gate.set).start()
    assert prefetcher.next()[1] > 0.05
    assert second.wait(WAIT)
    prefetcher.close()


def test_an_error_comes_out_of_next_after_the_items_before_it() -> None:
    def fetch(step: int) -> int:
        if step == 2:
            raise OSError("the disk is gone")
        return step

    prefetcher = Prefetcher(fetch, 0, 10, ahead=5)
    assert [prefetcher.next()[0], prefetcher.next()[0]] == [0, 1]
    for _ in range(2):  # and again, if asked again
        with pytest.raises(OSError, match="the disk is gone"):
            prefetcher.next()
    prefetcher.close()
    assert not threads()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread_when_the_queue_is_full(taken: int) -> None:
    prefetcher = Prefetcher(lambda step: np.zeros(1000), 0, 10**9, ahead=2)
    for _ in range(taken):
        prefetcher.next()
    prefetcher.close()
    prefetcher.close()
    assert not threads()
    with pytest.raises(AssertionError, match="after close"):
        prefetcher.next()


def test_copies_out_of_a_memory_map_do_not_hold_the_interpreter(tmp_path: Path) -> None:
    """With the interpreter's own switching turned off, another thread can run during the copy
    only if the copy lets it.
    """
    np.arange(2**24, dtype=np.uint16).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", np.uint16, "r")
    out = np.empty(len(mapped), np.int64)

    def runs_beside_the_copy() -> bool:
        copying, done = threading.Event(), threading.Event()

        def copy() -> None:
            copying.set()
            out[:] = mapped
            done.set()

        thread = threading.Thread(target=copy)
        thread.start()
        copying.wait(WAIT)
        beside = not done.is_set()
        thread.join()
        return beside

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        assert any(
            runs_beside_the_copy() for _ in range(20)
        )  # a busy machine may wake this thread too late, but not 20 times
    finally:
        sys.setswitchinterval(interval)
