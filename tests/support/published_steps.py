"""Steps that were published with their time, as specs, and how the software that ran them works."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster, find
from hpczero.planner.platform import Platform
from hpczero.planner.software import NCCL, Software
from hpczero.planner.step_time import StepTime, time_of
from hpczero.planner.step_work import StepWork
from hpczero.spec.schema import Data, Memory, Model, Parallel, Spec, Train, Zero

TABLES = Path(__file__).parent / "published"

FUSED = Platform("cuda", KERNELS_THAT_CHANGE_MEMORY["cuda"], native=True)
UNFUSED = Platform("cuda", native=True)

# Megatron of 2022: scores in half precision, scaled, masked and normalised by one kernel, then
# dropout with a mask of a byte; gradients of weights are added up by the products themselves; NCCL.
MEGATRON_2022 = Software(
    attention="kept",
    score_bytes=(9, 11),
    rings=NCCL,
    hides_weights=False,
    divides_messages=True,
    accumulates_apart=False,
)
MEGATRON_SELECTIVE = replace(MEGATRON_2022, attention="again")
# PyTorch's FSDP with flash attention: gathers and sums run beside the computing.
FSDP_2023 = Software(
    rings=NCCL, hides_weights=False, core_forward=0.9, core_backward=0.5, step_ms=18.5
)
# DeepSpeed of 2020 on Megatron of 2019: scores scaled, masked, normalised and dropped one after the
# other; gradients are summed and weights gathered with nothing beside them.
DEEPSPEED_2020 = Software(
    attention="kept",
    score_bytes=(17, 15),
    rings=NCCL,
    hidden=0.0,
    hides_weights=False,
    hides_reduction=False,
)


@dataclass(frozen=True)
class Measured:
    """A step, what it ran on, and the seconds that it took."""

    name: str
    spec: Spec
    nodes: Allocation
    cluster: str
    platform: Platform
    software: Software
    seconds: float
    group: str  # rows that are left out together

    @cached_property
    def work(self) -> StepWork:
        return StepWork(self.spec, layers(self.spec.model), self.nodes, self.platform)

    def predicted(self, cluster: Cluster | None = None, **software: Any) -> StepTime:
        where = cluster or find(self.cluster).cluster
        return time_of(self.work, where, replace(self.software, **software))


class Shape(NamedTuple):
    """The sizes of a GPT."""

    layers: int
    hidden: int
    heads: int


def gpt(layers: int, hidden: int, heads: int, seq_len: int, vocab: int, **more: Any) -> Model:
    return Model(
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        seq_len=seq_len,
        vocab=vocab,
        **more,
    )


def korthikanti() -> Iterator[Measured]:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 5: A100-80GB, 8 in a node."""
    rows = (
        ("22B", 48, 6144, 64, 1, 4, 4, 1, (1.42, 1.10)),
        ("175B", 96, 12288, 96, 8, 64, 1, 3, (18.13, 13.75)),
        ("530B", 105, 20480, 128, 35, 280, 1, 3, (49.05, 37.83)),
        ("1T", 128, 25600, 160, 64, 512, 1, 1, (94.42, 71.49)),
    )
    for name, depth, hidden, heads, stages, batch, micro, chunks, seconds in rows:
        for sequence, measured in zip((False, True), seconds, strict=True):
            spec = Spec(
                model=gpt(depth, hidden, heads, 2048, 51200, dropout=0.1),
                train=Train(global_batch=batch, micro_batch=micro),
                parallel=Parallel(
                    tensor=8,
                    pipeline=stages,
                    schedule="interleaved" if chunks > 1 else "1f1b",
                    chunks=chunks,
                    sequence_parallel=sequence,
                    order="tensor,data,pipeline",
                ),
                zero=Zero(stage=0),
                memory=Memory(recompute="none" if sequence else "block"),
            )
            yield Measured(
                f"{name} {'sequence, selective' if sequence else 'full recompute'}",
                spec,
                Allocation(8 * stages, 8),
                "dgx-a100-80",
                FUSED,
                MEGATRON_SELECTIVE if sequence else MEGATRON_2022,
                measured,
                name,
            )


