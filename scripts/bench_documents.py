#!/usr/bin/env python3
"""Cost of keeping documents apart: forward and backward with and without masks.

    python scripts/bench_documents.py                  4,096 tokens of 10 documents, fp32 and bf16

A round runs "packed" (attention over all of the sequence), "masked" (inside of documents), and
"packed" again, which shows the noise; medians of processor and wall seconds, and of the ratios
within a round.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from hpczero.data.documents import Cut  # noqa: E402
from hpczero.model import build  # noqa: E402
from hpczero.model.batch import MicroBatch  # noqa: E402
from hpczero.spec.model import Model  # noqa: E402
from hpczero.train.batches import with_documents  # noqa: E402

VOCAB = 1024


def module_of(family: str, seq_len: int, dtype: torch.dtype) -> nn.Module:
    keys = {"kv_heads": 2} if family == "llama" else {}
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "vocab": VOCAB, "seq_len": seq_len}
    model = Model(family=family, **sizes, **keys)
    module: nn.Module = build.on_meta(model).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02, generator=generator)
    return module.to(dtype)


def batches(seq_len: int, documents: int) -> dict[str, MicroBatch]:
    text = torch.randint(0, VOCAB, (1, seq_len + 1), generator=torch.Generator().manual_seed(2))
    packed = MicroBatch(text[:, :-1], text[:, 1:], torch.tensor([0]), 0, 0)
    begins = [seq_len * number // documents for number in range(1, documents)]
    masked = with_documents(packed, [Cut(begins, [begin - 1 for begin in begins])])
    return {"packed": packed, "masked": masked, "packed again": packed}


def timed(module: nn.Module, batch: MicroBatch) -> tuple[float, float]:
    module.zero_grad()
    wall, processor = time.perf_counter(), time.process_time()
    module(batch).backward()
    return time.process_time() - processor, time.perf_counter() - wall


def spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def measure(family: str, dtype: torch.dtype, options: argparse.Namespace) -> None:
    module = module_of(family, options.seq_len, dtype)
    runs = batches(options.seq_len, options.documents)
    for batch in runs.values():
        timed(module, batch)
    times = [
        {name: timed(module, batch) for name, batch in runs.items()} for _ in range(options.rounds)
    ]
    for name in runs:
        ratios = [round_[name][0] / round_["packed"][0] for round_ in times]
        print(
            f"{family:6} {str(dtype)[6:]:9} {name:13} "
            f"processor {1e3 * median(round_[name][0] for round_ in times):7.0f} ms, "
            f"wall {1e3 * median(round_[name][1] for round_ in times):7.0f} ms, "
            f"processor time / packed {spread(ratios)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for family in ("gpt", "llama"):
        for dtype in (torch.float32, torch.bfloat16):
            measure(family, dtype, options)


if __name__ == "__main__":
    main()
