#!/usr/bin/env python3
"""A whole training step of GPT on one device: hpczero beside plain PyTorch and torch.compile.
Tokens/s, and model FLOP/s as a share of the chip's.

    python scripts/bench_gpu.py                    GPT of 1.5 billion parameters, on a GPU
    python scripts/bench_gpu.py --device cpu --layers 2 --hidden 64 --heads 4 --vocab 257 --seq-len
    32 --backend aot_eager

All begin with the same weights and keep fp32 master weights: hpczero beside bf16 ones, PyTorch
under bf16 autocast, with its fused AdamW and the same clipping. The losses of the first steps must
agree. FLOPs a token are counted as usual: 6 for each parameter in a product, and 12 x layers x
hidden x positions for attention, none less for its being causal.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import median

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parents[1] / "numba_cuda"),
]

import torch  # noqa: E402

from hpczero.comm.grid import Grid  # noqa: E402
from hpczero.comm.world import World  # noqa: E402
from hpczero.errors import InputError  # noqa: E402
from hpczero.model import build, families  # noqa: E402
from hpczero.model.batch import MicroBatch  # noqa: E402
from hpczero.parallel.parallelize import assemble  # noqa: E402
from hpczero.spec.schema import Model, Optimizer, Spec, Train, Zero  # noqa: E402
from hpczero.train.setup import select_device  # noqa: E402
from hpczero_kernels.cpu import Pool  # noqa: E402

TOLERANCE = 0.02  # of the loss: roundings to bf16 are at other places
Step = Callable[[], torch.Tensor]  # the summed loss before it, on the device


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    sizes = {
        "layers": 48,
        "hidden": 1600,
        "heads": 25,
        "vocab": 50257,
        "seq-len": 1024,
        "micro-batch": 8,
        "steps": 10,
        "warmup": 4,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument(
        "--peak", type=float, default=989.0, help="TFLOP/s of the chip in bf16; 989: H100 and H200"
    )
    return parser.parse_args()


def job_of(arguments: argparse.Namespace) -> tuple[Spec, int]:
    """Return the spec, and the FLOPs of a token."""
    model = Model(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        vocab=arguments.vocab,
        seq_len=arguments.seq_len,
        dropout=0.0,
    )
    train = Train(
        precision="bf16",
        micro_batch=arguments.micro_batch,
        global_batch=arguments.micro_batch,
        device=arguments.device,
    )
    spec = Spec(model=model, train=train, optimizer=Optimizer(lr=1e-4), zero=Zero(stage=0))
    products = (
        families.parameter_count(model)
        - model.hidden * model.seq_len
        - (0 if model.tied_embeddings else model.hidden * model.vocab)
    )
    return spec, 6 * products + 12 * model.layers * model.hidden * model.seq_len


def text_of(spec: Spec, world: World) -> MicroBatch:
    """Return a micro-batch of random text on the device."""
    samples, length = spec.train.micro_batch, spec.model.seq_len
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(spec.model.vocab, (samples, length + 1), generator=generator)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return MicroBatch(inputs, targets, torch.arange(samples), 0, spec.seed).on(world.device)


def main() -> int:
    arguments = options()
    spec, flops = job_of(arguments)
    ways = {
        "hpczero": ours,
        "PyTorch": plain,
        "torch.compile": lambda *given: plain(*given, backend=arguments.backend),
    }
    with World.start() as whole:
        world = whole.part(range(whole.size))
        spec = select_device(world, spec)
        batch = text_of(spec, world)
        print(
            f"{world.device.name}, torch {torch.__version__}, "
            f"{families.parameter_count(spec.model):,} parameters, "
            f"{batch.token_count} tokens a step"
        )
        losses = [
            measured(name, way, (spec, world, batch), arguments, flops)
            for name, way in ways.items()
        ]
        world.close()
    agree = all(
        abs(loss - first) <= TOLERANCE * first
        for one in losses
        for loss, first in zip(one, losses[0], strict=True)
    )
    print(f"losses agree: {agree}")
    for name, one in zip(ways, losses, strict=True):
        sums = " ".join(f"{loss / batch.token_count:.4f}" for loss in one)
        print(f"  {name:14} {sums}")
    return int(not agree)


def measured(
    name: str,
    way: Callable[..., Iterator[Step]],
    given: tuple[Spec, World, MicroBatch],
    arguments: argparse.Namespace,
    flops: int,
) -> list[float]:
    """Print a line; return the losses of the first steps."""
    (_, world, batch), seconds = given, list[float]()
    cuda = world.device.kind == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextmanager(way)(*given) as step:
        losses = [step().item() for _ in range(arguments.warmup)]
        for _ in range(arguments.steps):
            began = time.perf_counter()
            step().item()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    speed = batch.token_count / median(seconds)
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:6.1f} GB" if cuda else ""
    share = 100 * speed * flops / (arguments.peak * 1e12)
    print(
        (
            f"  {name:14} {1e3 * median(seconds):8.1f} ms {speed:10,.0f} tokens/s {share:5.1f} % "
            f"of {arguments.peak:.0f} TFLOP/s {memory}"
        ),
        flush=True,
    )
    return losses


def ours(spec: Spec, world: World, batch: MicroBatch) -> Iterator[Step]:
    grid, threads = Grid.build(spec.parallel, world.node_of_rank), len(os.sched_getaffinity(0))
    engine = assemble(spec, world, grid, accumulates=False, threads=threads).engine

    def step() -> torch.Tensor:
        loss = engine(batch)
        engine.backward(loss / batch.token_count, last=True)
        engine.finish_step(spec.optimizer.lr)
        return loss.detach()

    yield step
    engine.close()


@lru_cache
def initial_values(model: Model, seed: int) -> dict[str, torch.Tensor]:
    parameters = [parameter for layer in families.layers(model) for parameter in layer.parameters]
    made = {parameter.name: torch.empty(parameter.shape) for parameter in parameters}
    with Pool(len(os.sched_getaffinity(0))) as pool:
        for parameter in parameters:
            build.initial_values(parameter, seed, 0, made[parameter.name], pool)
    return made


def plain(spec: Spec, world: World, batch: MicroBatch, backend: str = "") -> Iterator[Step]:
    module = build.on_meta(spec.model.model_copy(update={"kernels": "torch"}))
    place = world.device.torch
    build.install_parameters(
        module,
        {
            name: torch.nn.Parameter(values.to(place, copy=True))
            for name, values in initial_values(spec.model, spec.seed).items()
        },
    )
    optimizer = spec.optimizer
    groups = [
        {
            "params": [each for each in module.parameters() if (each.dim() > 1) == decays],
            "weight_decay": optimizer.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(
        groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
    )
    run = torch.compile(module, backend=backend) if backend else module

    def step() -> torch.Tensor:
        with torch.autocast(world.device.torch.type, torch.bfloat16):
            loss = run(batch)
        (loss / batch.token_count).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), spec.train.grad_clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    yield step
    torch.compiler.reset()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"bench_gpu.py: {error}")
