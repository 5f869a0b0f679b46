"""The benchmarks of slow networks on tiny models: all ways run, and every figure is printed."""

import re
import sys

import pytest

from tests.support.launch import CHECKOUT, Finished, launch, mpirun

CANNOT = 3  # exit code of netns_testbed.sh where the machine does not allow it

pytestmark = pytest.mark.slow


def bench(script: str, *arguments: str) -> Finished:
    path = f"{mpirun(1)[0].rpartition('/')[0]}:/usr/sbin:/usr/bin:/sbin:/bin"
    command = [sys.executable, str(CHECKOUT / "scripts" / script), *arguments]
    return launch(command, seconds=240, environment={"PATH": path})


def test_time_over_a_slow_link() -> None:
    tiny = ["--layers", "1", "--hidden", "32", "--vocab", "257", "--rounds", "2", "--every", "4"]
    done = bench("bench_slow_network.py", *tiny)
    if done.code == CANNOT:
        pytest.skip(done.err.strip())
    assert (done.code, done.left) == (0, []), done.err
    for figure in ("x plain after warm-up", "x no network at all", "A/A alone", "waits of a round"):
        assert figure in done.out, done.out
    sent = re.findall(r"^(.+): [\d.]+ MB a step, 1 / ([\d.]+)$", done.out, re.MULTILINE)
    shares = {way: float(share) for way, share in sent}
    assert shares.keys() == {"plain", "local steps", "signs"}, done.out
    assert 14 < shares["signs"] < 16


def test_quality() -> None:
    tiny = ["--seeds", "2", "--steps", "20", "--every", "4", "--set", "model.hidden=16"]
    done = bench("bench_quality.py", *tiny)
    assert (done.code, done.left) == (0, []), done.err + done.out
    for way in ("AdamW", "1-bit Adam", "int8", "local steps", "one worker"):
        assert re.search(rf"^{way} .*nan", done.out, re.MULTILINE) is None
        assert re.search(rf"^{way} +\d\.\d{{4}}", done.out, re.MULTILINE), done.out


def test_compression_beside_a_copy() -> None:
    done = bench("bench_compression.py", "--smoke")
    assert (done.code, done.left) == (0, []), done.err
    assert len(re.findall(r"^(?:pack|unpack|quantise|restore|average) ", done.out, re.M)) >= 18
