#!/usr/bin/env python3
"""Start jobs in a cgroup that has as much memory as was predicted of them, and a little less.

    sudo env PATH="$PATH" python scripts/bench_room.py                # 30 jobs, two ranks each
    sudo env PATH="$PATH" python scripts/bench_room.py --jobs 6 --parts 1.0

The limit is the predicted memory of the node and the margin of `planner.room`, from the start, as
a batch system sets it. For the second run of each job it is 0.9 of the prediction alone, and set
when the run has looked at its memory and begun, because `hpczero run` refuses what does not fit. A
job that is killed has died.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

from hpczero.comm.grid import Grid  # noqa: E402
from hpczero.machine import ROOT as SYSTEM  # noqa: E402
from hpczero.machine import _cgroup_folders  # noqa: E402
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers  # noqa: E402
from hpczero.planner.memory import needs_on_grid  # noqa: E402
from hpczero.planner.platform import Platform  # noqa: E402
from hpczero.planner.room import Account  # noqa: E402
from hpczero.planner.volumes import resolved  # noqa: E402
from hpczero.safe_files import write_text  # noqa: E402
from hpczero.spec.load import to_toml  # noqa: E402
from hpczero.spec.schema import Checkpoint, Memory, Model, Parallel, Spec, Train, Zero  # noqa: E402

RANKS = 2
PLATFORM = Platform("cpu", KERNELS_THAT_CHANGE_MEMORY["cpu"])
LONGEST = 300  # seconds of a job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--parts", type=float, nargs="+", default=[1.0, 0.9])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    died = dict.fromkeys(options.parts, 0)
    for spec in islice(jobs(options.seed), options.jobs):
        size = predicted(spec)
        words = []
        for part in options.parts:
            whole = part == 1.0
            limit = Account("all", size, 0).most if whole else int(part * size)
            lives, most = started(spec, limit, at_once=whole)
            died[part] += not lives
            words.append(f"{part:g}: {'lives' if lives else 'dies'} ({most / size:.1%} of it held)")
        print(f"{spec.name:<8}{size / 1e9:>7.2f} GB predicted   {'   '.join(words)}", flush=True)
    for part, count in died.items():
        print(f"{part:g} of the prediction: {count} of {options.jobs} died")


def jobs(seed: int) -> Iterator[Spec]:
    """Yield jobs of two ranks whose states and activations are most of what they hold."""
    choice = random.Random(seed)
    for number in range(1000):
        tensor, pipeline = choice.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
        micro_batch = choice.choice((1, 2, 4))
        yield Spec(
            name=f"room-{number}",
            model=Model(
                family=choice.choice(("gpt", "llama")),
                layers=choice.choice((8, 12)),
                hidden=choice.choice((768, 1024)),
                heads=8,
                seq_len=choice.choice((128, 256)),
                vocab=8192,
            ),
            train=Train(
                steps=2,
                micro_batch=micro_batch,
                global_batch=micro_batch * choice.choice((2, 4)),
                eval_batches=0,
            ),
            parallel=Parallel(tensor=tensor, pipeline=pipeline),
            zero=Zero(stage=choice.randrange(4), node_shared=choice.choice((True, False))),
            memory=Memory(recompute=choice.choice(("none", "selective", "block"))),
            checkpoint=Checkpoint(every=-1),
        )


def predicted(spec: Spec) -> int:
    """Return the bytes of the node."""
    parallel = resolved(spec, [0] * RANKS)
    need = needs_on_grid(spec, layers(spec.model), Grid.build(parallel, [0] * RANKS), PLATFORM)[0]
    return sum(need.node.values())


def started(spec: Spec, limit: int, at_once: bool) -> tuple[bool, int]:
    """Run the job, its memory limited from the start or once it has begun.

    Return if it lives, and the most that it held.
    """
    with tempfile.TemporaryDirectory() as folder, cgroup() as group:
        path = Path(folder) / "spec.toml"
        write_text(path, to_toml(spec.model_copy(update={"output": folder})))
        mpirun = str(Path(sys.executable).parent / "mpirun")
        words = [mpirun, "-n", str(RANKS), sys.executable, "-m", "hpczero", "run", str(path)]
        inside = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *words]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "numba_cuda")))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        run = Path(folder) / spec.name
        if at_once:
            limit_of(group).write_text(str(limit))
        with subprocess.Popen(
            inside, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            begun = time.monotonic()
            while process.poll() is None and not has_begun(run):
                if time.monotonic() - begun > LONGEST:
                    process.kill()
                time.sleep(0.02)
            with suppress(OSError):  # it may hold more already
                limit_of(group).write_text(str(limit))
            process.wait(LONGEST)
        summary = run / "summary.json"
        finished = summary.exists() and json.loads(summary.read_text())["state"] == "finished"
        return process.returncode == 0 and finished, most_held(group)


def has_begun(run: Path) -> bool:
    try:
        return '"layout"' in (run / "events.jsonl").read_text()
    except OSError:
        return False


def limit_of(group: Path) -> Path:
    names = ("memory.max", "memory.limit_in_bytes")
    return next(group / name for name in names if (group / name).exists())


def most_held(group: Path) -> int:
    names = ("memory.peak", "memory.max_usage_in_bytes")
    return int(next(group / name for name in names if (group / name).exists()).read_text())


@contextmanager
def cgroup() -> Iterator[Path]:
    """Make an empty cgroup below this process's own."""
    parents = [folder for _, folder in _cgroup_folders("memory", SYSTEM)]
    if not parents:
        sys.exit("no cgroup of memory is known here")
    own = parents[0] / f"hpczero-room-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        sys.exit(f"{own} cannot be made ({error.strerror}): memory is limited by root")
    try:
        yield own
    finally:
        for _ in range(50):
            with suppress(OSError):
                own.rmdir()
                break
            time.sleep(0.1)


if __name__ == "__main__":
    main()
