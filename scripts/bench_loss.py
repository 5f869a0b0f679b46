#!/usr/bin/env python3
"""Time and memory of the loss and its gradients: by pieces (memory.loss_chunk) beside the whole.

    OMP_NUM_THREADS=1 python scripts/bench_loss.py
    OMP_NUM_THREADS=1 python scripts/bench_loss.py --chunks auto 512 --positions 4096

The head alone: its norm, logits and loss, and the gradients of its input and weights. In each round
every way makes them of the same input, one after the other, in the same process; every other round
goes backwards. Ratios are of two in a round. `bytes` are the most that there were of tensors beside
the input and the weights, in a pass that is not timed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpczero.train.malloc import keep_free_memory


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--chunks", nargs="*", default=["auto"], help="values of loss_chunk")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50257)
    return parser.parse_args()


def passes(arguments: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return a forward and backward of the head in each way, of the same input."""
    import torch

    from hpczero.model.batch import MicroBatch
    from hpczero.model.gpt import Head
    from hpczero.parallel.activations.choice import loss_rows
    from hpczero.parallel.activations.loss_by_pieces import Pieces, head_by_pieces
    from hpczero.spec.schema import Memory, Model

    torch.manual_seed(1)
    count, vocab = arguments.positions, arguments.vocab
    head = Head(Model(hidden=arguments.hidden, vocab=vocab, seq_len=count)).to(torch.bfloat16)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, count, arguments.hidden, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab, (1, count))
    batch = MicroBatch(targets, targets, torch.arange(1), 0, 1)

    def way(forward: Callable[[Any, Any], Any]) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            head.zero_grad()
            forward(x, batch).backward()

        return run

    def pieces(chunk: str) -> Callable[[Any, Any], Any]:
        memory = Memory(loss_chunk=chunk if chunk == "auto" else int(chunk))

        def of(positions: int) -> Pieces | None:
            rows = loss_rows(memory, positions)
            return Pieces(rows, vocab, 0.0, None, None) if rows else None

        return head_by_pieces(head, of)

    ways = {"whole": way(head.forward)} | {chunk: way(pieces(chunk)) for chunk in arguments.chunks}
    return {name + again: run for name, run in ways.items() for again in ("", " again")}


def most_bytes(run: Callable[[], None]) -> int:
    """Return the most bytes of tensors that a pass made and had at a time."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def main() -> int:
    arguments = options()
    keep_free_memory()
    import torch

    torch.set_num_threads(1)
    ways = passes(arguments)
    sizes = {}
    for name, run in ways.items():
        run()
        sizes[name] = most_bytes(run)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            begun = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begun)
    print(f"{arguments.positions} positions, vocabulary {arguments.vocab}, bf16")
    for name, took in seconds.items():
        ratios = [one / whole for one, whole in zip(took, seconds["whole"], strict=True)]
        low, middle, high = quantiles(ratios)
        print(
            f"  {name:12} {median(took):7.3f} s, / whole {middle:.3f} ({low:.3f}-{high:.3f}),"
            f" {sizes[name] / 1e6:8.1f} MB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
