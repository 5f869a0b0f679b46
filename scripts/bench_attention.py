#!/usr/bin/env python3
"""Time of block-sparse attention, forward and backward, beside PyTorch's dense causal attention.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --only "fp32*" --threads 1
    python scripts/bench_attention.py --smoke                       seconds: does it run?

A layout is a window of some blocks and the first ones; its density is the pairs that are computed,
those of the blocks that are there, as a share of the causal ones. In each round the dense
attention, the same again (A/A) and the layouts take turns in one process; every other round goes
backwards. Ratios are of two in a round, with their quartiles. Then a window of one width: its time
for more and more positions, as a ratio to that of the fewest (A/A: once more), times as many as
there are more positions. At last whole steps of a GPT with 8 layers x 512, dense and with the first
of the layouts. One thread is timed by its processor time, several by the clock.
"""

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from turns import Ratio, ratio, take_turns  # noqa: E402

from hpczero import safe_files  # noqa: E402
from hpczero.model import attention_layouts  # noqa: E402
from hpczero.model.attention_layouts import rule_of  # noqa: E402
from hpczero.spec.attention import Attention  # noqa: E402
from hpczero.spec.model import Model  # noqa: E402
from hpczero_kernels.block_layout import BlockLayout  # noqa: E402
from hpczero_kernels.block_sparse import block_sparse_attention  # noqa: E402
from hpczero_kernels.block_sparse_plan import plan_of  # noqa: E402

_HEADS, _HEAD_DIM = 8, 64
_BLOCKS = ((64, 9, 1), (64, 4, 1), (32, 9, 1), (128, 4, 1))  # size, window, first ones
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LINEAR = (64, 9, 0)  # the layout whose time is held against its positions
_LAYERS = 8  # of the model whose steps are timed


@dataclass(frozen=True)
class Figures:
    case: str
    density: float
    seconds: float
    ratio: Ratio


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--positions", type=int, default=1 << 14)
    parser.add_argument("--longest", type=int, default=1 << 16, help="positions of the window")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--smoke", action="store_true", help="3 rounds of 512 positions")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def layout_of(positions: int, block: int, window: int, first: int) -> BlockLayout:
    """Return a causal layout of a window of so many blocks, and of the first ones."""
    keys = Attention(kind="longformer", block=block, window=window, **{"global": first})
    rule = rule_of(Model(attention=keys), 0)
    assert rule
    made = attention_layouts.layout_of(rule, positions, range(_HEADS), _HEADS)
    return BlockLayout(made.block, made.causal, made.patterns, made.of_head)


def density_of(layout: BlockLayout, positions: int) -> float:
    plan = plan_of(layout, 1, _HEADS, _HEADS, positions)
    return plan.computed_pairs / _HEADS / (positions * (positions + 1) // 2)


def step_of(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], positions: int, dtype: torch.dtype
) -> Callable[[], object]:
    """Return forward and backward of an attention, on tensors of their own."""
    generator = torch.Generator().manual_seed(1)
    parts = [
        torch.randn(1, _HEADS, positions, _HEAD_DIM, generator=generator, dtype=torch.float32)
        for _ in range(4)
    ]
    *inputs, above = [part.to(dtype) for part in parts]
    for part in inputs:
        part.requires_grad_()
    return lambda: torch.autograd.grad(attention(*inputs), inputs, above)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def against_dense(arguments: argparse.Namespace, precision: str) -> list[Figures]:
    """Return how many times as fast as the dense attention each layout is."""
    positions, dtype = arguments.positions, _PRECISIONS[precision]
    step = step_of(dense, positions, dtype)
    contenders = {"dense": step, "dense again": step}
    densities = dict.fromkeys(contenders, 1.0)
    for block, window, first in _BLOCKS:
        layout = layout_of(positions, block, window, first)
        name = f"{window} + {first} blocks of {block}"
        densities[name] = density_of(layout, positions)
        contenders[name] = step_of(
            lambda q, k, v, layout=layout: block_sparse_attention(q, k, v, layout), positions, dtype
        )
    return compared(arguments, precision, contenders, densities)


