#!/usr/bin/env python3
"""Time and size of a long run's report, beside `json.loads` of the lines that it reads.

    python scripts/bench_large_report.py                      a million steps on 64 ranks
    python scripts/bench_large_report.py --steps 10000 --ranks 8 --rounds 3

The run is made: lines of metrics as a run writes them, times of all ranks in a row for each 10
steps, an event for each 1,000 steps. In a round three take turns in one process, timed by the
processor: the report (files read, page built and written), `json.loads` of each line of metrics
and of events, and that again, which shows the noise. The goal is at most 4 times, and 3 MB.
"""

import argparse
import contextlib
import io
import json
import random
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from turns import ratio, take_turns

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hpczero import cli, safe_files  # noqa: E402
from hpczero.runs import rank_times  # noqa: E402

GOAL, LARGEST = 4.0, 3_000_000
BEGAN = 1_790_000_000.0  # seconds since 1970
STEP = 0.35
A_ROW = 10  # steps
_NOISE = random.Random(1)


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat(timespec="milliseconds")


def metrics(step: int) -> dict[str, object]:
    seconds = STEP * _NOISE.uniform(0.97, 1.1)
    line = {
        "time": moment(20 + step * STEP),
        "step": step,
        "loss": 2.0 + 4.0 / (1 + step / 5000) + _NOISE.gauss(0, 0.02),
        "grad_norm": _NOISE.uniform(0.2, 0.9),
        "lr": 1e-3 * _NOISE.uniform(0.5, 1.0),
        "tokens": 16384,
        "step_seconds": seconds,
        "tokens_per_second": 16384 / seconds,
        "data_seconds": _NOISE.uniform(0.001, 0.002),
        "comm_seconds": 0.1 * seconds,
        "compute_seconds": 0.85 * seconds,
        "bytes_sent": 123456789,
    }
    if step % 1000 == 0:
        line |= {"validation_loss": line["loss"], "validation_standard_error": 0.01}
    return line


def make(run: Path, steps: int, ranks: int) -> None:
    safe_files.make_folder(run)
    spec = f'name = "long"\ntrain.steps = {steps}\n'
    safe_files.write_text(run / "spec.toml", spec)
    with safe_files.written_whole(run / "metrics.jsonl") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics(step)).encode() + b"\n")
    known = [
        {"rank": rank, "host": f"node{rank // 8}", "node": rank // 8, "pid": 100 + rank}
        for rank in range(ranks)
    ]
    events: list[dict[str, object]] = [{"time": moment(0), "event": "start", "ranks": known}]
    for step in range(1000, steps + 1, 1000):
        when = moment(20 + step * STEP)
        events.append({"time": when, "event": "save", "step": step, "seconds": 1.5})
    lines = "".join(json.dumps(event) + "\n" for event in events)
    safe_files.write_text(run / "events.jsonl", lines)
    safe_files.make_folder(run / rank_times.FOLDER)
    chance = np.random.default_rng(1)
    with safe_files.written_whole(rank_times.next_file(run)) as file:
        file.write(rank_times.head(ranks))
        for first in range(1, steps + 1, A_ROW):
            times = chance.uniform(0.9, 1.1, (ranks, len(rank_times.FIELDS))) * STEP * A_ROW / 2
            file.write(rank_times.row(first, min(steps, first + A_ROW - 1), times))


def main() -> None:
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--steps", type=int, default=1_000_000)
    command.add_argument("--ranks", type=int, default=64)
    command.add_argument("--rounds", type=int, default=15)
    options = command.parse_args()
    folder = safe_files.temporary_folder(Path("/tmp"), "hpczero-bench-")
    try:
        bench(folder, options.steps, options.ranks, options.rounds)
    finally:
        safe_files.remove_tree(folder)


def bench(folder: Path, steps: int, ranks: int, rounds: int) -> None:
    run, page = folder / "long", folder / "report.html"
    make(run, steps, ranks)
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    lines += (run / "events.jsonl").read_bytes().splitlines()

    def report() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(["report", str(run), "-o", str(page)]) == 0

    def loads() -> None:
        for line in lines:
            json.loads(line)

    contenders = {"report": report, "loads": loads, "loads again": loads}
    seconds = take_turns(contenders, rounds, threads=1)
    found = ratio(seconds["report"], seconds["loads"])
    noise = ratio(seconds["loads again"], seconds["loads"])
    size = page.stat().st_size
    print(f"{steps:,} steps on {ranks} ranks, {rounds} rounds, medians (quartiles)")
    print(f"  report / json.loads  {found}  goal <= {GOAL:g}")
    print(f"  A/A                  {noise}")
    print(f"  page                 {size / 1e6:.2f} MB     goal <= {LARGEST / 1e6:g}")


if __name__ == "__main__":
    main()
