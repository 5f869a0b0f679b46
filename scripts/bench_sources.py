#!/usr/bin/env python3
"""Tokens of Megatron-LM read where they lie, beside the same tokens in a token file of hpczero.

    python scripts/bench_sources.py

Both hold the text of Python's own library, byte by byte; the pair is written in Megatron-LM's
layout, with the token file's documents. In a round the same windows are read in a scattered order,
then as many steps of a small GPT are taken: ours, the pair, ours again, the pair again, which show
the noise. Times are processor times of this one thread.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

import numpy as np  # noqa: E402
from one_batch import Job  # noqa: E402
from turns import ratio, take_turns  # noqa: E402

from hpczero.comm.world import World  # noqa: E402
from hpczero.data.dataset import library_token_file, open_source  # noqa: E402
from hpczero.data.token_file import open_token_file  # noqa: E402
from hpczero.data.token_source import TokenSource  # noqa: E402
from hpczero.spec.load import from_dict  # noqa: E402
from hpczero.spec.schema import Spec  # noqa: E402
from hpczero.train import setup  # noqa: E402
from hpczero.train.batches import Batches  # noqa: E402
from tests.support.plain_tokens import write_megatron  # noqa: E402

MODEL = {"layers": 2, "hidden": 128, "heads": 4, "seq_len": 256}
TRAIN = {"global_batch": 8, "precision": "fp32", "eval_batches": 0}


def spec_of(path: Path) -> Spec:
    data = {"source": str(path), "validation_fraction": 0.01}
    return from_dict({"model": MODEL | {"vocab": 257}, "data": data, "train": TRAIN}).spec


def library_as_pair(ours: Path, folder: Path) -> Path:
    """Write the documents of a token file that are trained on as Megatron-LM's pair."""
    split = open_token_file(ours).splits["train"]
    documents = np.split(np.asarray(split.tokens), np.asarray(split.ends)[1:-1])
    return write_megatron(folder / "library", documents)


def read(source: TokenSource, windows: Sequence[int], out: np.ndarray) -> None:
    for window in windows:
        source.fill("train", window, out)


def train(job: Job, batches: Batches, steps: int) -> None:
    for number in range(steps):
        (job.batch,) = batches.training(number)
        job.step()


def compare(title: str, calls: dict[str, Callable[[], object]], rounds: int, each: int) -> None:
    """Print times of the calls, each of `each` windows or steps, beside those of the first."""
    seconds = take_turns(calls, rounds, threads=1)
    first = next(iter(calls))
    for name, times in seconds.items():
        microseconds = 1e6 * median(times) / each
        print(
            f"{title:8}{name:22}{microseconds:12,.1f} us   / {first} {ratio(times, seconds[first])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--windows", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    world = World.start()
    setup.use_kernels(world)
    with tempfile.TemporaryDirectory() as folder:
        ours = library_token_file(spec_of(Path("stdlib")))
        paths = {"token file": ours, "Megatron-LM's pair": library_as_pair(ours, Path(folder))}
        specs = {name: spec_of(path) for name, path in paths.items()}
        sources = {name: open_source(spec, lambda value: value) for name, spec in specs.items()}
        fewest = min(source.windows("train") for source in sources.values())
        windows = np.random.default_rng(1).integers(0, fewest, options.windows).tolist()
        out = np.empty(MODEL["seq_len"] + 1, np.int64)
        job = Job(world, {"model": MODEL, "train": TRAIN})
        reads, trains = dict[str, Callable[[], object]](), dict[str, Callable[[], object]]()
        for again in ("", ", again"):
            for name, source in sources.items():
                reads[name + again] = partial(read, source, windows, out)
                batches = Batches(specs[name], source, 0, 1)
                trains[name + again] = partial(train, job, batches, options.steps)
        compare("window", reads, options.rounds, options.windows)
        compare("step", trains, options.rounds, options.steps)


if __name__ == "__main__":
    main()
