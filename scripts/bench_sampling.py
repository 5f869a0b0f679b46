#!/usr/bin/env python3
"""Speed of generation: with the key-value cache, without it, and by `transformers`.

    python scripts/bench_sampling.py                        8 prompts of 512 tokens, 512 new ones
    python scripts/bench_sampling.py --layers 8 --hidden 512 --skip-uncached

A random Llama in fp32 is exported for `transformers`, so that both have the same weights, and must
go on with the same tokens (the likeliest ones). In a round each contender runs once: ours, theirs,
ours again (which shows the noise), in one process. Processor seconds and wall seconds are given as
medians over the rounds, ratios are taken within a round.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from hpczero import cli, safe_files  # noqa: E402
from hpczero.device import CPU  # noqa: E402
from hpczero.inference.decoder import hidden_states  # noqa: E402
from hpczero.inference.generate import Request, Sampling, generate  # noqa: E402
from hpczero.inference.load_model import load_model, open_checkpoint  # noqa: E402
from hpczero.model.batch import MicroBatch  # noqa: E402

VOCAB = 4096


def models(folder: Path, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return a random Llama of hpczero and the same of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        max_position_embeddings=options.prompt + options.new,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder / "theirs")
    paths = [str(folder / name) for name in ("theirs", "spec.toml", "run")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["init", "--from-hf", *paths[:2]]) == 0
        command = ["ckpt", "import", "--hf", paths[0], "--spec", paths[1], "-o", paths[2]]
        assert cli.main(command) == 0
    with open_checkpoint(paths[2], None) as checkpoint:
        return load_model(checkpoint, torch.float32, CPU), theirs


def ours(module: Any, prompts: torch.Tensor, new: int) -> list[list[int]]:
    request = Request(prompts.tolist(), new, prompts.shape[1] + new, end=-1)
    steps = list(generate(module, request, Sampling(temperature=0.0), torch.device("cpu")))
    return [[step[place] for step in steps] for place in range(len(prompts))]


@torch.inference_mode()
def uncached(module: Any, prompts: torch.Tensor, new: int) -> list[list[int]]:
    """Go on by the whole text for each token."""
    text = prompts
    numbers = torch.arange(len(text))
    for _ in range(new):
        x, head = hidden_states(module, MicroBatch(text, text, numbers, 0, 0))
        text = torch.cat([text, head.scores(x[:, -1:]).argmax(-1)], 1)
    return text[:, prompts.shape[1] :].tolist()


@torch.inference_mode()
def by_transformers(module: Any, prompts: torch.Tensor, new: int) -> list[list[int]]:
    found = module.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return found[:, prompts.shape[1] :].tolist()


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, float, list[list[int]]]:
    wall, processor = time.perf_counter(), time.process_time()
    found = run()
    return time.process_time() - processor, time.perf_counter() - wall, found


def spread(values: Sequence[float]) -> str:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{median(values):.3f} ({low:.3f}-{high:.3f})"


def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Run the rounds; return each contender's processor and wall seconds."""
    with tempfile.TemporaryDirectory(prefix="hpczero-bench-") as folder:
        module, theirs = models(Path(folder), options)
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, VOCAB, (options.samples, options.prompt), generator=generator)
    contenders: dict[str, Callable[[], list[list[int]]]] = {
        "ours": lambda: ours(module, prompts, options.new),
        "transformers": lambda: by_transformers(theirs, prompts, options.new),
        "ours again": lambda: ours(module, prompts, options.new),
    }
    if not options.skip_uncached:
        contenders["without the cache"] = lambda: uncached(module, prompts, options.new)
    expected = contenders["ours"]()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(options.rounds):
        for name, run in contenders.items():
            if name == "without the cache" and number >= options.uncached_rounds:
                continue
            *took, found = timed(run)
            same = sum(a == b for a, b in zip(found, expected, strict=True))
            if same < len(expected):
                print(f"{name}: {len(expected) - same} texts differ", file=sys.stderr)
            times[name].append((took[0], took[1]))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("samples", 8), ("prompt", 512), ("new", 512), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--uncached-rounds", type=int, default=15)
    parser.add_argument("--skip-uncached", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = measure(options)
    base = times["ours"]
    for name, figures in times.items():
        ratios = [b[0] / a[0] for a, b in zip(base, figures, strict=False)]
        print(
            f"{name:18} processor {median(f[0] for f in figures):7.2f} s, "
            f"wall {median(f[1] for f in figures):7.2f} s, "
            f"processor time / ours {spread(ratios)}"
        )
    if options.json:
        safe_files.write_text(options.json, json.dumps(times))


if __name__ == "__main__":
    main()
