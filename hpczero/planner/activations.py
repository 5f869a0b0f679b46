"""What a rank holds between forward and backward, estimated from the model's shapes (pure).

Counted are the tensors that PyTorch's operations keep for their backward in the models of `hpczero.model`, and what comes on top at each of
the moments that may be the widest, gradients on their way into the engine included. Measured peaks of GPTs were 0.85 to 1.2 times this, with
an allocator that returns what is freed; what malloc keeps for later (up to 0.1 GB was seen on small models) is not in it. Nor are the buffers in
which messages of other stages arrive: they are counted for themselves.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpczero.model.shapes import Layer, ffn, head_dim, layers
from hpczero.parallel.layout import Gaps
from hpczero.parallel.pipeline.partition import Chunks, layers_that_run
from hpczero.parallel.pipeline.schedule import (
    AHEAD,
    Action,
    Schedule,
    forward_only,
    most_arrived,
    schedule,
    steps,
)
from hpczero.parallel.states import SLOTS
from hpczero.spec.schema import Model, Parallel, Spec


# What a stage of the pipeline keeps at the same time, by its very schedule (pure).
#
# In its middle a schedule repeats itself after as many micro-batches as there are stages, so only the first ones are looked at. One that keeps
# all micro-batches keeps as much more for every further one.
@dataclass(frozen=True)
class Moments:
    """Bytes of a micro-batch in one part of the model: what its forward leaves for backward, and the most there is of it in forward, in backward."""

    kept: float
    forward: float
    backward: float


def looked_at(parallel: Parallel, micro_batches: int) -> int:
    period = parallel.pipeline
    return min(micro_batches, 3 * period + micro_batches % period)


def actions(parallel: Parallel, chunks: int, stage: int, micro_batches: int) -> Sequence[Action]:
    """On one rank a micro-batch comes after the other, whatever the schedule is."""
    return _schedule(
        "1f1b" if parallel.pipeline == 1 else parallel.schedule,
        parallel.pipeline,
        chunks,
        micro_batches,
    )[stage]


def peak(parallel: Parallel, parts: Sequence[Moments], stage: int, micro_batches: int) -> float:
    """Bytes at the widest moment of a step; `parts` are those of the stage's chunks."""
    few = looked_at(parallel, micro_batches)
    now = most = 0.0
    for action in actions(parallel, len(parts), stage, few):
        part = parts[action.chunk]
        if action.kind == "forward":
            most = max(most, now + part.forward)
            now += part.kept
        else:
            now -= part.kept
            most = max(most, now + part.backward)
    return most + (micro_batches - few) * parts[0].kept * _keeps_all(parallel)


def arrived(parallel: Parallel, stage: int, micro_batches: int, evaluates: bool) -> int:
    """Messages that are on their way to the stage, or have arrived and are in use, at the same time."""
    if parallel.pipeline == 1:
        return 0
    few = looked_at(parallel, micro_batches)
    trained = _schedule(parallel.schedule, parallel.pipeline, parallel.chunks, few)
    schedules = [trained, forward_only(trained)] if evaluates else [trained]
    most = max(most_arrived(steps(every, parallel.chunks, stage, AHEAD)) for every in schedules)
    return most + (micro_batches - few) * (_keeps_all(parallel) and stage > 0)


def _keeps_all(parallel: Parallel) -> bool:
    return parallel.schedule == "gpipe" and parallel.pipeline > 1


