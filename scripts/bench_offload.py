#!/usr/bin/env python3
"""Time of a step with master weights and moments in files, on storage of a set speed.

    python scripts/bench_offload.py --folder /scratch            steps of few and of many tokens
    mpirun -n 2 python scripts/bench_offload.py --tokens 256 --pace 300

The storage is paced in the process: no more bytes pass in a second than `--pace` says, read and
written together. In each round two engines take turns in the same process: one without offload, one
with, each again. A turn is a step that is not timed, then `--steps` timed ones; what the last of
them leaves behind is completed before the next turn. Bytes are counted where the file is read and
written. `bound` is the larger of bytes / pace and the step without offload. What must be read once
the gradient's norm is known can be hidden behind forward alone, so `floor` is what remains of the
step, and the larger of bytes / pace and its forward.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from one_batch import Job

from hpczero.train.malloc import keep_free_memory


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--pace", type=float, default=150.0, help="MB/s; 0: as fast as it is")
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 512, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--precision", default="bf16")
    return parser.parse_args()


class Pace:
    """Lets so many bytes pass in a second."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_from = 0.0

    def wait(self, size: int) -> None:
        with self._lock:
            begin = max(self._free_from, time.monotonic())
            self._free_from = begin + size / self._rate
            until = self._free_from
        time.sleep(max(0.0, until - time.monotonic()))


def pace_storage(megabytes_per_second: float) -> None:
    from hpczero.parallel.offload.state_file import StateFile

    pace = Pace(megabytes_per_second * 1e6)

    def paced(intact: Any) -> Any:
        def moved(file: Any, place: int, room: memoryview) -> None:
            pace.wait(len(room))
            intact(file, place, room)

        return moved

    for name in ("read", "write"):
        setattr(StateFile, name, paced(getattr(StateFile, name)))


def values(world: Any, arguments: argparse.Namespace, tokens: int, offload: str) -> dict[str, Any]:
    """Return the tables of the spec."""
    seq_len = min(tokens, 512)
    samples = max(1, tokens // seq_len)
    return {
        "model": {
            "layers": arguments.layers,
            "hidden": arguments.hidden,
            "heads": 4,
            "seq_len": seq_len,
        },
        "train": {
            "precision": arguments.precision,
            "global_batch": samples * world.size,
            "micro_batch": samples,
        },
        "zero": {"stage": 1, "offload": offload},
    }


def turn(job: Job, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and of the last one's forward."""
    job.step()
    begun = time.perf_counter()
    for _ in range(steps):
        _, forward = job.step()
    seconds = (time.perf_counter() - begun) / steps
    job.engine.wait_for_weights()
    return seconds, forward


def main() -> int:
    arguments = options()
    keep_free_memory()
    import torch

    from hpczero.comm.world import World
    from hpczero.train import setup

    world = World.start()
    torch.set_num_threads(1)
    setup.use_kernels(world)
    if arguments.pace:
        pace_storage(arguments.pace)
    for tokens in arguments.tokens:
        measure(world, arguments, tokens)
    world.close()
    return 0


def measure(world: Any, arguments: argparse.Namespace, tokens: int) -> None:
    folder = f"nvme:{arguments.folder}"
    plain, offloaded = (
        Job(world, values(world, arguments, tokens, where)) for where in ("none", folder)
    )
    turns = {"without": plain, "without again": plain, "with": offloaded, "with again": offloaded}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    forwards = []
    file = offloaded.engine.file
    moved = 0
    for number in range(arguments.rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            before = file.bytes_read + file.bytes_written
            of_step, of_forward = turn(turns[name], arguments.steps)
            seconds[name].append(of_step)
            moved = max(moved, file.bytes_read + file.bytes_written - before)
            if name == "without":
                forwards.append(of_forward)
    moved //= arguments.steps + 1
    for job in (plain, offloaded):
        job.engine.close()
    if world.rank:
        return
    step, forward = median(seconds["without"]), median(forwards)
    of_storage = moved / (arguments.pace * 1e6) if arguments.pace else 0.0
    bound, floor = max(of_storage, step), step - forward + max(of_storage, forward)
    parameters = offloaded.engine.parameter_count()
    print(
        f"{tokens} tokens a rank, {parameters:,} parameters: {moved:,} bytes a step"
        f" ({moved / parameters:.2f} a parameter), {of_storage:.3f} s at {arguments.pace:g} MB/s;"
        f" without offload {step:.3f} s, of which forward {forward:.3f} s"
    )
    for name, took in seconds.items():
        low, _, high = quantiles(took)
        print(
            f"  {name:14} {median(took):.3f} s ({low:.3f}-{high:.3f}),"
            f" / bound {median(took) / bound:.3f}, / floor {median(took) / floor:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
