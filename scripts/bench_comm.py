#!/usr/bin/env python3
"""Collectives of hpczero beside those of the MPI library itself and of torch.distributed with gloo,
over sizes.

    mpirun -n 2 python scripts/bench_comm.py [--largest 134217728] [--rounds 9] [--types float32
    bfloat16]
        [--operations all_reduce reduce_scatter all_gather] [--json FILE]

In every round each contender moves the same buffer once or, when that is short, several times, one
contender after the other; a round counts as long as its slowest rank takes. The tables give the
median round, in GB/s of the whole buffer, its spread, and how many times faster hpczero is. The MPI
libraries have no bfloat16: of the raw ones only the gather, which moves bytes, can be compared.
What the watchdog costs is measured in the same way: the smallest all-reduces with it and before it
was started.

With --short it measures short collectives alone: through memory that the ranks share, twice, and by
messages, in microseconds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as gloo

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the checkout's own, wherever it is called from

from hpczero import safe_files
from hpczero.comm.world import World

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
ROUND = 0.02  # seconds that a round of one contender takes at least
SMALLEST = 4096

Contender = Callable[[], object]


def contenders(world: World, operation: str, size: int, dtype: torch.dtype) -> dict[str, Contender]:
    """Name -> the operation on a buffer of `size` bytes."""
    from mpi4py import MPI

    whole = torch.ones(size // dtype.itemsize, dtype=dtype)
    part = torch.ones(whole.numel() // world.size, dtype=dtype)
    group = world.everyone
    everything, own = ([tensor.view(torch.uint8).numpy(), MPI.BYTE] for tensor in (whole, part))
    if dtype is torch.float32:
        everything, own = ([tensor.numpy(), MPI.FLOAT] for tensor in (whole, part))
    chosen: dict[str, dict[str, Contender]] = {
        "all_reduce": {
            "hpczero": lambda: group.all_reduce(whole),
            "MPI": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, everything),
            "gloo": lambda: gloo.all_reduce(whole),
        },
        "reduce_scatter": {
            "hpczero": lambda: group.reduce_scatter(part, whole),
            "MPI": lambda: MPI.COMM_WORLD.Reduce_scatter_block(everything, own),
            "gloo": lambda: gloo.reduce_scatter_tensor(part, whole),
        },
        "all_gather": {
            "hpczero": lambda: group.all_gather(whole, part),
            "MPI": lambda: MPI.COMM_WORLD.Allgather(own, everything),
            "gloo": lambda: gloo.all_gather_into_tensor(whole, part),
        },
    }
    if dtype is not torch.float32 and operation != "all_gather":
        del chosen[operation]["MPI"]
    return chosen[operation]


def short_contenders(world: World, operation: str, size: int) -> dict[str, Contender]:
    """The same through memory, twice, and by messages; and MPI's own."""
    groups = {
        name: world.group(name, range(world.size)) for name in ("memory", "again", "messages")
    }
    groups["messages"].window = None
    whole = torch.ones(size // 4)
    part = torch.ones(whole.numel() // world.size)

    def contender(name: str) -> Contender:
        group = groups[name]
        if operation == "all_reduce":
            return lambda: group.all_reduce(whole)
        if operation == "reduce_scatter":
            return lambda: group.reduce_scatter(part, whole)
        return lambda: group.all_gather(whole, part)

    library = contenders(world, operation, size, torch.float32)["MPI"]
    return {name: contender(name) for name in groups} | {"MPI": library}


def short_table(world: World, operations: Sequence[str], rounds: int) -> list[str]:
    lines = [
        "| operation | bytes | by messages µs | through memory µs | MPI µs | ratio | A/A |",
        "|---|---|---|---|---|---|---|",
    ]
    for operation in operations:
        for size in (4096, 32768, 262144, 2097152):
            found = measure(world, short_contenders(world, operation, size), rounds)
            times = " | ".join(_microseconds(found[name]) for name in ("messages", "memory", "MPI"))
            ratios = [_ratio(found["memory"], found[name]) for name in ("messages", "again")]
            lines.append(f"| {operation} | {size:,} | {times} | {' | '.join(ratios)} |")
    return lines


def _microseconds(seconds: list[float]) -> str:
    low, middle, high = (quartile * 1e6 for quartile in statistics.quantiles(seconds, n=4))
    return f"{middle:.1f} ({low:.1f}–{high:.1f})"


def _ratio(ours: list[float], theirs: list[float]) -> str:
    """Format the quartiles of the ratios of turns side by side."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def measure(world: World, of: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Name -> seconds for one operation, in each round."""
    repeats = {}
    for name, operation in of.items():
        once(world, operation, 2)  # warm
        repeats[name] = max(1, min(1000, round(ROUND / once(world, operation, 1))))
    found: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(rounds):
        for name, operation in of.items():
            found[name].append(once(world, operation, repeats[name]))
    return found


def once(world: World, operation: Contender, repeats: int) -> float:
    world.everyone.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        operation()
    slowest = torch.tensor([(time.perf_counter() - began) / repeats], dtype=torch.float64)
    world.everyone.all_reduce(slowest, "max")
    return float(slowest)


def table(rows: dict[int, dict[str, list[float]]]) -> list[str]:
    lines = [
        "| bytes | hpczero GB/s | MPI GB/s | gloo GB/s | hpczero / MPI | hpczero / gloo |",
        "|---|---|---|---|---|---|",
    ]
    for size, found in rows.items():
        ours = statistics.median(found["hpczero"])
        speeds = [_speed(size, found.get(name)) for name in ("hpczero", "MPI", "gloo")]
        ratios = [
            f"{statistics.median(found[name]) / ours:.2f}" if name in found else "–"
            for name in ("MPI", "gloo")
        ]
        lines.append(f"| {size:,} | {' | '.join(speeds + ratios)} |")
    return lines


def _speed(size: int, seconds: list[float] | None) -> str:
    """Median and quartiles."""
    if not seconds:
        return "–"
    low, middle, high = (
        size / quartile / 1e9 for quartile in reversed(statistics.quantiles(seconds, n=4))
    )
    return f"{middle:.3g} ({low:.3g}–{high:.3g})"


def cost_of_the_watchdog(world: World, rounds: int) -> list[str]:
    """Before and after its start; the status is kept in both."""
    small = torch.ones(SMALLEST // 4)
    operation = {"all_reduce": lambda: world.everyone.all_reduce(small)}
    before = measure(world, operation, rounds)["all_reduce"]
    world.watch(600.0)
    after = measure(world, operation, rounds)["all_reduce"]
    middle = [statistics.median(seconds) * 1e6 for seconds in (before, after)]
    return [
        (
            f"An all_reduce of {SMALLEST:,} bytes: {middle[0]:.1f} µs before the watchdog was "
            f"started, {middle[1]:.1f} µs with it."
        )
    ]


def join_gloo(world: World, folder: str) -> None:
    gloo.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=world.rank, world_size=world.size
    )


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--largest",
        type=int,
        default=1 << 27,
        help="bytes of the largest buffer (default %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--types", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--json", type=Path, help="write all measurements to this file, too")
    parser.add_argument("--short", action="store_true", help="only short collectives inside a node")
    return parser.parse_args()


def measure_all(world: World, options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the tables' lines, and the seconds: operation and type -> bytes -> contender."""
    lines: list[str] = []
    kept: dict[str, Any] = {}
    for dtype in options.types:
        for operation in options.operations:
            rows = {}
            size = SMALLEST
            while size <= options.largest:
                padded = size // (64 * world.size) * 64 * world.size  # equal parts for all
                of = contenders(world, operation, padded, getattr(torch, dtype))
                rows[padded] = measure(world, of, options.rounds)
                size *= 8
            kept[f"{operation} {dtype}"] = rows
            lines += ["", f"**{operation}, {dtype}**", "", *table(rows)]
    return lines, kept


def main() -> None:
    options = options_given()
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # newer names, which older versions lack
    with World.start() as world, tempfile.TemporaryDirectory() as folder:
        if options.short:
            lines = short_table(world, options.operations, options.rounds)
            if world.rank == 0:
                print("\n".join(lines))
            return
        join_gloo(world, world.broadcast_object(folder))
        lines = [
            (
                f"{world.library}, {world.size} ranks on {len(set(world.hosts))} host(s), "
                f"{os.cpu_count()} cores, torch {torch.__version__}"
            ),
            "",
        ]
        lines += cost_of_the_watchdog(world, options.rounds)
        tables, kept = measure_all(world, options)
        lines += tables
        gloo.destroy_process_group()
        if world.rank == 0:
            print("\n".join(lines))
            if options.json:
                safe_files.write_text(options.json, json.dumps(kept))


if __name__ == "__main__":
    main()
