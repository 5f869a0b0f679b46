"""Steps of DeepSpeed in 2020 on V100 to which no number was fitted, and what predicts them.

The tutorials are those of DeepSpeed's repository, docs/_tutorials, in 2020.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import mean
from typing import NamedTuple

from hpczero.model.families import layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster, find
from hpczero.planner.layout_space import round_numbers
from hpczero.planner.room import Room
from hpczero.planner.step_time import StepTime, StepTimes
from hpczero.spec.schema import Memory, Parallel, Spec, Train, Zero
from tests.support.figures import Figure
from tests.support.fitting import changed
from tests.support.published_memory import fit_on_v100
from tests.support.published_steps import (
    DEEPSPEED_2020,
    FUSED,
    Measured,
    Shape,
    counted_operations,
    gpt,
    of_deepspeed,
    zero,
)

_TERA = 1e12
_OF_40B, _OF_60B = Shape(88, 6144, 32), Shape(132, 6144, 64)
_OF_80B, _OF_100B = Shape(100, 8192, 64), Shape(125, 8192, 64)
# DeepSpeed's kernels of BERT: scores scaled, masked and normalised by one, then dropout.
BERT_2020 = replace(DEEPSPEED_2020, score_bytes=(9, 11))


def step_on_v100(
    spec: Spec, nodes: Allocation, cluster: Cluster | None = None, bert: bool = False
) -> StepTime:
    where = cluster or find("dgx2-v100").cluster
    software = BERT_2020 if bert else DEEPSPEED_2020
    return StepTimes(layers(spec.model), where, FUSED, software).of(spec, nodes)


def causes(step: StepTime) -> str:
    return ", ".join(f"{cause} {share:.0%}" for cause, share, _ in step.largest(2))


def rate(spec: Spec, ranks: int, seconds: float) -> float:
    """Return TFLOP/s a GPU, with recomputation, as the authors count them."""
    return counted_operations(spec) / ranks / seconds / _TERA


# --------------------------------------------------------- tensor parallelism alone, and ZeRO


@lru_cache
def on_64() -> tuple[Figure, ...]:
    """Return samples a second on four DGX-2 (tutorial "Megatron-LM GPT2", spring of 2020).

    Each model once without ZeRO, once with stage 1; the largest batches without running out.
    """
    rows = (  # tensor ranks, samples of a step, samples a second; the same with ZeRO
        ("1.5B", Shape(48, 1600, 16), (2, 512, 128.56), (1, 2048, 151.35)),
        ("4B", Shape(64, 2304, 16), (4, 128, 49.36), (1, 512, 75.13)),
        ("8B", Shape(72, 3072, 24), (4, 128, 24.57), (2, 512, 43.52)),
        ("20B", Shape(111, 3808, 32), (16, 16, 3.42), (4, 128, 12.65)),
    )
    figures = []
    for name, shape, *ways in rows:
        for stage, (tensor, batch, published) in enumerate(ways):
            spec = of_deepspeed(shape, 64, tensor, batch * tensor // 64, stage)
            step = step_on_v100(spec, Allocation(64, 16))
            called = f"{name}, stage {stage}, tensor {tensor}, batch {batch}"
            predicted = batch / step.seconds
            figures.append(Figure(called, published, predicted, (causes(step),)))
    return tuple(figures)


class Choice(NamedTuple):
    """The fastest step that fits: TFLOP/s a GPU, tensor ranks, samples of a replica."""

    rate: float
    tensor: int
    samples: int
    step: StepTime

    @property
    def note(self) -> str:
        return f"tensor {self.tensor}, {self.samples} samples"


@lru_cache
def fastest(shape: Shape, ranks: int, stage: int, tensors: Sequence[int]) -> Choice:
    """Return the fastest step with one micro-batch whose bytes fit, for rows without a layout."""
    cluster, nodes = find("dgx2-v100").cluster, Allocation(ranks, 16)
    model = layers(of_deepspeed(shape, ranks, 1, 1, stage).model)
    room = Room(model, FUSED, cluster.hardware, nodes)
    times = StepTimes(model, cluster, FUSED, DEEPSPEED_2020)
    choices = []
    for tensor in tensors:
        for samples in round_numbers(64):
            spec = of_deepspeed(shape, ranks, tensor, samples, stage)
            if room.fit(spec).verdict == "does not fit":
                break
            step = times.of(spec, nodes)
            choices.append(Choice(rate(spec, ranks, step.seconds), tensor, samples, step))
    return max(choices, key=lambda choice: choice.rate)


_LARGE = (("40B", _OF_40B), ("60B", _OF_60B), ("80B", _OF_80B), ("100B", _OF_100B))


def stage_1() -> Iterator[Figure]:
    """Yield TFLOP/s a GPU of stage 1 on 400 GPUs (Rajbhandari et al. 2020); layouts are ours."""
    for (name, shape), published in zip(_LARGE, (24.1, 16.4, 16.6, 6.6), strict=True):
        best = fastest(shape, 400, 1, (4, 8, 16, 40, 80))
        notes = best.note, causes(best.step)
        yield Figure(name, published, best.rate, notes, digits=1)


def without_tensor_parallelism() -> Iterator[Figure]:
    """Yield TFLOP/s a GPU of stage 2 alone on 128 GPUs; only their mean is published: 37."""
    shapes = (
        ("2.5B", Shape(54, 1920, 20)),
        ("4B", Shape(64, 2304, 16)),
        ("8B", Shape(72, 3072, 24)),
        ("13B", Shape(62, 4096, 32)),
    )
    rates = []
    for name, shape in shapes:
        best = fastest(shape, 128, 2, (1,))
        rates.append(best.rate)
        yield Figure(name, None, best.rate, (best.note, causes(best.step)), digits=1)
    yield Figure("mean of these", 37.0, mean(rates), ("", ""), digits=1)


def rates_of_zero() -> list[tuple[Measured, Figure]]:
    """Return the steps of `zero` with their TFLOP/s a GPU."""
    found = []
    for step in zero():
        ranks = step.nodes.ranks
        rates = [rate(step.spec, ranks, each) for each in (step.seconds, step.predicted().seconds)]
        found.append((step, Figure(step.name, *rates, digits=1)))
    return found


def superlinear() -> Iterator[Figure]:
    """Yield TFLOP/s a GPU of 60B on 64 to 400 GPUs, with what falls as there are more.

    Samples a GPU; kB that a rank sends along the data axis, and that its update moves through
    memory, for each token of these samples.
    """
    for step, figure in rates_of_zero():
        if step.group != "75x8192":
            continue
        samples = step.spec.train.global_batch / step.nodes.ranks
        tokens = 1e3 * samples * step.spec.seq_len
        traffic = step.work.traffic(0)
        both = traffic.reduced.sent, traffic.gathered.sent
        sent = sum(each.inside + each.between for each in both)
        updated = step.work.updated(0)
        notes = f"{samples:g}", f"{sent / tokens:,.0f}", f"{updated / tokens:,.0f}"
        yield replace(figure, name=f"{step.nodes.ranks} GPUs", notes=notes)


def from_100b() -> Iterator[Figure]:
    """Yield TFLOP/s a GPU of 100B to 170B, and of 200B, which was not run; notes: PFLOP/s."""
    names = {125: "100B", 150: "120B", 175: "140B", 212: "170B"}
    for step, figure in rates_of_zero():
        if step.spec.model.layers in names:
            name = names[step.spec.model.layers]
            yield replace(figure, name=name, notes=(f"{400e-3 * figure.predicted:.1f}",))
    spec = of_deepspeed(Shape(248, 8192, 64), 400, 16, 12, 2)
    step = step_on_v100(spec, Allocation(400, 16))
    predicted = rate(spec, 400, step.seconds)
    yield Figure("200B, 12 samples", None, predicted, (f"{400e-3 * predicted:.1f}",), digits=1)


# ------------------------------------------------------------------ three axes, offload, BERT


def trillion() -> Figure:
    """Return TFLOP/s a GPU of 10^12 parameters on 800 GPUs (DeepSpeed, September 2020).

    Stages and micro-batches are not published: with 16 tensor ranks only 50 stages fit, with one
    sample at a time and inputs of blocks cut over the tensor ranks.
    """
    spec = Spec(
        model=gpt(298, 17408, 128, 2048, 51200, dropout=0.1),
        train=Train(global_batch=2048, micro_batch=1, precision="fp16"),
        parallel=Parallel(tensor=16, pipeline=50, order="tensor,data,pipeline"),
        zero=Zero(stage=0),
        memory=Memory(recompute="block", partition_activations=True),
    )
    step = step_on_v100(spec, Allocation(800, 16))
    name = "298 x 17408, tensor 16, 50 stages"
    notes = f"{fit_on_v100(spec, 800).first.size / 1e9:.1f}", causes(step)
    return Figure(name, 47.0, rate(spec, 800, step.seconds), notes, digits=1)


def offload() -> Iterator[Figure]:
    """Yield the seconds of a step of 10B on one V100 by ZeRO-Offload (DeepSpeed, 2020)."""
    spec = of_deepspeed(Shape(50, 4096, 32), 1, 1, 10, 2)
    spec = spec.model_copy(update={"zero": Zero(stage=2, offload="cpu")})
    step = step_on_v100(spec, Allocation(1, 16))
    (forward,), (backward,) = step.durations.forward, step.durations.backward
    yield Figure("forward", 6.1, forward, digits=1)
    yield Figure("backward", 11.8, backward, digits=1)
    yield Figure("rest", 7.8, step.seconds - forward - backward, digits=1)
    yield Figure("whole step", 25.7, step.seconds, digits=1)


# Tutorial "BERT Pre-training", 2020: sequence, samples of a step and of a micro-batch, of all.
_PHASES = ((128, 65536, 64, 403e6), (512, 32768, 8, 20e6))
_MASKED = 0.15625  # of the positions: 20 of 128, 80 of 512


def bert(seq_len: int, ranks: int, batch: int, micro_batch: int) -> StepTime:
    """Return the time of a step of a GPT with the shapes of BERT-Large.

    All keys are computed with, as scores are kept. Logits of the masked positions alone are
    expressed by a vocabulary that is as much smaller.
    """
    vocab = round(_MASKED * 30528)
    spec = Spec(
        model=gpt(24, 1024, 16, seq_len, vocab, dropout=0.1),
        train=Train(global_batch=batch, micro_batch=micro_batch, precision="fp16"),
        parallel=Parallel(order="tensor,data,pipeline"),
        zero=Zero(stage=0),
    )
    return step_on_v100(spec, Allocation(ranks, 16), bert=True)


def bert_on_one() -> Iterator[Figure]:
    """Yield samples a second on one V100."""
    for (seq_len, _, samples, _), published in zip(_PHASES, (272, 52), strict=True):
        step = bert(seq_len, 1, samples, samples)
        name = f"sequence {seq_len}, samples/s"
        yield Figure(name, published, samples / step.seconds, (causes(step),), digits=0)


def bert_in_all() -> Iterator[Figure]:
    """Yield the hours of both phases of pretraining."""
    for ranks, published in ((16, 33 + 13 / 60), (64, 8 + 41 / 60), (256, 2.4), (1024, 44 / 60)):
        steps = [(bert(seq, ranks, batch, some), all / batch) for seq, batch, some, all in _PHASES]
        hours = sum(step.seconds * count for step, count in steps) / 3600
        yield Figure(f"{ranks:,} GPUs, hours", published, hours, (causes(steps[0][0]),))


# --------------------------------------------------------------------------------- claims


def claims() -> Iterator[Figure]:
    """Yield ratios of throughput that were published."""
    yield _ten_times()
    slow, fast = (figure for figure in on_64() if figure.name.startswith("20B"))
    gain = fast.predicted / slow.predicted
    yield Figure("20B on 64 GPUs: stage 1 over tensor parallelism alone", 3.7, gain)
    for name, shape in _LARGE[:3]:
        # on as many GPUs as the paper's runs without ZeRO had
        alone = fastest(shape, 384, 0, (32, 64, 128)).rate
        gain = fastest(shape, 400, 1, (4, 8, 16, 40, 80)).rate / alone
        yield Figure(f"{name}: stage 1 over tensor parallelism alone", 3.0, gain, most=5.0)
    best = next(figure for step, figure in rates_of_zero() if step.spec.model.layers == 125)
    of_stage_1 = fastest(_OF_100B, 400, 1, (4, 8, 16, 40, 80)).rate
    yield Figure("100B: stage 2 over stage 1 (up to 5)", 5.0, best.predicted / of_stage_1)
    yield _superlinear()
    yield _bert_on_more()
    yield _without_nvlink()


def _superlinear() -> Figure:
    """Return 60B on 400 GPUs over 64 GPUs, in samples of all GPUs."""
    few, *_, many = superlinear()
    assert few.published is not None
    assert many.published is not None
    times = 400 / 64
    published, predicted = many.published / few.published, many.predicted / few.predicted
    return Figure(
        "60B: 400 GPUs over 64, which are 6.25 times fewer", times * published, times * predicted
    )


def _bert_on_more() -> Figure:
    few, *_, many = bert_in_all()
    assert few.published is not None
    assert many.published is not None
    published, predicted = few.published / many.published, few.predicted / many.predicted
    return Figure("BERT-Large: 1,024 GPUs over 16, which are 64 times fewer", published, predicted)


def _ten_times() -> Figure:
    """Return 100B by stage 2 over tensor parallelism alone on eight DGX-2, samples of a GPU."""
    step = next(step for step in zero() if step.spec.model.layers == 125)
    alone = of_deepspeed(_OF_100B, 384, 128, 4, 0)
    slow = alone.train.global_batch / 384 / step_on_v100(alone, Allocation(384, 16)).seconds
    fast = step.spec.train.global_batch / 400 / step.predicted().seconds
    return Figure("100B: stage 2 over tensor parallelism alone (up to 10)", 10.0, fast / slow)


def _without_nvlink() -> Figure:
    """Return 1.5B on four nodes of four V100-16GB on PCIe, 40 Gbit/s between them.

    Tutorial "Megatron-LM GPT2": tensor 4 and 32 samples, against data parallelism and 128. Of
    DGX-2's file the sizes of data sheets are changed, and nothing that was fitted.
    """
    slow = changed(
        find("dgx2-v100").cluster,
        {
            "device.memory_gb": 16,
            "node.devices": 4,
            "node.link_gb_s": 16,
            "network.adapters": 1,
            "network.adapter_gb_s": 5,
        },
    )
    rates = []
    for tensor, batch, stage in ((4, 32, 0), (1, 128, 1)):
        spec = of_deepspeed(Shape(48, 1600, 16), 16, tensor, batch * tensor // 16, stage)
        rates.append(batch / step_on_v100(spec, Allocation(16, 4), slow).seconds)
    name = "1.5B without NVLink: stage 1 over tensor parallelism alone"
    return Figure(name, 3.75, rates[1] / rates[0])
