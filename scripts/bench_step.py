#!/usr/bin/env python3
"""Throughput and memory of one training step: ours at every ZeRO stage beside PyTorch DDP, FSDP2
and DeepSpeed, and the floor.

    mpirun -n 2 python scripts/bench_step.py --micro-batch 1 --json result.json --plot result.svg

The floor is the same forward and backward in as many processes at once, without communication or
optimizer: nobody can be faster, and where the memory is slow nobody can be as fast (floor-memory).
All contenders run in the same processes, with one thread each and the same malloc settings. In
every round each contender is built, takes `--warmup` steps (whose losses must follow the others'),
`--steps` timed ones, and is freed; every other round goes backwards, so that a machine that becomes
slower does not favour anyone. A step takes as long as its slowest rank. Ratios are taken within a
round, and their median and range are given.
"""

import argparse
import fnmatch
import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpczero import safe_files
from hpczero.train.malloc import give_back_free_memory, keep_free_memory


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--contenders",
        default="*",
        help="names or patterns, separated by commas; the floor always takes part",
    )
    parser.add_argument("--list", action="store_true", help="show the contenders and leave")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each contender is built and timed"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=4,
        help="steps before the timed ones; their losses are compared",
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a round")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a rank in a step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument(
        "--ranks-per-node", type=int, default=0, help="so many ranks count as a node; 0: as it is"
    )
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="where the peers' processes meet: an address of rank 0's host",
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="file for a plot (SVG)")
    arguments = parser.parse_args()
    for name, least in (("rounds", 1), ("steps", 1), ("warmup", 2), ("micro_batch", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')}: at least {least}")
    return arguments


class Memory:
    """This process's share of the node's memory. What a window holds is counted once per node:
    by PSS, each of n ranks has 1/n of it.
    """

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        self._before = self._held()

    def growth(self) -> int:
        """Since `begin`, without what malloc keeps for later: the states, not the activations."""
        return self._held() - self._before

    def growth_at_most(self) -> int:
        """With it: malloc gives nothing back by itself here, so this is what was needed at the
        worst moment since `growth`.
        """
        return pss() - self._before

    def _held(self) -> int:
        gc.collect()
        give_back_free_memory()
        return pss()


def pss() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line Pss")


def main() -> int:
    arguments = options()
    malloc = keep_free_memory()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from hpczero.comm.world import World

    torch.set_num_threads(1)
    from bench_contenders import entries

    entrants = entries()
    if arguments.list:
        print(
            "\n".join(
                f"{name:16} {entry.missing and 'skipped: ' + entry.missing}".rstrip()
                for name, entry in entrants.items()
            )
        )
        return 0
    patterns = arguments.contenders.split(",")
    unknown = [pattern for pattern in patterns if not fnmatch.filter(entrants, pattern)]
    if unknown:
        print(
            f"bench_step.py: no contender {', '.join(unknown)}; there are {', '.join(entrants)}",
            file=sys.stderr,
        )
        return 2
    chosen = ["floor"] + [
        name
        for name in entrants
        if name != "floor" and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    with World.start(arguments.ranks_per_node) as world:
        bench = Bench(arguments, world, Memory())
        skipped = {name: entrants[name].missing for name in chosen if entrants[name].missing}
        running = {name: entrants[name] for name in chosen if name not in skipped}
        bench.run(running, skipped)
        return conclude(bench, skipped, malloc) if world.rank == 0 else 0


class Bench:
    """Runs the contenders, and keeps on rank 0 what they did: contender -> figures of each
    round.
    """

    def __init__(self, arguments: argparse.Namespace, world: Any, memory: Memory) -> None:
        self.arguments, self.world, self.memory = arguments, world, memory
        self.job = job_of(arguments, world)
        self.figures: dict[str, list[dict[str, Any]]] = {}

    def run(self, entrants: dict[str, Any], skipped: dict[str, str]) -> None:
        """Those that these ranks cannot carry (InputError, on all of them) are moved to
        `skipped`.
        """
        from hpczero.errors import InputError

        if any(entry.peer for entry in entrants.values()):
            start_gloo(self.world, self.arguments.address)
        for number in range(self.arguments.rounds):
            for name in list(entrants)[:: -1 if number % 2 else 1]:
                self._say(f"round {number + 1} of {self.arguments.rounds}: {name}")
                try:
                    figures = self._block(entrants[name])
                except InputError as error:
                    del entrants[name]
                    skipped[name] = str(error)
                else:
                    self.figures.setdefault(name, []).append(figures)

    def _block(self, entry: Any) -> dict[str, Any]:
        from bench_contenders import built

        self.memory.begin()
        self.world.everyone.barrier()
        with built(entry, self.job) as contender:
            losses = [contender.step()]
            self.world.everyone.barrier()
            states = self.memory.growth()
            losses += [
                contender.step() for _ in range(self.arguments.warmup - 1)
            ]  # these also fault in what the measurement gave back
            self.world.everyone.barrier()
            at_most = self.memory.growth_at_most()
            self.world.everyone.barrier()
            timed = [self._time(contender) for _ in range(self.arguments.steps)]
        return {
            "seconds": self._over_ranks([seconds for seconds, _ in timed], max),
            "cpu_seconds": self._over_ranks([cpu for _, cpu in timed], mean),
            "losses": self._over_ranks(losses, mean),
            "states_bytes": self._per_node(states),
            "peak_bytes": self._per_node(at_most),
        }

    def _time(self, contender: Any) -> tuple[float, float]:
        self.world.everyone.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        contender.step()
        return time.perf_counter() - began, time.process_time() - cpu

    def _over_ranks(self, values: list[float], combine: Any) -> list[float]:
        """Place by place; on rank 0."""
        return [
            combine(of_ranks)
            for of_ranks in zip(*(self.world.gather_objects(values) or []), strict=True)
        ]

    def _per_node(self, value: int) -> int:
        """The sum over a node's ranks, on the node with most; on rank 0."""
        sums: dict[int, int] = {}
        for node, of_rank in zip(
            self.world.node_of_rank,
            self.world.gather_objects(value) or [0] * self.world.size,
            strict=True,
        ):
            sums[node] = sums.get(node, 0) + of_rank
        return max(sums.values())

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, file=sys.stderr, flush=True)


def job_of(arguments: argparse.Namespace, world: Any) -> Any:
    """The model, and each rank's own batch of random tokens: the same one in every step, so that
    the loss falls.
    """
    import torch
    from bench_contenders import Job

    from hpczero.model.batch import MicroBatch
    from hpczero.spec.schema import Model, Optimizer, Spec, Train

    model = Model(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        vocab=arguments.vocab,
        seq_len=arguments.seq_len,
    )
    size = arguments.micro_batch
    train = Train(precision="bf16", micro_batch=size, global_batch=size * world.size, grad_clip=1.0)
    spec = Spec(model=model, train=train, optimizer=Optimizer(lr=1e-4))
    random = torch.Generator().manual_seed(world.rank)
    text = torch.randint(model.vocab, (size, model.seq_len + 1), generator=random)
    samples = torch.arange(size) + size * world.rank
    return Job(
        spec,
        world,
        MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), samples, 0, spec.seed),
    )


