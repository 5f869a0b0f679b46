#!/usr/bin/env python3
"""Processor time that what watches a run takes of its training thread, beside a step's time.

    python scripts/bench_hooks.py                   jobspecs/quickstart.toml on 2 ranks
    python scripts/bench_hooks.py --ranks 1 --spec MY.toml

Each hook is called in a loop on this thread alone, timed by the thread's processor time; its calls
a step make it a share of the step's time, which a run of the spec has shown (the median over its
steps). A hook that hands something to another thread has that thread's processor time in a line of
its own, as Python's lock lets one of them compute at a time. The goal is at most 1 % of a step.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda"), str(ROOT / "scripts")]

from hpczero.comm import live  # noqa: E402
from hpczero.comm.live import Live, Onlooker  # noqa: E402
from hpczero.comm.status import SLOT, Signature, Status  # noqa: E402
from hpczero.comm.world import World  # noqa: E402
from hpczero.safe_files import make_folders, write_text  # noqa: E402
from hpczero.spec.load import load  # noqa: E402
from hpczero.spec.schema import Spec  # noqa: E402
from hpczero.spec.track import Track  # noqa: E402
from hpczero.track import tracking  # noqa: E402
from hpczero.track.item import Item  # noqa: E402
from hpczero.track.tensorboard_files import TensorBoard  # noqa: E402
from hpczero.track.tracking import Tracking  # noqa: E402
from hpczero.train.energy_counters import Rapl  # noqa: E402
from hpczero.train.rank_clock import RankClock  # noqa: E402

GOAL = 0.01
RANKS_OF_NODE, GROUPS_OF_RANK = 8, 5
LINE = {  # of metrics.jsonl, as the quickstart writes it
    "step": 1,
    "loss": 2.345678901234,
    "grad_norm": 0.7654321,
    "lr": 0.002,
    "tokens": 2048,
    "step_seconds": 0.21,
    "tokens_per_second": 9752.38,
    "data_seconds": 8.1e-05,
    "comm_seconds": 0.012,
    "compute_seconds": 0.1979,
}


@dataclass(frozen=True)
class Hook:
    """`call` is what a step runs `calls` times, in so many `turns` here.

    `every`: the seconds between two calls, of one that goes by the clock instead.
    """

    name: str
    call: Callable[[], object]
    calls: float = 1.0
    turns: int = 100_000
    every: float = 0.0


def seconds_of(hook: Hook) -> float:
    """Return the processor seconds of this thread for one call: the best of five loops' shares."""
    times = []
    for _ in range(5):
        begun = time.thread_time()
        for _ in range(hook.turns // 5):
            hook.call()
        times.append((time.thread_time() - begun) / (hook.turns // 5))
    return min(times)


class Discarding:
    """A tracker that takes no time."""

    def write(self, items: object) -> None: ...

    def close(self) -> None: ...

    def give_up(self) -> None: ...


@contextmanager
def of_trackers(spec: Spec, folder: Path) -> Iterator[list[Hook]]:
    """Yield the hooks of no tracker, of one and of four; the trackers' own work is left out."""
    hooks = []
    open_ones = []
    for count in (0, 1, 4):
        names = [f"tracker {number}" for number in range(count)]
        made = Tracking(spec, folder, dict.fromkeys(names, Discarding))
        made.go_on_from(1, 0)
        open_ones.append(made)

        def step(made: Tracking = made) -> None:
            made.add("metrics", LINE)
            made.problems()

        hooks.append(Hook(f"track: a line of metrics, {count} trackers", step))
    yield hooks
    for made in open_ones:
        made.close()


@contextmanager
def of_tensorboard(spec: Spec, folder: Path) -> Iterator[list[Hook]]:
    """Yield TensorBoard's writing of a step, in the thread of its lane."""
    writer = TensorBoard(tracking.facts_of(spec, folder))
    item = Item("metrics", 1, time.time(), LINE, 2048)
    batch = [item] * 10  # at least: a lane writes each second what has come
    yield [
        Hook(
            "track: TensorBoard's record, in its thread",
            lambda: writer.write(batch),
            1 / len(batch),
            5_000,
        )
    ]
    writer.close()


@contextmanager
def of_states(spec: Spec, folder: Path) -> Iterator[list[Hook]]:
    """Yield what it takes to say what a rank does, and what its node's thread for files does."""
    status = Status()
    slots = {}
    for rank in range(RANKS_OF_NODE):
        slots[rank] = memoryview(bytearray(SLOT))
        of_rank = Status()
        of_rank.move_to(slots[rank])
        of_rank.identify(0)
        for group in range(GROUPS_OF_RANK):
            entry = of_rank.enter(f"axis {group}", range(RANKS_OF_NODE))
            for number in range(1, 100):
                of_rank.started(entry, number, Signature.of("all_reduce", "of 4096 bytes"))
    status.move_to(slots[0])

    def does_something_else() -> None:
        with status.doing("data"):
            pass

    yield [
        Hook("states: a step begins", lambda: status.at_step(7)),
        Hook("states: a part of a step", does_something_else),
        Hook("states: its thread, nobody looks", _look(status, slots, folder), every=1.0),
        Hook(
            "states: its thread, somebody looks",
            _look(status, slots, folder, asks=True),
            turns=500,
            every=live.WRITE_EVERY,
        ),
    ]


def _look(
    status: Status, slots: dict[int, memoryview], folder: Path, asks: bool = False
) -> Callable[[], object]:
    """Return a look of a rank that has the duty; if somebody asks each one writes."""
    now = [1e6]
    watch = folder / "run" / "watch"
    make_folders(watch.parent)
    rank = Live(status, 0, 0, slots, True, lambda: now[0])
    rank.look(watch)
    onlooker = Onlooker(watch)

    def look() -> None:
        now[0] += live.WRITE_EVERY * 1000 if asks else 1.0
        rank.look(watch)

    def look_and_write() -> None:
        onlooker.ask()
        look()

    return look_and_write if asks else look


@contextmanager
def of_rank_clock(spec: Spec, folder: Path) -> Iterator[list[Hook]]:
    """Yield the clock of a rank; a row of some steps is gathered (of one rank) and written."""
    numbers = itertools.count(1)
    with World.start() as world:
        clock = RankClock(world, spec.train.log_every, folder, print)

        def step() -> None:
            clock.begin()
            clock.step(next(numbers), 0.2, 0.01, 0.001)

        yield [Hook(f"times: a step, and a row in {spec.train.log_every} steps", step)]
        clock.close()


@contextmanager
def of_energy(spec: Spec, folder: Path) -> Iterator[list[Hook]]:
    """Yield a reading of two processors with memory, from files as the kernel's."""
    root = folder / "powercap"
    for zone, name in (("0", "package-0"), ("0:0", "dram"), ("1", "package-1"), ("1:0", "dram")):
        path = root / f"intel-rapl:{zone}"
        make_folders(path)
        for file, content in (("name", name), ("max_energy_range_uj", "262143328850")):
            write_text(path / file, content)
        write_text(path / "energy_uj", "123456789")
    rapl = Rapl(root)
    yield [Hook("energy: RAPL of two processors", rapl.joules, 1 / spec.train.log_every, 5_000)]
    rapl.close()


# a family of hooks yields them, and ends what it began
FAMILIES = (of_trackers, of_tensorboard, of_states, of_rank_clock, of_energy)


def step_seconds(path: Path, ranks: int, steps: int, folder: Path) -> float:
    """Return the median of so many steps of a run of the spec, without the first ten."""
    command = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    command += [sys.executable, "-m", "hpczero", "run", str(path), "--set", f"output={folder}"]
    command += ["--set", f"train.steps={steps}", "--set", "schedule.warmup_steps=0"]
    path_of_code = [str(ROOT), str(ROOT / "numba_cuda"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path_of_code))}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    (metrics,) = folder.glob("*/metrics.jsonl")
    lines = metrics.read_text().splitlines()
    return median(json.loads(line)["step_seconds"] for line in lines[10:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", type=Path, default=ROOT / "jobspecs" / "quickstart.toml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-ms", type=float, help="a step's time; no run is started")
    options = parser.parse_args()
    spec = load(options.spec).spec.model_copy(update={"track": Track()})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step = (options.step_ms or 0) / 1e3
        step = step or step_seconds(options.spec, options.ranks, options.steps, folder)
        print(f"a step of {options.spec.stem} on {options.ranks} ranks: {1e3 * step:.1f} ms")
        print(f"{'hook':<48} {'us a call':>10} {'calls a step':>13} {'of a step':>10}")
        for family in FAMILIES:
            with family(spec, folder) as hooks:
                for hook in hooks:
                    report(hook, step)


def report(hook: Hook, step: float) -> None:
    seconds = seconds_of(hook)
    calls = step / hook.every if hook.every else hook.calls
    share = seconds * calls / step
    verdict = "" if share <= GOAL else f"  more than {GOAL:.0%}"
    print(f"{hook.name:<48} {1e6 * seconds:10.2f} {calls:13.3g} {share:10.4%}{verdict}")


if __name__ == "__main__":
    main()
