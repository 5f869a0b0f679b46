#!/usr/bin/env python3
"""Does a model of masked tokens learn? Its loss beside the entropy of the masked tokens.

    python scripts/bench_masked.py [--family t5] [--steps 1500]

A small BERT, or T5, is trained on the standard library's text by Muon. The entropy is that of the
masked tokens of its own evaluation, counted here: a model that knows their frequencies and nothing
else has it for a loss. T5's loss is that of its sentinels, too: all of it is booked on the masked
tokens.
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
layers = 4
hidden = 128
heads = 4
norm_eps = 1e-6
{model}
[train]
steps = {steps}
global_batch = 32
micro_batch = 32
precision = "fp32"
eval_every = {every}
eval_batches = 32
[optimizer]
name = "muon"
lr = 5e-3
[schedule]
name = "linear"
warmup_steps = {warmup}
[checkpoint]
every = -1
"""
_MODELS = {
    "bert": 'family = "bert"\nseq_len = 128\nvocab = 260',
    "t5": 'family = "t5"\nseq_len = 142\nvocab = 359\ntied_embeddings = false',
}
_GOAL = 0.85  # of the entropy
_TEXT = 257  # ids of text are below


def entropy_of_masked(spec: Spec) -> tuple[float, int, int]:
    """Return the entropy of the evaluation's masked tokens, their number, and that of targets."""
    batches = Batches(spec, open_source(spec, lambda value: value), 0, 1)
    counts = np.zeros(spec.model.vocab, np.int64)
    for number in range(batches.evaluation_batches()):
        for batch in batches.evaluation(number):
            used = batch.targets if batch.weights is None else batch.targets[batch.weights > 0]
            counts += np.bincount(used.flatten().numpy(), minlength=spec.model.vocab)
    masked = counts[:_TEXT]
    shares = masked[masked > 0] / masked.sum()
    return float(-(shares * np.log(shares)).sum()), int(masked.sum()), int(counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=[*_MODELS], default="bert")
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    steps, model = options.steps, _MODELS[options.family]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.toml"
        tenth = max(1, steps // 10)
        content = _SPEC.format(model=model, steps=steps, every=tenth, warmup=tenth)
        safe_files.write_text(path, content)
        command = [sys.executable, "-m", "hpczero", "run", str(path), "--set", f"output={folder}"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path[:2]),
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "masked" / "metrics.jsonl").read_text().splitlines()
        found = [line for line in map(json.loads, lines) if "validation_loss" in line]
        entropy, masked, targets = entropy_of_masked(load(str(path), [f"output={folder}"]).spec)
    print(f"entropy of {masked:,} masked tokens: {entropy:.4f}; goal {_GOAL * entropy:.4f}")
    losses = [line["validation_loss"] * targets / masked for line in found]
    for line, loss in zip(found, losses, strict=True):
        print(f"step {line['step']:5}: loss {loss:.4f}, {loss / entropy:.3f} of it")
    loss = losses[-1]
    print(f"{'reached' if loss <= _GOAL * entropy else 'missed'}: {loss / entropy:.3f}")


if __name__ == "__main__":
    main()