def start_gloo(world: Any, address: str) -> None:
    from torch import distributed

    port = 0
    if world.rank == 0:
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
    port = world.broadcast_object(port)
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": world.rank,
        "LOCAL_RANK": world.local_rank,
        "WORLD_SIZE": world.size,
    }
    os.environ.update(
        {name: str(value) for name, value in variables.items()}
    )  # DeepSpeed looks at them
    distributed.init_process_group("gloo")


def mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def conclude(bench: Bench, skipped: dict[str, str], malloc: dict[str, int]) -> int:
    """Table, files, and whether all have trained the same."""
    from bench_report import Row, bars, differing, rows, table

    found: list[Row] = rows(bench.figures)
    arguments = bench.arguments
    print(table(found))
    print("\n".join(["", *(f"skipped {name}: {reason}" for name, reason in skipped.items())]))
    if arguments.json:
        settings = {
            key: value for key, value in vars(arguments).items() if isinstance(value, int | str)
        }
        whole = {
            "settings": settings | {"ranks": bench.world.size, "malloc": malloc},
            "figures": bench.figures,
            "skipped": skipped,
        }
        safe_files.write_text(arguments.json, json.dumps(whole, indent=1) + "\n")
    if arguments.plot:
        title = (
            f"{bench.world.size} ranks, micro-batch {arguments.micro_batch}: one step's time "
            f"over that of forward and backward alone"
        )
        safe_files.write_text(
            arguments.plot, bars(title, [(row.name, median(row.to_floor)) for row in found])
        )
    wrong = differing(found)
    for text in wrong:
        print(f"bench_step.py: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
