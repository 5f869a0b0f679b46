#!/usr/bin/env python3
"""The longest sequence that trains in so much memory: attention in blocks, flash, and neither.

    python scripts/bench_longest.py --gib 8

A try is a process that takes a step of one short sequence, which makes the optimizer's states and
costs no time, then one of the whole sequence, and says the most memory that it held; it ends as
soon as it holds more than the limit. Freed memory goes back to the system at once, as in a run
where memory is short (what malloc keeps otherwise lies in pieces, half as much again). Lengths are
doubled, then halved in between, until the longest that fits and the shortest that does not are
within a sixteenth of each other. Time of flash attention grows with the square of the length, so
that it is only tried at the first length at which blocks do not fit.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

from hpczero.train import malloc, process  # noqa: E402

_PLAIN = "dense without flash"
_BLOCKS = {"kind": "longformer", "block": 64, "window": 10, "global": 1}
_WAYS = {
    "blocks": {"attention": _BLOCKS},
    "flash": {},
    _PLAIN: {"kernels": "torch"},
}
_TOO_MUCH = 9  # exit code
_SHORT = 512  # tokens of a try's first step
_FINE = 16  # a try is at most a part of the longest that fits away from it


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--first", type=int, default=1024, help="length of the first try")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)  # a way and a length
    return parser.parse_args()


def inside(arguments: argparse.Namespace, way: str, length: int) -> None:
    """Take a short step and a whole one, and print the most memory that they held."""
    limit = arguments.gib * 2**30
    malloc.keep_no_free_memory()

    def watch() -> None:
        while process.peak_resident() <= limit:
            time.sleep(0.02)
        os._exit(_TOO_MUCH)

    threading.Thread(target=watch, daemon=True).start()
    from one_batch import Job
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from hpczero.comm.world import World
    from hpczero.train import setup

    model = {"layers": arguments.layers, "hidden": arguments.hidden, "heads": arguments.heads}
    world = World.start()
    setup.use_kernels(world)
    job = Job(
        world,
        {
            "model": model | {"seq_len": length} | _WAYS[way],
            "train": {"precision": arguments.precision, "global_batch": 1, "micro_batch": 1},
            "memory": {"recompute": "block", "loss_chunk": "auto"},
        },
    )
    with sdpa_kernel(SDPBackend.MATH) if way == _PLAIN else nullcontext():
        try:
            whole = job.batch
            for tokens in (_SHORT, length):
                first = {"tokens": whole.tokens[:, :tokens], "targets": whole.targets[:, :tokens]}
                job.batch = replace(whole, **first)
                job.step()
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            os._exit(_TOO_MUCH)  # more at once than the machine has
    print(json.dumps(process.peak_resident()), flush=True)


def most_held(way: str, length: int) -> int | None:
    """Return the most bytes that steps of this length held; None: more than there are."""
    begun = time.monotonic()
    command = [sys.executable, *sys.argv, "--inside", way, str(length)]
    tried = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if tried.returncode not in (0, _TOO_MUCH):
        sys.exit(f"bench_longest.py: {way}, {length} tokens: exit code {tried.returncode}")
    held = None if tried.returncode else int(json.loads(tried.stdout.splitlines()[-1]))
    said = "too much" if held is None else f"{held / 2**30:.2f} GiB"
    print(f"{way:20}{length:>9,} {said:>10} {time.monotonic() - begun:6.0f} s", flush=True)
    return held


def longest(way: str, first: int) -> tuple[int, int]:
    """Return the longest length that fits, and the shortest of those tried that does not."""
    fits, length = 0, first
    while most_held(way, length) is not None:
        fits, length = length, 2 * length
    fails = length
    while fails - fits > max(1, fits // _FINE):
        length = (fits + fails) // 2
        if most_held(way, length) is None:
            fails = length
        else:
            fits = length
    return fits, fails


def main() -> int:
    arguments = options()
    if arguments.inside:
        way, length = arguments.inside
        inside(arguments, way, int(length))
        return 0
    blocks, behind = longest("blocks", arguments.first)
    dense, _ = longest(_PLAIN, arguments.first)
    print(f"blocks: {blocks:,} tokens, {blocks / dense:.1f} times as many as dense without flash")
    if most_held("flash", behind) is None:
        print(f"flash: fewer than {behind:,}")
    else:
        print(f"flash: {behind:,} or more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