@lru_cache(maxsize=4)
def _schedule(kind: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    return schedule(kind, stages, chunks, micro_batches) if micro_batches else [()] * stages


_FP32 = 4
_BLOCK = 1 << 18  # logits that tensor ranks have in fp32 at a time, twice


@dataclass(frozen=True)
class Part:
    """Of the model: so many layers of each kind ("blocks" -> 3), shared by so many tensor ranks; `sequence`: what lies between a layer's products
    is shared as well; `sends`: there are other parts.
    """

    layers: Counter[str]
    tensor: int
    sequence: bool
    sends: bool
    kernels: frozenset[str] = frozenset()  # `Platform.kernels`


def activations(
    spec: Spec,
    samples: int,
    chunks: Chunks | None = None,
    stage: int = 0,
    micro_batches: int = 1,
    kernels: frozenset[str] = frozenset(),
) -> int:
    """Bytes at the widest moment of a step, with micro-batches of so many sequences; `chunks` are the stage's, by default the whole model."""
    parallel, element = spec.parallel, 4 if spec.train.precision == "fp32" else 2
    parts = [
        Part(
            Counter(layer.name.partition(".")[0] for layer in layers_that_run([chunk])),
            parallel.tensor,
            parallel.sequence_parallel and parallel.tensor > 1,
            parallel.pipeline > 1,
            kernels,
        )
        for chunk in chunks or [layers(spec.model)]
    ]
    moments = [
        _FAMILIES[spec.model.family](spec.model, samples * spec.model.seq_len, element, part)
        for part in parts
    ]
    return int(peak(parallel, moments, stage, micro_batches))


def _gpt(model: Model, tokens: int, element: int, part: Part) -> Moments:
    """A block keeps its input, the residual in its middle, both norms' outputs, query, key and value, attention's result, the wide part
    before and after its GELU; attention also a number per head, norms two. Dropout keeps nothing: it
    draws its mask again. PyTorch's cross-entropy goes from logits over fp32 ones to their log-softmax,
    which it keeps; its backward holds three fp32 tensors of that size. Our kernel keeps the logits and
    two numbers a token, and writes the gradient over the logits. The gradient of tied embeddings waits for the embedding's own, and autograd adds
    them into a third. Where a stage ends, its output is kept too, but the input of its first block lies in the buffer in which it came; the last
    gradient is on its way to the stage before.
    Tensor ranks share what belongs to heads, to columns of the feed-forward part, to tokens of the vocabulary, of which they keep the logits and
    write the gradient over them; with sequence parallelism the rest too, but for the input of a product, which is made whole for it.
    """
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    inner, wide, vocab = (
        model.heads * head_dim(model) / ranks,
        ffn(model) / ranks,
        model.vocab / ranks,
    )
    norms = 4 / ranks if part.sequence else 4
    masking = (
        (2 * element + 1) * hidden if model.dropout else 0
    )  # a gradient by a mask, in two steps
    block = element * (4 * hidden + 4 * inner + 2 * wide) + _FP32 * (model.heads / ranks + norms)
    kept = part.layers["blocks"] * block * tokens
    if part.sends and "embedding" in part.layers:
        kept += element * hidden * tokens
    in_flight = (
        element
        * tokens
        * ((hidden if part.sends else 0) + (2 * model.hidden if part.sequence else 0))
    )
    embedding = element * vocab * model.hidden
    waiting = embedding if model.tied_embeddings and "head" in part.layers else 0
    logits, of_head, forward, backward = element * vocab * tokens, 0.0, [kept], [kept]
    if "head" in part.layers:
        by_kernel = "cross_entropy" in part.kernels
        over_logits = by_kernel or ranks > 1
        of_head = element * hidden * tokens + (logits if over_logits else _FP32 * vocab * tokens)
        in_fp32 = 2 * min(_BLOCK, vocab * tokens) if over_logits else 3 * vocab * tokens
        in_fp32 = 2 * tokens if by_kernel else in_fp32
        loss = 2 * element * hidden * tokens + (logits if over_logits else 0) + _FP32 * in_fp32
        forward.append(kept + loss)
        backward += [kept + loss, kept + 2 * element * hidden * tokens + logits + embedding]
    if "blocks" in part.layers:
        of_block = element * 2 * (hidden + wide) * tokens + masking * tokens
        backward.append(kept + of_block + element * model.hidden * max(wide, 3 * inner) + waiting)
    if "embedding" in part.layers:
        backward.append(embedding + 2 * waiting + element * 2 * hidden * tokens)
    return Moments(kept + of_head, max(forward) + in_flight, max(backward) + in_flight)


_FAMILIES: dict[str, Callable[[Model, int, int, Part], Moments]] = {"gpt": _gpt}


# How often units are gathered in a step where parameters are sharded (pure): by the rules of `parallel.gather`, as the stage's schedule uses them.
#
# There is room for two of the largest units. A unit that is needed and gone is gathered; what was used longest ago makes room for it. A pass is a
# forward and the backwards until the next one; while it goes the way that the longest one of the step before went, what comes next is gathered ahead.
_ONLY_FORWARD = {"embedding"}  # layers whose backward does not need their parameters: lookups

Use = tuple[int, ...]  # the units that are in use at the same time
Pass = list[Use]


def gathers_in_step(
    chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int
) -> Counter[int]:
    """Size of a unit -> how often units of this size are gathered; `sizes` are those of the units, the layers that have parameters."""
    period, few = parallel.pipeline, looked_at(parallel, micro_batches)
    before, times = (
        gathers(chunks, sizes, parallel, stage, count) for count in (max(0, few - period), few)
    )
    repeats = (micro_batches - few) // period
    of_size = Counter[int]()
    for unit, often in times.items():
        of_size[sizes[unit]] += often + repeats * (often - before[unit])
    return of_size


def gathers(
    chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int
) -> Counter[int]:
    """Unit -> how often it is gathered, looking at every micro-batch."""
    units = [layer for chunk in chunks for layer in chunk if layer.parameters]
    holder = {
        parameter.name: number
        for number, layer in enumerate(units)
        for parameter in layer.parameters
    }
    forward, backward = (
        [list(uses(chunk, holder)) for chunk in chunks] for uses in (_forward, _backward)
    )
    passes: list[Pass] = []
    for action in actions(parallel, len(chunks), stage, micro_batches):
        if action.kind == "forward":
            passes.append(list(forward[action.chunk]))
        else:
            passes[-1] += backward[action.chunk]
    return gathered(sizes, passes)


def _forward(chunk: Sequence[Layer], holder: dict[str, int]) -> Iterator[Use]:
    """All that a layer works with is whole while it runs."""
    for layer in layers_that_run([chunk]):
        yield tuple(sorted({holder[name] for name in layer.names}))


def _backward(chunk: Sequence[Layer], holder: dict[str, int]) -> Iterator[Use]:
    """One after the other, as autograd asks for them: what a layer shares (the logits' weight) is what its forward uses last."""
    for layer in reversed(layers_that_run([chunk])):
        if layer.name not in _ONLY_FORWARD:
            for unit in sorted({holder[name] for name in layer.names}):
                yield (unit,)


def gathered(sizes: Sequence[int], passes: Sequence[Pass]) -> Counter[int]:
    """Unit -> how often, for units of these sizes, in any step but the first."""
    expected = max(
        ([unit for unit, _ in _one_by_one(uses)] for uses in passes), key=len, default=[]
    )
    room = _Room(sizes)
    for uses in passes:
        for place, (unit, in_use) in enumerate(_one_by_one(uses)):
            room.use(unit, in_use)
            if expected[place : place + 1] == [unit]:
                room.expect(expected[place + 1 : place + 2], unit, in_use)
    return room.gathers


def _one_by_one(uses: Iterable[Use]) -> Iterator[tuple[int, Use]]:
    """What is used, and what is in use meanwhile; the same unit twice in a row is one use."""
    before = None
    for use in uses:
        for unit in use:
            if unit != before:
                yield unit, use
            before = unit


class _Room:
    """What is whole now, and where it lies; least recently used first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.gathers = Counter[int]()
        self._sizes = sizes
        self._regions = [Gaps(SLOTS * max(sizes))]
        self._there: dict[int, tuple[Gaps, int]] = {}

    def use(self, unit: int, in_use: Use) -> None:
        if unit not in self._there and not self._gather(unit, in_use):
            self._regions.append(
                Gaps(self._sizes[unit])
            )  # what is in use leaves no gap that is large enough
            self._gather(unit, in_use)
        self._there[unit] = self._there.pop(unit)

    def expect(self, coming: Sequence[int], now: int, in_use: Use) -> None:
        for unit in coming:
            if unit not in self._there:
                self._gather(unit, (*in_use, now))

    def _gather(self, unit: int, stay: Use) -> bool:
        place = self._free_place(unit)
        for other in list(self._there):
            if place is None and other not in stay:
                region, first = self._there.pop(other)
                region.give_back(first)
                place = self._free_place(unit)
        if place is None:
            return False
        self._there[unit] = place
        self.gathers[unit] += 1
        return True

    def _free_place(self, unit: int) -> tuple[Gaps, int] | None:
        return next(
            (
                (region, first)
                for region in self._regions
                if (first := region.take(self._sizes[unit])) is not None
            ),
            None,
        )
