#!/usr/bin/env python3
"""Memory over steps whose sequences have many lengths: does it stay as it is?

    OMP_NUM_THREADS=1 python scripts/bench_lengths.py
    LD_PRELOAD=libtcmalloc_minimal.so.4 OMP_NUM_THREADS=1 python scripts/bench_lengths.py
    mpirun -n 2 python scripts/bench_lengths.py --memory recompute=block partition_activations=true

Each pass has a step of every length, in an order of its own. Said is, for rank 0 and after each
step, what malloc has given out and what the process holds (PSS), and the most that it held within
the step: the largest of the second pass, of all later ones, of the last one, and by how much they
differ.
"""

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from one_batch import Job

from hpczero.train import malloc, process

LENGTHS = (512, 31, 448, 63, 256, 384, 127, 200)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=304)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--memory", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--trim", type=int, default=0, help="every so many steps, as a run does")
    return parser.parse_args()


def spec_of(arguments: argparse.Namespace, ranks: int) -> dict[str, object]:
    samples = arguments.samples * ranks // arguments.tensor
    values = (word.split("=") for word in arguments.memory)
    return {
        "model": {
            "layers": arguments.layers,
            "hidden": arguments.hidden,
            "heads": 4,
            "seq_len": max(LENGTHS),
        },
        "train": {
            "precision": "bf16",
            "global_batch": samples,
            "micro_batch": arguments.samples,
        },
        "zero": {"stage": arguments.stage},
        "parallel": {"tensor": arguments.tensor},
        "memory": {key: value == "true" if value in ("true", "false") else value
                   for key, value in values},
    }  # fmt: skip


def main() -> int:
    arguments = options()
    malloc.keep_free_memory()
    import torch

    from hpczero.comm.world import World
    from hpczero.train import setup

    world = World.start()
    torch.set_num_threads(1)
    setup.use_kernels(world)
    job = Job(world, spec_of(arguments, world.size))
    whole = job.batch
    found: dict[str, list[int]] = {"given out": [], "held": [], "most in the step": []}
    shuffled = random.Random(1)
    for number in range(arguments.steps // len(LENGTHS)):
        for place, length in enumerate(shuffled.sample(LENGTHS, len(LENGTHS))):
            cut = whole.tokens[:, :length], whole.targets[:, :length]
            job.batch = replace(whole, tokens=cut[0], targets=cut[1])
            step = number * len(LENGTHS) + place
            if arguments.trim and step % arguments.trim == 0:
                malloc.give_back_free_memory()
            process.forget_peak()
            job.step()
            job.engine.wait_for_weights()
            found["given out"].append(malloc.given_out() or 0)
            found["held"].append(process.held())
            found["most in the step"].append(process.peak_resident())
    if world.rank == 0:
        print(f"{arguments.steps} steps of {len(LENGTHS)} lengths, {world.size} ranks; MB")
        for name, sizes in found.items():
            passes = [
                max(sizes[first : first + len(LENGTHS)]) / 1e6
                for first in range(len(LENGTHS), len(sizes), len(LENGTHS))
            ]
            spread = max(passes) / max(1e-6, min(passes))
            print(
                f"  {name:18}{passes[0]:10.1f} second pass{max(passes):10.1f} at most"
                f"{passes[-1]:10.1f} last pass, most / least {spread:.3f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
