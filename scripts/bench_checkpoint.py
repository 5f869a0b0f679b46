#!/usr/bin/env python3
"""Saving and loading a checkpoint, beside dd, plain reading and torch.distributed.checkpoint, and
what a save behind the training costs.

    mpirun -n 2 python scripts/bench_checkpoint.py --folder /scratch/bench

Every round saves the same states (master weights and moments of the engine): with dd (from a copy
of them in shared memory), as many writers, past the page cache (oflag=direct) and with fsync; with
hpczero, synchronously; with torch.distributed.checkpoint (fsync too). When all have written, what
each wrote is read, from the disk, not the page cache, each after a pause and a first reading by dd.
Every other round goes backwards. hpczero reads twice in it, which shows the noise. A round takes as
long as its slowest rank. Then the processor-seconds of a load, and of its parts done by themselves:
reading a file from the disk into one small buffer and into the states, the same into memory that
was never touched, checksums. Asynchronous: steps without a save, the step that begins one, and the
steps while it goes on, beside a copy of the states, after a step as well, into memory that was used
before.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpczero import safe_files

CHUNK = 8 << 20
BLOCK = 1 << 20
SETTLES = 4.0  # seconds


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("bench-checkpoint"),
        help="a folder that does not exist yet; removed at the end",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument(
        "--only",
        nargs="+",
        default=["table", "parts", "behind"],
        choices=["table", "parts", "behind"],
    )
    return parser.parse_args()


def main() -> int:
    arguments = options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from hpczero.comm.world import World

    torch.set_num_threads(1)
    with World.start() as world:
        bench = Bench(arguments, world)
        try:
            lines = [line for part in arguments.only for line in getattr(bench, part)()]
        finally:
            safe_files.remove(bench.raw)
            world.everyone.barrier()
            if world.rank == 0:
                safe_files.remove_tree(Path(arguments.folder))
        if world.rank == 0:
            print("\n".join(lines))
    return 0


class Bench:
    def __init__(self, arguments: argparse.Namespace, world: Any) -> None:
        from bench_contenders import Ours
        from bench_step import job_of, start_gloo

        from hpczero.comm.grid import Grid
        from hpczero.planner.memory import saves_behind
        from hpczero.train.checkpointing import Checkpoints

        self.arguments, self.world = arguments, world
        self.folder = world.broadcast_object(str(arguments.folder.absolute()))
        job = job_of(arguments, world)
        saving = job.spec.checkpoint.model_copy(update={"every": 1, "asynchronous": True})
        spec = job.spec.model_copy(
            update={"output": self.folder, "name": "ours", "checkpoint": saving}
        )
        assert saves_behind(spec)
        self.ours = Ours(arguments.stage, True, job)
        self.ours.step()
        grid = Grid.build(spec.parallel, world.node_of_rank)
        self.checkpoints = Checkpoints(spec, world, grid, self.ours.engine)
        self.states = [
            tensor
            for unit in self.ours.engine.units
            for tensor in (unit.master, unit.moment1, unit.moment2)
        ]
        self.bytes = sum(tensor.nbytes for tensor in self.states)
        start_gloo(world, "127.0.0.1")
        self.number = 0
        self.raw = Path(f"/dev/shm/hpczero-bench-{os.getpid()}")
        with os.fdopen(safe_files.create(self.raw), "wb") as file:
            for tensor in self.states:
                file.write(tensor.numpy().data)

    def timings(self) -> dict[str, list[tuple[float, float]]]:
        """Return the seconds of a write and of a read, in each round of each contender."""
        ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "dd": (self.dd_write, self.dd_read),
            "hpczero": (self.save, self.load),
            "torch.distributed.checkpoint": (self.dcp_save, self.dcp_load),
            "hpczero again": (lambda: None, self.load),  # what noise alone does
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(self.arguments.rounds):
            self.clear()
            order = list(ways)[:: -1 if number % 2 else 1]
            wrote = {name: self.timed(ways[name][0]) for name in order}
            for name in order:
                self.settle()
                seconds[name].append((wrote[name], self.timed(ways[name][1])))
        return seconds

    def table(self) -> list[str]:
        seconds = self.timings()
        total = sum(self.world.gather_objects(self.bytes) or [0])
        lines = [
            (
                f"{total / 1e9:.2f} GB of states on {self.world.size} ranks, "
                f"{self.arguments.rounds} rounds\n"
            )
        ]
        lines += [
            "| | write GB/s | / dd (range) | read GB/s | / dd (range) |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name, found in seconds.items():
            cells = [name]
            for place in range(2):
                ratios = [
                    dd[place] / own[place] for own, dd in zip(found, seconds["dd"], strict=True)
                ]
                written = name != "hpczero again" or place
                cells.append(
                    f"{total / 1e9 / median(own[place] for own in found):.2f}"
                    if written and not self.world.rank
                    else ""
                )
                cells.append(
                    f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
                    if written and not self.world.rank
                    else ""
                )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for other in ("torch.distributed.checkpoint", "hpczero again"):
            ratios = [
                ours[1] / theirs[1]
                for ours, theirs in zip(seconds["hpczero"], seconds[other], strict=True)
            ]
            not_slower = sum(ratio <= 1 for ratio in ratios)
            lines.append(
                f"hpczero loads in {median(ratios):.2f} "
                f"({min(ratios):.2f}–{max(ratios):.2f}) of the time of {other}, "
                f"not slower in {not_slower} of {len(ratios)} rounds"
            )
        return lines

    def parts(self) -> list[str]:
        """Processor-seconds a GB (10^9 bytes) of a load and of what it consists of."""
        import numpy as np
        import xxhash

        small = np.zeros(BLOCK, np.uint8)
        whole = [tensor.numpy().reshape(-1).view(np.uint8) for tensor in self.states]
        file = os.open(self.raw_on_disk(), os.O_RDONLY)

        def read_into(targets: Iterable[Any]) -> None:
            at = 0
            for target in targets:
                at += os.preadv(file, [target], at)

        def blocks(memory: Iterable[Any]) -> Iterable[Any]:
            return (one[at : at + BLOCK] for one in memory for at in range(0, len(one), BLOCK))

        ways = {
            "a load": self.load,
            "read": lambda: read_into(small[: len(block)] for block in blocks(whole)),
            "read into the states": lambda: read_into(blocks(whole)),
            "read into untouched memory": lambda: read_into(
                blocks(np.empty(len(one), np.uint8) for one in whole)
            ),
            "checksums": lambda: (
                [xxhash.xxh3_64_intdigest(block) for block in blocks(whole)] and None
            ),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self.arguments.rounds):
            for name, way in ways.items():
                self.forget()
                begun = time.process_time()
                way()
                found[name].append((time.process_time() - begun) / self.bytes * 1e9)
        os.close(file)
        if self.world.rank:
            return []
        cells = (
            f"{name} {median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})"
            for name, seconds in found.items()
        )
        return [f"\nprocessor-seconds a GB on rank 0: {'; '.join(cells)}"]

    def raw_on_disk(self) -> str:
        path = f"{self.folder}/dd-{self.world.rank}"
        self.dd(f"if={self.raw}", f"of={path}", f"bs={CHUNK}", "conv=fsync")
        return path

    def behind(self) -> list[str]:
        """Steps without a save, the one that begins it, those while it goes on."""
        self.clear()
        plain = [self.timed(self.ours.step) for _ in range(8)]
        self.copies = [tensor.clone() for tensor in self.states]
        self.number += 1
        self.checkpoints.begin(self.number, ends=False)  # makes the table
        self.checkpoints.conclude()
        copies, first, during, took = [], [], [], []
        for _ in range(self.arguments.rounds):
            self.number += 1
            begun = time.perf_counter()
            first.append(self.timed(lambda: self.checkpoints.begin(self.number, ends=False)))
            while any(
                self.world.broadcast_object(
                    self.world.gather_objects(not self.checkpoints.saver.written)
                )
            ):
                during.append(self.timed(self.ours.step))
            took.append(time.perf_counter() - begun)
            self.checkpoints.conclude()
            plain += [self.timed(self.ours.step) for _ in range(4)]
            copies.append(self.timed(self.copy))
            plain.append(self.timed(self.ours.step))  # a save, like the copy, comes after a step
        if self.world.rank:
            return []
        usual = median(plain)
        ratio = median(begin / copy for begin, copy in zip(first, copies, strict=True))
        return [
            f"\nasynchronous: a step takes {1e3 * usual:.0f} ms; a copy of the states "
            f"{1e3 * median(copies):.0f} ms; "
            f"beginning a save {1e3 * median(first):.0f} ms, {ratio:.2f} times the copy; "
            f"of {len(during)} steps during {len(took)} saves ({median(took):.1f} s each) "
            f"the mean takes {1e3 * sum(during) / len(during):.0f} ms, "
            f"{sum(during) / len(during) / usual:.2f} times the usual"
        ]

    def timed(self, action: Callable[[], Any]) -> float:
        self.world.everyone.barrier()
        begun = time.perf_counter()
        action()
        return float(
            self.world.broadcast_object(
                max(self.world.gather_objects(time.perf_counter() - begun) or [0.0])
            )
        )

    def clear(self) -> None:
        self.world.everyone.barrier()
        if self.world.rank == 0:
            safe_files.remove_tree(Path(self.folder))
            safe_files.make_folders(Path(self.folder))
        self.world.everyone.barrier()

    def forget(self) -> None:
        """Make the next reading come from the disk."""
        for path in Path(self.folder).rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        self.world.everyone.barrier()

    def settle(self) -> None:
        """The page cache had its memory a moment ago. A virtual machine gives free memory back
        within seconds and gets it again page by page, and whoever reads first pays for that: up to
        four times as long as the next.
        """
        self.forget()
        time.sleep(SETTLES)
        self.dd_read()
        self.forget()

    def copy(self) -> None:
        for tensor, copy in zip(self.states, self.copies, strict=True):
            copy.copy_(tensor)

    def dd_write(self) -> None:
        self.dd(
            f"if={self.raw}",
            f"of={self.folder}/dd-{self.world.rank}",
            f"bs={CHUNK}",
            "oflag=direct",
            "conv=fsync",
        )

    def dd_read(self) -> None:
        self.dd(f"if={self.folder}/dd-{self.world.rank}", "of=/dev/null", f"bs={CHUNK}")

    def dd(self, *operands: str) -> None:
        subprocess.run(["dd", *operands], check=True, capture_output=True)

    def save(self) -> None:
        self.number += 1
        self.checkpoints.begin(self.number, ends=True)
        self.checkpoints.conclude()

    def load(self) -> None:
        assert self.checkpoints.resume().path

    def dcp_save(self) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.save(
            self.dcp_states(),
            storage_writer=dcp.FileSystemWriter(f"{self.folder}/dcp", sync_files=True),
        )

    def dcp_load(self) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.load(self.dcp_states(), storage_reader=dcp.FileSystemReader(f"{self.folder}/dcp"))

    def dcp_states(self) -> dict[str, Any]:
        return {f"{self.world.rank}.{number}": tensor for number, tensor in enumerate(self.states)}


if __name__ == "__main__":
    sys.exit(main())
