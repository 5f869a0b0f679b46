#!/usr/bin/env python3
"""Time of a step over a slow link: plain, by 1-bit Adam, by local steps, and with no network.

    python scripts/bench_slow_network.py

Two network namespaces are hosts with one rank each (scripts/netns_testbed.sh; needs root and
MPICH). A first run measures a rank's computation alone; the link's rate then makes the messages of
plain stage 1 take `--times` as long. In each round every way takes its turn in the same process
group; every other round goes backwards:

    alone        a world of one rank: no network at all
    plain        zero.stage = 1 over both ranks: gradients and weights in the model's precision
    warm-up      1-bit Adam before the second moment is frozen: gradients summed between replicas
    signs        1-bit Adam after that
    local steps  a whole round of outer.every steps, and their outer step

`compute` is a step alone. Ratios are of medians.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda"), str(ROOT / "scripts")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

RESULT = "measured:"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=31744)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--precision", default="int4", help="of the outer step")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--times", type=float, default=8.0)
    parser.add_argument("--inside", choices=("computation", "all"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = options()
    if arguments.inside:
        return inside(arguments)
    found = on_hosts("10gbit", "computation")
    compute, size = found["compute"], found["bytes"]
    kilobits = max(1000, round(8 * size / (arguments.times * compute) / 1000))
    print(
        f"a step alone takes {compute:.2f} s; plain stage 1 sends {size / 1e6:.0f} MB a rank: "
        f"{kilobits / 1000:.0f} Mbit/s",
        flush=True,
    )
    on_hosts(f"{kilobits}kbit", "all")
    return 0


def on_hosts(rate: str, what: str) -> dict[str, float]:
    """Run this script on two hosts; return what rank 0 says that it measured."""
    testbed = str(ROOT / "scripts" / "netns_testbed.sh")
    own = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside", what]
    place = ["run", "--hosts", "2", "--ranks-per-host", "1", "--rate", rate, "--name", "slow"]
    command = ["bash", testbed, *place, *own]
    found: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith(RESULT):
                name, value = line.removeprefix(RESULT).split()
                found[name] = float(value)
            else:
                print(line, end="", flush=True)
    if process.returncode:
        sys.exit(process.returncode)
    return found


# -- on the hosts -----------------------------------------------------------------------------


class Way:
    """An engine that takes steps of one batch."""

    def __init__(self, world: Any, spec: Any) -> None:
        from hpczero.comm.grid import Grid
        from hpczero.data.dataset import SyntheticSource
        from hpczero.parallel.parallelize import assemble
        from hpczero.train.batches import Batches

        grid = Grid.build(spec.parallel, world.node_of_rank)
        source = SyntheticSource(spec.seed, spec.model.vocab, spec.model.seq_len)
        batches = Batches(spec, source, grid.coordinate(world.rank, "data"), grid.size("data"))
        self.runner = assemble(spec, world, grid, accumulates=False)
        self.engine = self.runner.engine
        self._batches = batches.training(0)
        self._tokens = spec.train.global_batch * spec.model.seq_len
        self._trace = world.trace

    def step(self) -> None:
        self.runner.train(self._batches, self._tokens, self._trace)()
        self.engine.finish_step(1e-5)

    def steps(self, count: int) -> float:
        """Take steps; return the seconds of one, with its messages."""
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        self.engine.wait_for_weights()
        return (time.perf_counter() - begun) / count


def spec_of(arguments: argparse.Namespace, ranks: int, **optimizer: Any) -> Any:
    from hpczero.spec.schema import Model, Optimizer, Spec, Train, Zero

    shape = {name: getattr(arguments, name) for name in ("layers", "hidden", "vocab", "seq_len")}
    return Spec(
        model=Model(**shape, heads=max(1, arguments.hidden // 64)),
        train=Train(global_batch=ranks, micro_batch=1, precision="bf16", device="cpu"),
        optimizer=Optimizer(**optimizer),
        zero=Zero(stage=1, shard_ranks="node" if optimizer else "all"),
    )


def sent(world: Any, way: Way, steps: int = 1) -> float:
    """Return the bytes that a rank sends in a step."""
    from hpczero.comm.trace import Ledger

    def total(ledger: Ledger) -> float:
        of_axes = ledger.as_dict()
        return sum(
            operation["inside"] + operation["between"]
            for axis, operations in of_axes.items()
            if axis != "world"
            for operation in operations.values()
        )

    before = total(world.ledger)
    way.steps(steps)
    return (total(world.ledger) - before) / steps


def inside(arguments: argparse.Namespace) -> int:
    import torch

    from hpczero.comm.world import World
    from hpczero.train.malloc import keep_free_memory

    keep_free_memory()
    torch.set_num_threads(1)
    with World.start() as world:
        own = world.part([world.rank])
        alone = Way(own, spec_of(arguments, 1))
        plain = Way(world, spec_of(arguments, 2))
        if arguments.inside == "computation":
            computation(world, alone, plain)
        else:
            compare(arguments, world, alone, plain)
        own.close()
    return 0


def computation(world: Any, alone: Way, plain: Way) -> None:
    size = sent(world, plain)
    alone.steps(1)
    world.everyone.barrier()
    seconds = slowest(world, median(alone.steps(4) for _ in range(5)))
    if world.rank == 0:
        print(RESULT, "compute", seconds)
        print(RESULT, "bytes", size, flush=True)


def slowest(world: Any, seconds: float) -> float:
    found: float = world.broadcast_object(max(world.gather_objects(seconds) or [0.0]))
    return found


def compare(arguments: argparse.Namespace, world: Any, alone: Way, plain: Way) -> None:
    one_bit = Way(world, spec_of(arguments, 2, name="one_bit_adam", freeze=1 << 40))
    outer = {"every": arguments.every, "precision": arguments.precision}
    local = Way(world, spec_of(arguments, 2, outer={**outer, "fragments": arguments.fragments}))

    def signs(count: int) -> float:
        (update := one_bit.engine.update).frozen = one_bit.engine.updates
        seconds = one_bit.steps(count)
        update.frozen = 0
        return seconds

    turns: dict[str, Callable[[], float]] = {
        "alone": lambda: alone.steps(4),
        "alone again": lambda: alone.steps(4),
        "plain": lambda: plain.steps(2),
        "plain again": lambda: plain.steps(2),
        "warm-up": lambda: one_bit.steps(2),
        "signs": lambda: signs(4),
        "local steps": lambda: local.steps(arguments.every),
    }
    one_bit.steps(1)
    for turn in list(turns.values())[:-1]:
        turn()
    local.steps(arguments.every - local.engine.updates % arguments.every)
    rounds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(arguments.rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            world.everyone.barrier()
            rounds[name].append(slowest(world, turns[name]()))
        if world.rank == 0:
            line = ", ".join(f"{name} {seconds[-1]:.3f}" for name, seconds in rounds.items())
            print(f"round {number + 1}: {line}", flush=True)
    report(arguments, world, rounds)
    exposed = waited(world, local, arguments.every)
    bytes_of = {"plain": sent(world, plain, 2), "local steps": sent(world, local, arguments.every)}
    before = world.ledger.as_dict()["replica"]
    signs(1)
    after = world.ledger.as_dict()["replica"]
    bytes_of["signs"] = sum(
        after[name]["between"]
        + after[name]["inside"]
        - (before[name]["between"] + before[name]["inside"] if name in before else 0)
        for name in after
    )
    if world.rank == 0:
        print(f"local steps: waits of a round {exposed:.2%} of it, by trace")
        for name, size in bytes_of.items():
            print(f"{name}: {size / 1e6:,.2f} MB a step, 1 / {bytes_of['plain'] / size:.1f}")


def report(arguments: argparse.Namespace, world: Any, rounds: dict[str, list[float]]) -> None:
    if world.rank:
        return
    middle = {name: median(seconds) for name, seconds in rounds.items()}
    print(f"{arguments.rounds} rounds, seconds of a step: median (quartiles)")
    for name, seconds in rounds.items():
        low, _, high = quantiles(seconds, n=4)
        print(f"  {name:<12} {middle[name]:.3f} ({low:.3f} to {high:.3f})")
    messages = middle["plain"] - middle["alone"]
    print(f"plain communication: {messages / middle['alone']:.1f} x compute, beside it")
    speedup = middle["plain"] / middle["signs"]
    warm = middle["warm-up"]
    whole = middle["plain"] / (0.15 * warm + 0.85 * middle["signs"])
    print(f"1-bit Adam: {speedup:.2f} x plain after warm-up, {whole:.2f} x with 15 % of warm-up")
    print(f"local steps: {middle['local steps'] / middle['alone']:.3f} x no network at all")
    for name in ("plain", "alone"):
        pairs = zip(rounds[name], rounds[f"{name} again"], strict=True)
        low, ratio, high = quantiles([second / first for first, second in pairs], n=4)
        print(f"A/A {name}: {ratio:.3f} ({low:.3f} to {high:.3f})")


def waited(world: Any, way: Way, steps: int) -> float:
    """Return the share of a round in which the rank waits for other ranks, by a trace of it."""
    from hpczero.comm.trace import Recording, Trace, events
    from hpczero.train.trace_file import exclusive_seconds, of_step

    recording = Recording()
    world.record(recording)
    way._trace = world.trace
    for number in range(1, steps + 1):
        with world.trace.step(number):
            way.step()
    way.engine.wait_for_weights()
    world.record(Trace())
    way._trace = world.trace
    waits = total = 0.0
    happened = [event for step in recording.steps for event in events(step.rows, recording.whats)]
    for number in range(1, steps + 1):
        seconds = exclusive_seconds(of_step(happened, number))
        total += sum(seconds.values())
        waits += sum(value for name, value in seconds.items() if name.startswith("wait"))
    return slowest(world, waits / total)


if __name__ == "__main__":
    sys.exit(main())
