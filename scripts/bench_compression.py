#!/usr/bin/env python3
"""Time of the kernels that compress messages between replicas, beside a copy of the same bytes.

    python scripts/bench_compression.py
    python scripts/bench_compression.py --only "pack*,average*" --elements 16777216 --threads 2
    python scripts/bench_compression.py --smoke                     seconds: does it run?

`bytes` are those that a kernel reads and writes once; the copy is PyTorch's, of half of them, so
that it reads and writes as many. In each round the kernel, the copy and the copy again (A/A) take
turns in one process; every other round goes backwards. Ratios are of two in a round, with their
quartiles. One thread is timed by its processor time, several by the clock.
"""

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from turns import Ratio, ratio, take_turns  # noqa: E402

from hpczero import safe_files  # noqa: E402
from hpczero_kernels.cpu import Pool  # noqa: E402
from hpczero_kernels.message_sizes import (  # noqa: E402
    quantised_blocks,
    quantised_bytes,
    sign_blocks,
    sign_bytes,
)
from hpczero_kernels.quantised import average_quantised, quantise, restore  # noqa: E402
from hpczero_kernels.signs import average_signs, pack_signs, unpack_signs  # noqa: E402

_SMOKE = 1 << 16  # elements
_WORKERS = (2, 4)


@dataclass(frozen=True)
class Case:
    """A call, and the tensors that it reads and writes."""

    name: str
    run: Callable[[], None]
    read: list[Tensor]
    written: list[Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.read, *self.written))


@dataclass(frozen=True)
class Figures:
    case: str
    bytes: int
    seconds: float
    copy_seconds: float
    of_copy: Ratio
    again_of_copy: Ratio


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--smoke", action="store_true", help=f"3 rounds of {_SMOKE} elements")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def cases(count: int, pool: Pool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(count, generator=generator)
    error = torch.zeros(count)
    variance = torch.rand(count, generator=generator) + 0.1
    out = torch.zeros(count)
    yield from sign_cases(values, error, variance, out, pool)
    for bits in (8, 4):
        yield from quantised_cases(values, error.zero_(), out, bits, pool)


def sign_cases(
    values: Tensor, error: Tensor, variance: Tensor, out: Tensor, pool: Pool
) -> Iterator[Case]:
    count = values.numel()
    workers = max(_WORKERS)
    packed = torch.zeros(workers, sign_bytes(count), dtype=torch.uint8)
    scales = torch.ones(workers, sign_blocks(count))
    one = packed[0], scales[0]
    yield Case(
        "pack signs",
        lambda: pack_signs(values, error, None, *one, pool),
        [values, error], [error, *one],
    )  # fmt: skip
    yield Case(
        "pack signs, variance",
        lambda: pack_signs(values, error, variance, *one, pool),
        [values, error, variance], [error, *one],
    )  # fmt: skip
    packed[1:] = packed[0]
    scales[1:] = scales[0]
    yield Case("unpack signs", lambda: unpack_signs(*one, None, out, pool), [*one], [out])
    yield Case(
        "unpack signs, variance",
        lambda: unpack_signs(*one, variance, out, pool),
        [*one, variance], [out],
    )  # fmt: skip
    for number in _WORKERS:
        some = packed[:number], scales[:number]
        yield Case(
            f"average signs of {number}",
            lambda some=some: average_signs(*some, out, pool), [*some], [out],
        )  # fmt: skip


def quantised_cases(
    values: Tensor, error: Tensor, out: Tensor, bits: int, pool: Pool
) -> Iterator[Case]:
    count = values.numel()
    workers = max(_WORKERS)
    packed = torch.zeros(workers, quantised_bytes(count, bits), dtype=torch.uint8)
    scales = torch.ones(workers, quantised_blocks(count))
    one = packed[0], scales[0]
    yield Case(
        f"quantise {bits}",
        lambda: quantise(values, error, *one, bits, pool),
        [values, error], [error, *one],
    )  # fmt: skip
    half = values.bfloat16()
    yield Case(
        f"quantise {bits}, bf16, no error",
        lambda: quantise(half, None, *one, bits, pool), [half], [*one],
    )  # fmt: skip
    packed[1:] = packed[0]
    scales[1:] = scales[0]
    yield Case(f"restore {bits}", lambda: restore(*one, out, bits, pool), [*one], [out])
    yield Case(f"restore {bits}, bf16", lambda: restore(*one, half, bits, pool), [*one], [half])
    for number in _WORKERS:
        some = packed[:number], scales[:number]
        yield Case(
            f"average {bits} of {number}",
            lambda some=some: average_quantised(*some, out, bits, pool), [*some], [out],
        )  # fmt: skip


def copy_of(size: int, threads: int) -> Callable[[], object]:
    """Return a copy that reads and writes so many bytes together."""
    torch.set_num_threads(threads)
    source = torch.ones(max(1, size // 8))
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def measured(case: Case, rounds: int, threads: int) -> Figures:
    copy = copy_of(case.bytes, threads)
    contenders = {"kernel": case.run, "copy": copy, "copy again": copy}
    seconds = take_turns(contenders, rounds, threads)
    return Figures(
        case.name, case.bytes, median(seconds["kernel"]), median(seconds["copy"]),
        *(ratio(seconds[name], seconds["copy"]) for name in ("kernel", "copy again")),
    )  # fmt: skip


def main() -> int:
    arguments = options()
    count = _SMOKE if arguments.smoke else arguments.elements
    rounds = 3 if arguments.smoke else arguments.rounds
    patterns = arguments.only.split(",")
    print(f"{count} elements, {rounds} rounds, threads: {arguments.threads}")
    print(f"{'':28}{'MB':>7}{'ms':>9}{'GB/s':>7}   {'/ copy':18}{'copy / copy':18}")
    found = []
    with Pool(arguments.threads) as pool:
        for case in cases(count, pool):
            if not any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns):
                continue
            figures = measured(case, rounds, arguments.threads)
            found.append(asdict(figures))
            print(
                f"{case.name:28}{case.bytes / 1e6:7.0f}{figures.seconds * 1e3:9.2f}"
                f"{case.bytes / figures.seconds / 1e9:7.1f}   {figures.of_copy!s:18}"
                f"{figures.again_of_copy!s:18}",
                flush=True,
            )
    if arguments.json:
        safe_files.write_text(arguments.json, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
