"""Folders of runs as they are left behind, made without training: all their figures are known."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero.planner.composed import Pipeline
from hpczero.runs import rank_times
from hpczero.train import trace_file
from tests.support.traced_steps import Known, traced

SPEC = """
name = "{name}"
seed = {seed}
[train]
steps = {steps}
global_batch = 16
micro_batch = 2
trace = true
[parallel]
pipeline = 2
order = "tensor,data,pipeline"
[optimizer]
lr = {lr}
"""
RANKS, MICRO_BATCHES = 4, 4
BEGIN = 1_790_000_000.0  # of the first job, in seconds since 1970
STEP = 0.5  # seconds
COMPUTE, COMM, DATA = 0.3, 0.15, 0.02  # of a step
SLOW = 2  # the rank that the others wait for
BYTES = {"weights": 1000, "moments": 2000, "runtime": 50_000}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(BEGIN + seconds, UTC).isoformat(timespec="milliseconds")


def made(
    folder: Path,
    name: str = "made",
    steps: int = 40,
    jobs: Sequence[int] = (0,),
    lr: float = 1e-3,
    seed: int = 0,
) -> Path:
    """Make a run of two stages of two ranks; each of the `jobs` begins after so many steps."""
    run = folder / name
    run.mkdir(parents=True)
    (run / "spec.toml").write_text(SPEC.format(name=name, steps=steps, lr=lr, seed=seed))
    metrics = [_metrics(step, lr) for step in range(1, steps + 1)]
    write_lines(run / "metrics.jsonl", metrics)
    write_lines(run / "events.jsonl", _events(steps, jobs))
    write_lines(run / "memory.jsonl", [_memory(step) for step in range(2, steps + 1, 7)])
    (run / "summary.json").write_text(json.dumps(_summary(steps, metrics)))
    write_rank_times(run, steps)
    write_trace(run)
    return run


def stopped_at_once(folder: Path, name: str = "stopped") -> Path:
    """Make a run that was stopped before it did a step."""
    run = folder / name
    run.mkdir(parents=True)
    (run / "spec.toml").write_text(SPEC.format(name=name, steps=40, lr=1e-3, seed=0))
    (run / "metrics.jsonl").touch()
    stop = {"time": moment(3), "event": "stop", "state": "stopped", "step": 0, "reason": "SIGTERM"}
    write_lines(run / "events.jsonl", [_start(0.0), stop])
    (run / "summary.json").write_text(json.dumps({"state": "stopped", "steps": 0, "ranks": RANKS}))
    return run


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_rank_times(run: Path, steps: int, ranks: int = RANKS, every: int = 4) -> None:
    (run / rank_times.FOLDER).mkdir(exist_ok=True)
    content = [rank_times.head(ranks)]
    for first in range(1, steps + 1, every):
        last = min(steps, first + every - 1)
        count = last - first + 1
        rows = []
        for rank in range(ranks):
            computed = COMPUTE + 0.1 * (rank == SLOW)
            waited = STEP - computed - DATA
            times = [STEP, computed, waited, DATA, 0.0, computed]
            times += [0.0] * (len(rank_times.FIELDS) - len(times))
            rows.append([seconds * count for seconds in times])
        content.append(rank_times.row(first, last, rows))
    rank_times.next_file(run).write_bytes(b"".join(content))


def write_trace(run: Path) -> None:
    """Write the trace of a pipeline that takes known times, beside another on the data axis."""
    known = Known([3_000_000, 4_000_000], [6_000_000, 7_000_000], [500_000])
    trace = traced(Pipeline("1f1b", 2, 1, MICRO_BATCHES), known, columns=2, steps=3)
    ranks = [
        trace_file.Rank(rank, f"rank {rank}", events)
        for rank, events in sorted(trace.events.items())
    ]
    trace_file.write(run / "trace.json.gz", ranks, {}, 0)


def _metrics(step: int, lr: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "time": moment(10 + step * STEP),
        "step": step,
        "loss": 5.0 - 0.05 * step - 100 * lr,
        "grad_norm": 2.0 / step,
        "lr": lr,
        "tokens": 1024,
        "step_seconds": STEP,
        "tokens_per_second": 1024 / STEP,
        "data_seconds": DATA,
        "comm_seconds": COMM,
        "compute_seconds": COMPUTE,
    }
    if step % 10 == 0:
        line["validation_loss"] = line["loss"] + 0.2
        line["validation_losses"] = {"books": line["loss"] + 0.1, "web": line["loss"] + 0.3}
    return line


def _start(seconds: float) -> dict[str, Any]:
    ranks = [
        {"rank": rank, "host": f"node{rank // 2}", "node": rank // 2, "pid": 9, "device": "the CPU"}
        for rank in range(RANKS)
    ]
    packages = {"python": "3.11", "torch": "2.6"}
    return {
        "time": moment(seconds),
        "event": "start",
        "ranks": ranks,
        "packages": packages,
        "git": None,
        "mpi": "MPICH 5",
    }


def _events(steps: int, jobs: Sequence[int]) -> list[dict[str, Any]]:
    events = []
    for number, (first, last) in enumerate(zip(jobs, [*jobs[1:], steps], strict=True)):
        began = 10 + first * STEP - 0.2
        events.append(_start(began))
        grid = {"tensor": 1, "data": 2, "pipeline": 2}
        events.append(
            {"time": moment(began), "event": "layout", "grid": grid, "threads_per_rank": 1}
        )
        if number:
            events.append({"time": moment(began), "event": "resume", "step": first})
        for step in range(first + 1, last + 1):
            if step % 10 == 0:
                when = moment(10 + step * STEP)
                saved = {"time": when, "event": "save", "step": step, "bytes": 5000}
                events += [saved | {"seconds": 0.1}, {"time": when, "event": "eval", "step": step}]
    end = {"time": moment(10 + steps * STEP), "event": "stop", "state": "finished", "step": steps}
    return [*events, end | {"reason": "all steps done"}]


def _memory(step: int) -> dict[str, Any]:
    measured = BYTES | {"activations": 100 * step}
    predicted = BYTES | {"activations": 3000}
    line = {"time": moment(10 + step * STEP), "step": step, "rank": step % RANKS, "host": "node0"}
    return line | {
        "held": sum(measured.values()),
        "predicted": predicted,
        "measured": measured,
    }


def _summary(steps: int, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sent = {"count": 3, "bytes": 700, "inside": 600, "between": 100, "shared": 50, "seconds": 0.5}
    return {
        "state": "finished",
        "reason": "",
        "steps": steps,
        "final_loss": metrics[-1]["loss"],
        "validation_loss": metrics[-1].get("validation_loss"),
        "tokens": 1024 * steps,
        "tokens_per_second": 1024 / STEP,
        "ranks": RANKS,
        "parameters": 12345,
        "wall_seconds": steps * STEP + 10,
        "unigram_entropy": 3.2,
        "memory": {"ranks": [{"held": 60_000 + rank, "predicted": BYTES} for rank in range(RANKS)]},
        "comm": [{"data": {"all_reduce": sent}, "pipeline": {"send": sent}}] * RANKS,
        "trace": {"mean_step": {"seconds": {"forward": 0.2, "backward": 0.25, "wait data": 0.05}}},
        "goodput": {"computing": 40.0, "communication": 20.0, "start": 10.0, "allocated": 70.0},
    }
