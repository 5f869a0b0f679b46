#!/usr/bin/env python3
"""Does a model of masked tokens learn? Its loss beside the entropy of the masked tokens.

    python scripts/bench_masked.py [--family t5] [--steps 1500]

A small BERT, or T5, is trained on the standard library's text. The entropy is that of the masked
tokens of its own evaluation, counted here: a model that knows their frequencies and nothing else
has it for a loss. The loss is that of the same tokens, computed here from the checkpoint: T5's
sentinels, which its validation loss counts, too, are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

from hpczero import safe_files  # noqa: E402
from hpczero.checkpoint.load import Checkpoint  # noqa: E402
from hpczero.data.dataset import open_source  # noqa: E402
from hpczero.model import build  # noqa: E402
from hpczero.spec.load import load  # noqa: E402
from hpczero.spec.schema import Model, Spec  # noqa: E402
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
lr = 2e-3
[schedule]
name = "linear"
warmup_steps = {warmup}
[checkpoint]
every = 0 # at the end
"""
_MODELS = {
    "bert": 'family = "bert"\nseq_len = 128\nvocab = 260',
    "t5": 'family = "t5"\nseq_len = 142\nvocab = 359\ntied_embeddings = false',
}
_GOAL = 0.85  # of the entropy
_TEXT = 257  # ids of text are below


def evaluated(spec: Spec, run: Path) -> tuple[float, float, int]:
    """Return the entropy of the evaluation's masked tokens, their mean loss, and their number."""
    batches = Batches(spec, open_source(spec, lambda value: value), 0, 1)
    module, seen = module_of(spec.model, run), list[torch.Tensor]()
    module.head.loss.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    counts, loss = np.zeros(_TEXT, np.int64), 0.0
    for number in range(batches.evaluation_batches()):
        for batch in batches.evaluation(number):
            with torch.inference_mode():
                module(batch)
            is_masked = batch.targets < _TEXT
            if batch.weights is not None:
                is_masked &= batch.weights > 0
            targets, logits = batch.targets[is_masked], seen.pop()[is_masked]
            loss += functional.cross_entropy(logits, targets, reduction="sum").item()
            counts += np.bincount(targets.numpy(), minlength=_TEXT)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()), loss / counts.sum(), int(counts.sum())


def module_of(model: Model, run: Path) -> Any:
    """Return the model with the weights of the run's only checkpoint."""
    (path,) = (run / "checkpoints").glob("step-*")
    module = build.on_meta(model)
    with Checkpoint.open(path) as checkpoint:
        names = [tensor.name for tensor in checkpoint.table.tensors]
        weights = {name: checkpoint[f"/model/{name}"].torch() for name in names}
    build.install_parameters(module, {n: torch.nn.Parameter(one) for n, one in weights.items()})
    return module.eval()


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
        spec = load(str(path), [f"output={folder}"]).spec
        entropy, loss, count = evaluated(spec, Path(folder) / "masked")
    for line in found:
        print(f"step {line['step']:5}: validation loss {line['validation_loss']:.4f}")
    print(f"entropy of {count:,} masked tokens: {entropy:.4f}; goal {_GOAL * entropy:.4f}")
    print(f"loss of these at the end: {loss:.4f}")
    print(f"{'reached' if loss <= _GOAL * entropy else 'missed'}: {loss / entropy:.3f}")


if __name__ == "__main__":
    main()
