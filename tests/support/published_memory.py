"""Memory that was published, and what hpczero's planner says of it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpczero.model.families import layers
from hpczero.model.shapes import Moments
from hpczero.planner.activations import moments_of, peak
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.memory import LASTING, Parts, states_of_a_parameter
from hpczero.planner.placement import Placement
from hpczero.planner.room import Fit, Room
from hpczero.spec.schema import Memory, Parallel, Spec, Train, Zero
from tests.support.figures import Figure
from tests.support.published_steps import (
    FUSED,
    Measured,
    Shape,
    gpt,
    korthikanti,
    of_deepspeed,
    zero,
)

GIB = 2**30
_GIGA = 1e9
_V100 = 32e9  # bytes, as ZeRO's authors count them
# Bytes that Megatron keeps besides: for each number of a layer's input the masks of dropout behind
# attention and behind the feed-forward part; for each score the softmax, its dropout's mask and
# that one's result.
_MASKS = 2
_SCORES = 5


# ----------------------------------------------------------------- ZeRO: states, largest models


def states_of_zero() -> Iterator[Figure]:
    """Rajbhandari et al. 2020, table 1: GB of model states on each of N GPUs."""
    rows = (  # of so many 10^9 parameters: the GPT that stands for them, N, stages 1, 2 and 3
        (7.5, Shape(36, 4096, 32), 4, (52.5, 41.3, 30.0)),
        (7.5, Shape(36, 4096, 32), 16, (35.6, 21.6, 7.5)),
        (7.5, Shape(36, 4096, 32), 64, (31.4, 16.6, 1.88)),
        (128.0, Shape(158, 8192, 64), 64, (536.0, 284.0, 32.0)),
        (1000.0, Shape(128, 25600, 160), 1024, (4011.0, 2013.0, 15.6)),
    )
    for billions, shape, ranks, published in rows:
        for stage, size in enumerate(published, 1):
            spec = of_deepspeed(shape, ranks, 1, 1, stage)
            model = layers(spec.model)
            held = Parts(model, FUSED).need(spec, Placement(ranks, 1, False)).each
            states = sum(held[kind] for kind in LASTING) / sum(layer.size for layer in model)
            slots = (held["gradient slots"] + held["gather slots"]) / _GIGA
            name = f"{billions:g}B on {ranks:,} GPUs, stage {stage}"
            yield Figure(name, size, states * billions, (f"{slots:.1f}",))


def largest_in_theory() -> Iterator[Figure]:
    """Rajbhandari et al. 2020, table 2: the 10^9 parameters whose states fill 32 GB."""
    rows = ((1, 64, (2.0, 7.6, 14.4, 128.0)), (16, 1024, (32.0, 121.6, 230.4, 2000.0)))
    for tensor, ranks, published in rows:
        for stage, size in enumerate(published):
            data = ranks // tensor
            spec = of_deepspeed(Shape(1, 4096, 32), ranks, tensor, 1, stage)
            predicted = tensor * _V100 / states_of_a_parameter(spec, stage, data) / _GIGA
            name = f"tensor {tensor} on {ranks:,} GPUs, stage {stage}"
            yield Figure(name, size, predicted, digits=1)


class _Limit(NamedTuple):
    """A layout whose largest model is published."""

    name: str
    billions: float
    most: float | None  # where a range is published
    hidden: int
    ranks: int
    tensor: int
    zero: Zero
    memory: Memory = Memory(recompute="block")


def largest_measured() -> Iterator[Figure]:
    """Yield the largest models that ran, and those that fit for hpczero, of the same width.

    Rajbhandari et al. 2020, table 2 and section 10; ZeRO-Offload: DeepSpeed, September 2020.
    """
    cut = Memory(recompute="block", partition_activations=True)
    for limit in (
        _Limit("data parallelism alone, 64 GPUs", 1.3, 1.4, 1600, 64, 1, Zero(stage=0)),
        _Limit("stage 1, 64 GPUs", 6.0, 6.2, 4096, 64, 1, Zero(stage=1)),
        _Limit("stage 2, 128 GPUs", 13, None, 4096, 128, 1, Zero(stage=2)),
        _Limit("tensor 16, stage 0, 1,024 GPUs", 20, None, 4096, 1024, 16, Zero(stage=0)),
        _Limit("tensor 16, stage 1, 1,024 GPUs", 100, None, 8192, 1024, 16, Zero(stage=1)),
        _Limit("tensor 16, stage 2, 400 GPUs", 170, None, 8192, 400, 16, Zero(stage=2), cut),
        _Limit("offload to the host, 1 GPU", 13, None, 4096, 1, 1, Zero(stage=2, offload="cpu")),
    ):
        fits = _deepest(limit, ("fits",))
        may = _deepest(limit, ("fits", "too close to call"))
        sizes = [_billions(limit.hidden, depth) for depth in (fits, may)]
        notes = f"{sizes[1]:.1f}", f"{fits} x {limit.hidden}"
        yield Figure(limit.name, limit.billions, sizes[0], notes, 1, limit.most)


def _deepest(limit: _Limit, verdicts: Sequence[str]) -> int:
    """Return the most layers with such a verdict, with one sample a replica."""

    def may(depth: int) -> bool:
        shape = Shape(depth, limit.hidden, 32)
        spec = of_deepspeed(shape, limit.ranks, limit.tensor, 1, limit.zero.stage)
        spec = spec.model_copy(update={"zero": limit.zero, "memory": limit.memory})
        return fit_on_v100(spec, limit.ranks).verdict in verdicts

    least, most = 0, 1
    while may(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if may(middle) else (least, middle)
    return least


def _billions(hidden: int, depth: int) -> float:
    return sum(layer.size for layer in layers(gpt(depth, hidden, 32, 1024, 51200))) / _GIGA


def fit_on_v100(spec: Spec, ranks: int) -> Fit:
    """Return the memory of a spec on DGX-2."""
    hardware = find("dgx2-v100").cluster.hardware
    return Room(layers(spec.model), FUSED, hardware, Allocation(ranks, 16)).fit(spec)


def needs_of_zero() -> Iterator[tuple[Measured, Fit]]:
    """Yield the steps of `zero`, which all ran, with what hpczero needs for them.

    Inputs of recomputed blocks are cut over the tensor ranks, as the paper's section 10 says.
    """
    for step in zero():
        cut = step.spec.parallel.tensor > 1
        memory = Memory(recompute="block", partition_activations=cut)
        spec = step.spec.model_copy(update={"memory": memory})
        yield step, fit_on_v100(spec, step.nodes.ranks)


# ---------------------------------------------------------------- Megatron: states, activations


def memory_of_korthikanti() -> Iterator[Figure]:
    """Korthikanti et al. 2022, figure 1: GiB of a GPU.

    Parameters and optimizer, activations kept without recomputation, and those with sequence
    parallelism and selective recomputation. The note: GiB of hpczero's own engine.
    """
    published = {
        "22B": (45.56, 59.25, 9.56),
        "175B": (45.56, 66.84, 12.35),
        "530B": (31.64, 114.0, 23.08),
        "1T": (32.96, 131.25, 26.56),
    }
    for step in korthikanti():
        spec = step.spec.model_copy(update={"memory": Memory()})
        states, everything, selective = published[step.group]
        if not spec.parallel.sequence_parallel:
            own, predicted = _states(spec), _states(accumulating(spec))
            yield _in_gib(f"{step.group} parameters, optimizer", states, predicted, own)
        sequence = spec.parallel.sequence_parallel
        name, of_paper = ("sequence, selective", selective) if sequence else ("all", everything)
        predicted = _kept_by_megatron(spec, scores=not sequence)
        yield _in_gib(f"{step.group} activations, {name}", of_paper, predicted, _kept(spec))


def _in_gib(name: str, published: float, predicted: float, own: float) -> Figure:
    return Figure(name, published, predicted / GIB, (f"{own / GIB:.2f}",))


def accumulating(spec: Spec) -> Spec:
    """Return the spec with several micro-batches, for which gradients are kept in fp32."""
    batch = max(spec.train.global_batch, 2 * spec.train.micro_batch)
    return spec.model_copy(update={"train": spec.train.model_copy(update={"global_batch": batch})})


def _states(spec: Spec) -> float:
    """Return the bytes of states of a rank that has blocks alone, where there is one."""
    inner = min(1, spec.parallel.pipeline - 1)
    held = Parts(layers(spec.model), FUSED).need(spec, Placement(1, 1, False, inner)).each
    return sum(held[kind] for kind in LASTING)


def _kept(spec: Spec) -> float:
    """Return the bytes of activations on the first stage, which keeps the most."""
    parts = Parts(layers(spec.model), FUSED)
    return parts.need(spec, Placement(1, 1, False)).each["activations"]


def _kept_by_megatron(spec: Spec, scores: bool) -> float:
    """Return the bytes that Megatron's first stage keeps.

    They are hpczero's, masks and scores, without what the stage hands on: Megatron frees it once
    it is sent (its appendix), and each block's input counts with the block. hpczero's first part
    has the input of its first block, which is the embedding's result, besides its own result.
    """
    samples = spec.train.micro_batch
    of_block = _besides_in_block(spec, samples, scores)
    chunks = []
    for chunk in Parts(layers(spec.model), FUSED).chunks(spec)[0]:
        kinds = [layer.kind for layer in chunk]
        besides = kinds.count("blocks") * of_block
        if "embedding" in kinds and spec.parallel.pipeline > 1:
            rows = spec.parallel.tensor if spec.parallel.sequence_parallel else 1
            besides -= 2 * samples * spec.seq_len * spec.model.hidden / rows
        moments = moments_of(spec, samples, chunk, FUSED.kernels)
        peaks = moments.forward.beside(besides), moments.backward.beside(besides)
        chunks.append(Moments(moments.kept + besides, *peaks))
    return peak(spec.parallel, chunks, 0, spec.train.global_batch // samples).kept


def _besides_in_block(spec: Spec, samples: int, scores: bool) -> float:
    model, ranks, seq = spec.model, spec.parallel.tensor, spec.seq_len
    rows = ranks if spec.parallel.sequence_parallel else 1
    masks = _MASKS * samples * seq * model.hidden / rows
    return masks + scores * _SCORES * samples * model.heads * seq * seq / ranks


def activations_of_a_block() -> Iterator[Figure]:
    """Korthikanti et al. 2022, table 2, in the numbers of a layer's input (s b h), at 22B."""
    heads, hidden, seq = 64, 6144, 2048
    square = 5 * heads * seq / hidden
    rows = (  # formula, its value, tensor ranks, sequence parallelism, scores, recompute
        ("34 + 5as/h", 34 + square, 1, False, True, "none"),
        ("10 + 24/t + 5as/ht, t = 8", 13 + square / 8, 8, False, True, "none"),
        ("(34 + 5as/h)/t", (34 + square) / 8, 8, True, True, "none"),
        ("34/t, scores made again", 34 / 8, 8, True, False, "none"),
        ("2, all made again", 2.0, 8, False, False, "block"),
    )
    for formula, published, ranks, sequence, scores, again in rows:
        spec = Spec(
            model=gpt(8, hidden, heads, seq, 51200, dropout=0.1),
            train=Train(global_batch=4, micro_batch=4),
            parallel=Parallel(tensor=ranks, sequence_parallel=sequence),
            memory=Memory.model_validate({"recompute": again}),
        )
        own = _of_block(spec)
        besides = 0.0 if again == "block" else _besides_in_block(spec, 4, scores)
        unit = 4 * seq * hidden
        yield Figure(formula, published, (own + besides) / unit, (f"{own / unit:.2f}",))


def _of_block(spec: Spec) -> float:
    """Return the bytes that one more block keeps."""
    few, more = (
        moments_of(spec, spec.train.micro_batch, layers(spec.model)[1 : 1 + count], FUSED.kernels)
        for count in (1, 2)
    )
    return more.kept - few.kept