def whole_steps(arguments: argparse.Namespace, precision: str) -> list[Figures]:
    """Return how many times as fast as with dense attention a step of a model is."""
    from one_batch import Job

    from hpczero.comm.world import World
    from hpczero.train import setup

    positions, world = arguments.positions, World.start()
    setup.use_kernels(world)
    torch.set_num_threads(arguments.threads)
    block, window, first = _BLOCKS[0]
    blocks = {"kind": "longformer", "block": block, "window": window, "global": first}
    shape = {"layers": _LAYERS, "hidden": _HEADS * _HEAD_DIM, "heads": _HEADS}
    train = {"precision": precision, "global_batch": 1, "micro_batch": 1}
    dense_job, job = (
        Job(world, {"model": shape | {"seq_len": positions} | attention, "train": train})
        for attention in ({}, {"attention": blocks})
    )
    contenders = {"step, dense": dense_job.step, "step, dense again": dense_job.step}
    densities = dict.fromkeys(contenders, 1.0)
    name = f"step, {window} + {first} blocks of {block}"
    densities[name] = density_of(layout_of(positions, *_BLOCKS[0]), positions)
    return compared(arguments, precision, contenders | {name: job.step}, densities)


def compared(
    arguments: argparse.Namespace,
    precision: str,
    contenders: dict[str, Callable[[], object]],
    densities: dict[str, float],
) -> list[Figures]:
    """Return times, and ratios to those of the first contender."""
    seconds = take_turns(contenders, arguments.rounds, arguments.threads)
    dense = seconds[next(iter(contenders))]
    return [
        Figures(f"{precision} {name}", densities[name], median(of_name), ratio(dense, of_name))
        for name, of_name in seconds.items()
    ]


def against_linear(arguments: argparse.Namespace, precision: str) -> list[Figures]:
    """Return the times of a window for more and more positions, as ratios to linear ones."""
    most, dtype = arguments.longest, _PRECISIONS[precision]
    lengths = [most // 16, most // 4, most]
    layouts = {length: layout_of(length, *_LINEAR) for length in lengths}
    steps = {
        str(length): step_of(
            lambda q, k, v, layout=layout: block_sparse_attention(q, k, v, layout), length, dtype
        )
        for length, layout in layouts.items()
    }
    again = f"{lengths[0]} again"
    steps[again] = steps[str(lengths[0])]
    seconds = take_turns(steps, arguments.rounds, arguments.threads)
    fewest = seconds[str(lengths[0])]
    return [
        Figures(
            f"{precision} window, {name} positions", density_of(layouts[length], length),
            median(seconds[name]),
            ratio(seconds[name], [length / lengths[0] * one for one in fewest]),
        )
        for name, length in [(again, lengths[0]), *((str(length), length) for length in lengths)]
    ]  # fmt: skip


def main() -> int:
    arguments = options()
    if arguments.smoke:
        arguments.positions, arguments.longest, arguments.rounds = 512, 2048, 3
    torch.set_num_threads(arguments.threads)
    patterns = arguments.only.split(",")
    print(
        f"{arguments.positions} positions, {_HEADS} heads of {_HEAD_DIM}, "
        f"{arguments.rounds} rounds, threads: {arguments.threads}"
    )
    found = []
    ways = {
        "dense": (against_dense, "dense / this"),
        "linear": (against_linear, "this / linear"),
        "step": (whole_steps, "dense / this"),
    }
    for name, (way, of) in ways.items():
        for precision in _PRECISIONS:
            if not any(fnmatch.fnmatchcase(f"{precision} {name}", one) for one in patterns):
                continue
            print(f"{'':34}{'density':>9}{'ms':>9}   {of}")
            for figures in way(arguments, precision):
                found.append(asdict(figures))
                print(
                    f"{figures.case:34}{figures.density:9.2%}{figures.seconds * 1e3:9.1f}"
                    f"   {figures.ratio}",
                    flush=True,
                )
    if arguments.json:
        safe_files.write_text(arguments.json, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