def mosaic() -> Iterator[Measured]:
    """MosaicML's runs on A100 (published/measured-a100.csv)."""
    lines = (TABLES / "measured-a100.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        ranks, seq, micro = int(row["gpus"]), int(row["seq"]), int(row["micro_batch"])
        batch = micro * int(row["accumulation"])
        sizes = (int(row[key]) for key in ("layers", "hidden", "heads"))
        spec = Spec(
            model=gpt(*sizes, seq_len=1, vocab=50368),  # ALiBi: no positions are learned
            data=Data(seq_len=seq),
            train=Train(global_batch=batch * ranks, micro_batch=micro),
            zero=Zero(stage=3),
            memory=Memory(recompute="block" if row["recompute"] == "True" else "none"),
        )
        yield Measured(
            f"{row['model']} {seq} {ranks} {row['gpu']}",
            spec,
            Allocation(ranks, 8),
            "dgx-a100-80" if row["gpu"] == "a100_80gb" else "dgx-a100-40",
            UNFUSED,
            FSDP_2023,
            batch * seq / float(row["tokens_s_gpu"]),
            row["model"],
        )


def zero() -> Iterator[Measured]:
    """Rajbhandari et al. 2020 (arXiv 1910.02054): V100 in DGX-2, ZeRO stage 2; TFLOP/s a GPU.

    Operations are counted as there: 96 B s l h^2 (1 + s / 6h + V / 16lh), with recomputation.
    """
    rows = (  # GPUs, layers, hidden, heads, samples of a replica, tensor ranks, TFLOP/s
        (400, 48, 1600, 16, 24, 1, 30.3),
        (400, 72, 3072, 24, 64, 4, 36.9),
        (400, 88, 6144, 32, 12, 4, 36.0),
        (400, 132, 6144, 64, 64, 16, 36.5),
        (400, 100, 8192, 64, 32, 16, 37.5),
        (400, 125, 8192, 64, 32, 16, 38.7),
        (400, 150, 8192, 64, 24, 16, 28.2),
        (400, 175, 8192, 64, 16, 16, 27.0),
        (400, 212, 8192, 64, 12, 16, 20.9),
        (64, 75, 8192, 64, 16, 16, 25.5),
        (128, 75, 8192, 64, 48, 16, 37.5),
        (256, 75, 8192, 64, 48, 16, 39.0),
        (400, 75, 8192, 64, 64, 16, 36.4),
    )
    for ranks, depth, hidden, heads, samples, tensor, rate in rows:
        spec = of_deepspeed(Shape(depth, hidden, heads), ranks, tensor, samples, stage=2)
        yield Measured(
            f"{depth} x {hidden}, tensor {tensor}, {ranks} GPUs",
            spec,
            Allocation(ranks, 16),
            "dgx2-v100",
            FUSED,
            DEEPSPEED_2020,
            counted_operations(spec) / ranks / rate / 1e12,
            f"{depth}x{hidden}",
        )


def of_deepspeed(shape: Shape, ranks: int, tensor: int, samples: int, stage: int) -> Spec:
    """Return a step with one micro-batch of so many samples a replica, its blocks recomputed."""
    return Spec(
        model=gpt(*shape, 1024, 51200, dropout=0.1),
        train=Train(global_batch=samples * ranks // tensor, micro_batch=samples, precision="fp16"),
        parallel=Parallel(tensor=tensor, order="tensor,data,pipeline"),
        zero=Zero(stage=stage),
        memory=Memory(recompute="block"),
    )


def counted_operations(spec: Spec) -> float:
    """Return a step's operations as `zero`'s authors count them."""
    model, seq = spec.model, spec.seq_len
    counted = 1 + seq / 6 / model.hidden + model.vocab / 16 / model.layers / model.hidden
    return 96 * spec.train.global_batch * seq * model.layers * model.hidden**2 * counted
