#!/usr/bin/env python3
"""The engine's own part of a step, of `transformers`' GPT-2 in a loop of one's own and of our GPT.

    mpirun -n 2 python scripts/bench_own_loop.py              stages 0 to 3
    mpirun -n 2 python scripts/bench_own_loop.py --stages 2 --hidden 512

Both models have the same sizes and number of parameters, in bf16. A step less forward and backward
of the bare module (each gradient dropped as soon as it is made) is the engine's: sums over the
ranks, clipping, AdamW, gathering, hooks. Processor seconds, the mean of the ranks; in a round each
contender runs twice, which shows the noise; the ratio is GPT-2's own part over that of our GPT.

The parts of the former are the differences of its forward, its backward and its step from the bare
module's.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "numba_cuda"), str(ROOT / "scripts")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from bench_contenders import Job, built, drop, entries  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

import hpczero  # noqa: E402
from hpczero.comm.world import World  # noqa: E402
from hpczero.model.batch import MicroBatch  # noqa: E402
from hpczero.model.families import parameter_count  # noqa: E402
from hpczero.spec.schema import Model, Optimizer, Spec, Train  # noqa: E402
from hpczero.train.malloc import keep_free_memory  # noqa: E402

PARTS = ("forward", "backward", "step")
Times = dict[str, float]


def job_of(options: argparse.Namespace, world: World) -> Job:
    hidden = options.hidden
    sizes = {"layers": options.layers, "hidden": hidden, "heads": hidden // 64, "vocab": 8192}
    model = Model(family="gpt", **sizes, seq_len=128)
    train = Train(precision="bf16", micro_batch=1, global_batch=world.size, grad_clip=1.0)
    generator = torch.Generator().manual_seed(world.rank)
    text = torch.randint(model.vocab, (1, model.seq_len + 1), generator=generator)
    samples = torch.tensor([world.rank])
    batch = MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), samples, 0, 1)
    return Job(Spec(model=model, train=train, optimizer=Optimizer(lr=1e-4)), world, batch)


def gpt2_of(job: Job) -> GPT2LMHeadModel:
    model = job.spec.model
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=model.vocab,
        n_positions=model.seq_len,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **without,
    )
    torch.manual_seed(3)
    return GPT2LMHeadModel(config)


class Bare:
    """GPT-2's forward and backward alone."""

    def __init__(self, job: Job) -> None:
        self.module = gpt2_of(job).bfloat16()
        self.tokens = job.batch.tokens
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(drop)

    def parts(self) -> Times:
        took = {}
        with timed(took, "forward"):
            loss = self.module(input_ids=self.tokens, labels=self.tokens).loss
        with timed(took, "backward"):
            loss.backward()
        return took | {"step": 0.0}

    def close(self) -> None:
        pass


class InALoop:
    """GPT-2 in an engine."""

    def __init__(self, job: Job, stage: int) -> None:
        spec = job.spec.model_copy(
            update={"zero": job.spec.zero.model_copy(update={"stage": stage, "node_shared": False})}
        )
        self.engine = hpczero.initialize(gpt2_of(job), spec, job.world, accumulates=False)
        self.tokens = job.batch.tokens

    def parts(self) -> Times:
        took: Times = {}
        with timed(took, "forward"):
            loss = self.engine(input_ids=self.tokens, labels=self.tokens).loss
        with timed(took, "backward"):
            self.engine.backward(loss / self.engine.size, last=True)
        with timed(took, "step"):
            self.engine.step()
        return took

    def close(self) -> None:
        self.engine.close()


class timed:
    """Add the processor seconds inside to a part."""

    def __init__(self, took: Times, name: str) -> None:
        self.took = took
        self.name = name

    def __enter__(self) -> None:
        self.began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.took[self.name] = time.process_time() - self.began


class Ours:
    """Our GPT, alone or in its engine: one part, the whole step."""

    def __init__(self, contender: Any) -> None:
        self.contender = contender

    def parts(self) -> Times:
        took: Times = {}
        with timed(took, "whole"):
            self.contender.step()
        return took


def mean_of_ranks(world: World, contender: Any) -> Times:
    world.everyone.barrier()
    took = contender.parts()
    seconds = torch.tensor(list(took.values()), dtype=torch.float64)
    world.everyone.all_reduce(seconds)
    return dict(zip(took, (seconds / world.size).tolist(), strict=True))


def rounds(number: int, job: Job, stage: int) -> Iterator[dict[str, Times]]:
    known = entries()
    with ExitStack() as stack:
        contenders: dict[str, Any] = {
            name: Ours(stack.enter_context(built(known[entry], job)))
            for name, entry in (("gpt bare", "floor"), ("gpt", f"ours-{stage}"))
        }
        contenders["gpt2 bare"] = stack.enter_context(closing(Bare(job)))
        contenders["gpt2"] = stack.enter_context(closing(InALoop(job, stage)))
        for contender in contenders.values():
            for _ in range(3):
                contender.parts()
        for _ in range(number):
            took = {name: mean_of_ranks(job.world, one) for name, one in contenders.items()}
            again = {
                f"{name} again": mean_of_ranks(job.world, one) for name, one in contenders.items()
            }
            yield took | again


def own(took: dict[str, Times], model: str, again: str) -> float:
    whole, bare = (sum(took[f"{name}{again}"].values()) for name in (model, f"{model} bare"))
    return whole - bare


def report(stage: int, times: list[dict[str, Times]]) -> None:
    for again in ("", " again"):
        gpt = [own(took, "gpt", again) for took in times]
        gpt2 = [own(took, "gpt2", again) for took in times]
        low, middle, high = quantiles([b / a for a, b in zip(gpt, gpt2, strict=True)], n=4)
        print(
            f"stage {stage}{again}: the engine's processor time GPT {1e3 * median(gpt):.1f} ms,"
            f" GPT-2 {1e3 * median(gpt2):.1f} ms: {middle:.3f} ({low:.3f}-{high:.3f})"
        )
    parts = {
        part: median(took["gpt2"][part] - took["gpt2 bare"][part] for took in times)
        for part in PARTS
    }
    shown = ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in parts.items())
    print(f"stage {stage}: of GPT-2's: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    options = parser.parse_args()
    keep_free_memory()
    torch.set_num_threads(1)
    with World.start() as world:
        job = job_of(options, world)
        if world.rank == 0:
            theirs = sum(own.numel() for own in gpt2_of(job).parameters())
            print(f"GPT {parameter_count(job.spec.model):,} parameters, GPT-2 {theirs:,}")
        for stage in options.stages:
            times = list(rounds(options.rounds, job, stage))
            if world.rank == 0:
                report(stage, times)


if __name__ == "__main__":
    main()
