#!/usr/bin/env python3
"""Does a model of masked tokens learn? Its loss beside the entropy of the masked tokens.

    python scripts/bench_masked.py [--steps 1500]

A small BERT is trained on the standard library's text, on one core. The entropy is that of the
masked tokens of its own evaluation, counted here: a model that knows their frequencies and nothing
else has it for a loss.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

from hpczero import safe_files  # noqa: E402
from hpczero.data.dataset import open_source  # noqa: E402
from hpczero.spec.load import load  # noqa: E402
from hpczero.spec.schema import Spec  # noqa: E402
from hpczero.train.batches import Batches  # noqa: E402

_SPEC = """
name = "masked"
[model]
family = "bert"
layers = 4
hidden = 128
heads = 4
seq_len = 128
vocab = 260
[train]
steps = {steps}
global_batch = 32
micro_batch = 32
precision = "fp32"
eval_every = {every}
eval_batches = 64
[optimizer]
lr = 2e-3
[schedule]
name = "linear"
warmup_steps = {warmup}
[checkpoint]
every = -1
"""
_GOAL = 0.85  # of the entropy


def entropy_of_targets(spec: Spec) -> tuple[float, int]:
    """Return the entropy of the masked tokens of the evaluation, and their number."""
    batches = Batches(spec, open_source(spec, lambda value: value), 0, 1)
    counts = np.zeros(spec.model.vocab, np.int64)
    for number in range(batches.evaluation_batches()):
        for batch in batches.evaluation(number):
            assert batch.weights is not None
            counts += np.bincount(
                batch.targets[batch.weights > 0].numpy(), minlength=spec.model.vocab
            )
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()), int(counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.toml"
        content = _SPEC.format(steps=steps, every=max(1, steps // 10), warmup=max(1, steps // 10))
        safe_files.write_text(path, content)
        command = [sys.executable, "-m", "hpczero", "run", str(path), "--set", f"output={folder}"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path[:2]),
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "masked" / "metrics.jsonl").read_text().splitlines()
        found = [line for line in map(json.loads, lines) if "validation_loss" in line]
        entropy, count = entropy_of_targets(load(str(path), [f"output={folder}"]).spec)
    print(f"entropy of {count:,} masked tokens: {entropy:.4f}; goal {_GOAL * entropy:.4f}")
    for line in found:
        ratio = line["validation_loss"] / entropy
        print(f"step {line['step']:5}: loss {line['validation_loss']:.4f}, {ratio:.3f} of it")
    loss = found[-1]["validation_loss"]
    print(f"{'reached' if loss <= _GOAL * entropy else 'missed'}: {loss / entropy:.3f}")


if __name__ == "__main__":
    main()
