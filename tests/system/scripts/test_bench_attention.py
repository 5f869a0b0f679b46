"""The benchmarks of attention on few positions: every figure is printed."""

import re
import sys

import pytest

from tests.support.launch import CHECKOUT, Finished, launch

pytestmark = pytest.mark.slow


def bench(script: str, *arguments: str) -> Finished:
    return launch([sys.executable, str(CHECKOUT / "scripts" / script), *arguments], seconds=400)


def test_times_beside_dense_attention() -> None:
    done = bench("bench_attention.py", "--smoke", "--threads", "1")
    assert (done.code, done.left) == (0, []), done.err
    figures = re.findall(r"^(fp32|bf16) (.+?)  +([\d.]+)% +[\d.]+ +[\d.]+ \(", done.out, re.M)
    assert len(figures) == 2 * (6 + 4 + 3), done.out
    densities = {name: float(density) for _, name, density in figures}
    assert densities["dense"] == densities["step, dense again"] == 100
    assert densities["9 + 1 blocks of 64"] > 100  # 512 positions: all blocks, whole ones


def test_the_longest_sequences() -> None:
    small = ["--gib", "0.6", "--layers", "1", "--hidden", "64", "--heads", "8"]
    done = bench("bench_longest.py", *small)
    assert (done.code, done.left) == (0, []), done.err
    said = re.search(r"^blocks: ([\d,]+) tokens, ([\d.]+) times as many", done.out, re.M)
    assert said, done.out
    assert float(said[2]) > 2, done.out
    assert re.search(r"^flash: ", done.out, re.M), done.out
