#!/usr/bin/env python3
"""Speed of hpczero's kernels: GB/s, and percent of what a copy reaches on the same device, beside
PyTorch's operations and torch.compile.

    python scripts/bench_kernels.py                     on a GPU if there is one, else on one core
    python scripts/bench_kernels.py --only "adamw*" --elements 16777216 --json result.json

Bytes are those that an operation cannot do without: each input read once, each output written once.
Every contender works on several sets of random data in turns, more than caches hold. In a round
each contender runs once; medians over the rounds are given, so that what disturbs the machine
disturbs all alike. Times on a GPU are its own (events): what a contender asks for waits behind a
kernel that sleeps, so that the host's time of the calls, longer than many a kernel, is over when
the first begins.
"""

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda"), str(ROOT / "scripts")]

import torch  # noqa: E402

from hpczero import safe_files  # noqa: E402

Run = Callable[[int], object]  # on the set of data of this number
_SHORTEST_SLEEP, _LONGEST_SLEEP = 1 << 18, 1 << 32  # cycles of a GPU: 0.1 ms, seconds


@dataclass(frozen=True)
class Work:
    """An operation: the bytes of a run, and who carries it out; the names of contenders
    beginning with "hpczero" are ours.
    """

    name: str
    bytes: int
    contenders: dict[str, Run]


@dataclass(frozen=True)
class Setting:
    device: str
    dtype: torch.dtype
    elements: int
    columns: int
    sets: int
    compiles: bool

    def drawn(self, *shape: int, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        return [
            torch.randn(shape, device=self.device).to(dtype or self.dtype) for _ in range(self.sets)
        ]

    @property
    def shape(self) -> tuple[int, int, int]:
        """[samples, rows, columns]"""
        return 1, max(1, self.elements // self.columns), self.columns


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--only", default="*", help="names or patterns of operations, separated by commas"
    )
    parser.add_argument(
        "--elements", type=int, default=0, help="of a tensor; 0: 2^28 on a GPU, 2^24 on a CPU"
    )
    parser.add_argument(
        "--columns",
        type=int,
        default=4096,
        help="width of what has rows; a vocabulary is twelve times that, and one more",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of activations, gradients and weights",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--calls",
        type=int,
        default=0,
        help="instead: the host's time of a call, of so many in a row on small tensors",
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def main() -> int:
    from bench_operations import works

    arguments = options()
    device = (
        arguments.device
        if arguments.device != "auto"
        else "cuda"
        if torch.cuda.is_available()
        else "cpu"
    )
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"bench_kernels.py: no GPU: torch {torch.__version__} finds none")
    elements = arguments.elements or (
        1 << 16 if arguments.calls else 1 << 28 if device == "cuda" else 1 << 24
    )
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sets = 2 if arguments.calls else max(2, (1 << 28) // (2 * elements))
    setting = Setting(
        device,
        getattr(torch, arguments.dtype),
        elements,
        arguments.columns,
        sets,
        not arguments.no_compile,
    )
    clock = Clock(device, arguments.rounds, arguments.warmup, arguments.calls)
    copied = 0.0 if arguments.calls else copy_speed(setting, clock)
    name = torch.cuda.get_device_name() if device == "cuda" else "one core"
    reached = (
        ""
        if arguments.calls
        else f": a copy of {4 * elements / 1e6:.0f} MB reaches {copied:.1f} GB/s (read and written)"
    )
    print(f"{name}, torch {torch.__version__}{reached}\n")
    figures = []
    patterns = arguments.only.split(",")
    for name, made in works().items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            work = made(setting)
            seconds = clock.seconds(work.contenders, setting.sets)
            figures += show_calls(work, seconds) if arguments.calls else show(work, seconds, copied)
            del work
    if arguments.json:
        safe_files.write_text(
            arguments.json,
            json.dumps({"device": name, "copy_gbs": copied, "figures": figures}, indent=1) + "\n",
        )
    return 0


def copy_speed(setting: Setting, clock: "Clock") -> float:
    sources, targets = (setting.drawn(setting.elements, dtype=torch.float32) for _ in range(2))
    (seconds,) = clock.seconds(
        {"copy": lambda number: targets[number].copy_(sources[number])}, setting.sets
    ).values()
    return 8 * setting.elements / seconds / 1e9


class Clock:
    def __init__(self, device: str, rounds: int, warmup: int, calls: int) -> None:
        """`calls`: what is timed is the host, in so many calls; 0: the device, in one."""
        self._cuda, self._rounds, self._warmup, self._calls = (
            device == "cuda",
            rounds,
            warmup,
            calls,
        )
        self._sleep = _SHORTEST_SLEEP

    def seconds(self, contenders: dict[str, Run], sets: int) -> dict[str, float]:
        """The median of each; in every other round they take turns backwards."""
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(-self._warmup, self._rounds):
            for name in list(contenders)[:: -1 if number % 2 else 1]:
                seconds = self._once(contenders[name], number % sets)
                if number >= 0:
                    taken[name].append(seconds)
        return {name: median(each) for name, each in taken.items()}

    def _once(self, run: Run, number: int) -> float:
        if self._calls or not self._cuda:
            calls = max(1, self._calls)
            began = time.perf_counter()
            for _ in range(calls):
                run(number)
            seconds = (time.perf_counter() - began) / calls
            if self._cuda:
                torch.cuda.synchronize()
            return seconds
        return self._behind_sleep(run, number)

    def _behind_sleep(self, run: Run, number: int) -> float:
        """Seconds of the device alone. Where it woke before all was asked of it, it sleeps
        longer.
        """
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self._sleep)
            begin.record()
            run(number)
            end.record()
            awake = begin.query()
            end.synchronize()
            if not awake:
                return begin.elapsed_time(end) / 1e3
            if self._sleep >= _LONGEST_SLEEP:
                raise SystemExit(
                    "a contender waits for the device: its calls cannot be timed apart from it"
                )
            self._sleep *= 2


def show(work: Work, seconds: dict[str, float], copied: float) -> Iterable[dict[str, Any]]:
    """A table, and its figures."""
    ours = min((each for name, each in seconds.items() if name.startswith("hpczero")), default=None)
    print(f"{work.name} ({work.bytes / 1e6:.0f} MB)")
    for name, each in seconds.items():
        speed = work.bytes / each / 1e9
        against = (
            ""
            if ours is None or name.startswith("hpczero")
            else f"   hpczero is {each / ours:.2f}x as fast"
        )
        print(
            f"  {name:22} {each * 1e3:9.3f} ms {speed:8.1f} GB/s {100 * speed / copied:5.0f} "
            f"% of copy{against}"
        )
        yield {
            "operation": work.name,
            "contender": name,
            "seconds": each,
            "gbs": speed,
            "of_copy": speed / copied,
        }
    print()


def show_calls(work: Work, seconds: dict[str, float]) -> Iterable[dict[str, Any]]:
    for name, each in seconds.items():
        print(f"{work.name:40} {name:22} {each * 1e6:8.1f} us a call")
        yield {"operation": work.name, "contender": name, "seconds": each}


if __name__ == "__main__":
    sys.exit(main())
