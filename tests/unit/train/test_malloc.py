"""Memory that is freed is there for the next step: in a process of its own, as nothing takes
back what malloc was told.
"""

import os
import platform
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from hpczero.train import malloc, process

STEPS = """
import resource
from hpczero.train.malloc import give_back_free_memory, keep_free_memory
accepted = keep_free_memory()
def step():
    blocks = [b"x" * (size << 20) for size in (3, 40, 90)]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
step()
print(len(accepted), faults(), (give_back_free_memory(), faults())[1])
"""
PAGES = 133 << 8  # of a step


def plain() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }


def counted(**environment: str) -> list[int]:
    run = subprocess.run(
        [sys.executable, "-c", STEPS],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=plain() | environment,
    )
    return [int(word) for word in run.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is how glibc is told")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    accepted, next_step, after = counted()
    assert accepted == 3
    assert next_step < PAGES / 50
    assert after > PAGES / 2


IN_PIECES = """
import sys
import time
from hpczero.train import malloc, process
(malloc.keep_free_memory if sys.argv[1] == "kept" else malloc.keep_no_free_memory)()
thread = malloc.GivingBack() if sys.argv[2] == "given" else None
def step():
    \"\"\"Of every three pieces of a growing size one stays until the end.\"\"\"
    kept = []
    for size in range(100, 900):
        blocks = [b"x" * (size << 10) for _ in range(3)]
        kept += blocks[1:2] if size % 4 == 0 else []
        del blocks
        if len(kept) > 60:
            kept = []
        time.sleep(0.001)
before = malloc.resident()
process.forget_peak()
step()
if thread:
    thread.end()
print(process.peak_resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is how glibc is told")
@pytest.mark.slow
def test_memory_in_pieces_is_not_held_where_none_is_kept() -> None:
    def most(*words: str) -> int:
        command = [sys.executable, "-c", IN_PIECES, *words]
        run = subprocess.run(command, capture_output=True, check=True, timeout=60, env=plain())
        return int(run.stdout)

    needed = most("none", "")
    assert needed < 0.8 * most("kept", "")
    assert most("kept", "given") < 1.2 * needed


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TOP_PAD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.top_pad=131072")],
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is how glibc is told")
@pytest.mark.few(1)
def test_what_the_environment_says_stays(name: str, value: str) -> None:
    accepted, next_step, _ = counted(**{name: value})
    assert accepted == 0
    assert next_step > PAGES / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this malloc can be asked")
def test_malloc_says_what_it_has_given_out() -> None:
    before = malloc.given_out()
    assert before
    block = bytearray(50 << 20)
    during = malloc.given_out()
    assert during
    del block
    after = malloc.given_out()
    assert after
    assert during - before == pytest.approx(50 << 20, rel=0.01)
    assert abs(after - before) < 1 << 20


@pytest.mark.slow
def test_the_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    block = b"x" * (600 << 20)
    code = "from hpczero.train.process import peak_resident; print(peak_resident())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert 0 < int(found.stdout) < len(block)


def test_a_kernel_that_keeps_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PEAK", b"9")
    assert not process.forget_peak()


def test_the_peak_of_what_was_resident_begins_anew() -> None:
    block = b"x" * (100 << 20)
    peak = process.peak_resident()
    del block
    malloc.give_back_free_memory()
    # the kernel adds up what each processor has counted, and may be some pages off
    assert process.peak_resident() > peak - (1 << 20)
    if not process.forget_peak():
        pytest.skip("this kernel keeps the peak")
    assert process.peak_resident() < peak - (90 << 20)
