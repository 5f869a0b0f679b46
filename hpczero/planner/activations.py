"""Estimates of activation memory, and of the all-gathers in a step, from the pipeline's schedule.

Activations are the tensors that PyTorch's operations keep for backward in the models of
`hpczero.model`. The temporary tensors of each moment that may be the widest count too, with
gradients on their way into the engine. Measured peaks of GPTs were 0.85 to 1.2 times this estimate,
with an allocator that returns freed memory. It leaves out what malloc keeps (up to 0.1 GB on small
models) and the buffers for messages from other stages, which `arrived` counts.

All functions are pure. A schedule repeats itself, in its middle, after as many micro-batches as
there are stages, so only the first few are simulated. One that keeps all micro-batches (GPipe)
keeps proportionally more for every further one.
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

_FP32 = 4
_LOGITS_BLOCK = 1 << 18  # logits that tensor ranks have in fp32 at a time, twice
_ONLY_FORWARD = {"embedding"}  # layers whose backward does not need their parameters: lookups


@dataclass(frozen=True)
class Moments:
    """Bytes of a micro-batch in one chunk of the model."""

    kept: float  # from forward to backward
    forward: float  # at the widest moment of its forward
    backward: float  # at the widest moment of its backward


def element_bytes(spec: Spec) -> int:
    """Return the bytes of a number in the model's precision."""
    return 4 if spec.train.precision == "fp32" else 2


def looked_at(parallel: Parallel, micro_batches: int) -> int:
    """Return how many micro-batches to simulate."""
    period = parallel.pipeline
    return min(micro_batches, 3 * period + micro_batches % period)


def actions(parallel: Parallel, chunks: int, stage: int, micro_batches: int) -> Sequence[Action]:
    """Return the stage's schedule; without a pipeline micro-batches run one after the other."""
    kind = "1f1b" if parallel.pipeline == 1 else parallel.schedule
    return _schedule(kind, parallel.pipeline, chunks, micro_batches)[stage]


def peak(parallel: Parallel, chunks: Sequence[Moments], stage: int, micro_batches: int) -> float:
    """Return the bytes at the widest moment of a step, from those of the stage's chunks."""
    few = looked_at(parallel, micro_batches)
    now = most = 0.0
    for action in actions(parallel, len(chunks), stage, few):
        chunk = chunks[action.chunk]
        if action.kind == "forward":
            most = max(most, now + chunk.forward)
            now += chunk.kept
        else:
            now -= chunk.kept
            most = max(most, now + chunk.backward)
    return most + (micro_batches - few) * chunks[0].kept * _keeps_all(parallel)


def arrived(parallel: Parallel, stage: int, micro_batches: int, evaluates: bool) -> int:
    """Return the most messages to the stage, on their way or in use, at the same time."""
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


@dataclass(frozen=True)
class Part:
    """A chunk's layers by kind ("blocks" -> 3), and how they are sharded."""

    layers: Counter[str]
    tensor: int  # ranks
    sequence: bool  # sequence parallelism: activations between the products are sharded too
    sends: bool  # the pipeline has other stages
    kernels: frozenset[str] = frozenset()  # `Platform.kernels`


def activations(
    spec: Spec,
    samples: int,
    chunks: Chunks | None = None,
    stage: int = 0,
    micro_batches: int = 1,
    kernels: frozenset[str] = frozenset(),
) -> int:
    """Return the bytes at the widest moment of a step with micro-batches of so many samples.

    `chunks` are the stage's; by default the whole model.
    """
    parallel = spec.parallel
    element = element_bytes(spec)
    sequence = parallel.sequence_parallel and parallel.tensor > 1
    moments = []
    for chunk in chunks or [layers(spec.model)]:
        kinds = Counter(layer.kind for layer in layers_that_run([chunk]))
        part = Part(kinds, parallel.tensor, sequence, parallel.pipeline > 1, kernels)
        tokens = samples * spec.model.seq_len
        moments.append(_FAMILIES[spec.model.family](spec.model, tokens, element, part))
    return int(peak(parallel, moments, stage, micro_batches))


def _gpt(model: Model, tokens: int, element: int, part: Part) -> Moments:
    """Count the activations of a GPT.

    A block keeps its input, the residual in its middle, both norms' outputs, query, key and value,
    attention's result, the wide activations before and after GELU; attention also a number per
    head, norms two. Dropout keeps nothing: it draws its mask again. A stage keeps its output too;
    the input of its first block lies in the receive buffer; its last gradient waits to be sent.

    Tensor ranks divide heads, columns of the feed-forward part and the vocabulary. With sequence
    parallelism they divide the other activations too, but gather the input of each product.
    """
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    inner = model.heads * head_dim(model) / ranks
    wide = ffn(model) / ranks
    vocab = model.vocab / ranks
    norms = 4 / ranks if part.sequence else 4
    block = element * (4 * hidden + 4 * inner + 2 * wide) + _FP32 * (model.heads / ranks + norms)
    kept = part.layers["blocks"] * block * tokens
    if part.sends and "embedding" in part.layers:
        kept += element * hidden * tokens
    sent = hidden if part.sends else 0
    gathered = 2 * model.hidden if part.sequence else 0
    in_flight = element * tokens * (sent + gathered)
    embedding = element * vocab * model.hidden
    # The gradient of tied embeddings waits for the lookup's own; autograd adds them into a third.
    waiting = embedding if model.tied_embeddings and "head" in part.layers else 0
    of_head = 0.0
    forward = [kept]
    backward = [kept]
    if "head" in part.layers:
        of_head, loss = _loss(part, tokens, element, hidden, vocab)
        logits = element * vocab * tokens
        forward.append(kept + loss)
        backward += [kept + loss, kept + 2 * element * hidden * tokens + logits + embedding]
    if "blocks" in part.layers:
        masking = (2 * element + 1) * hidden if model.dropout else 0  # gradient by mask, two steps
        of_block = element * 2 * (hidden + wide) * tokens + masking * tokens
        backward.append(kept + of_block + element * model.hidden * max(wide, 3 * inner) + waiting)
    if "embedding" in part.layers:
        backward.append(embedding + 2 * waiting + element * 2 * hidden * tokens)
    return Moments(kept + of_head, max(forward) + in_flight, max(backward) + in_flight)


def _loss(
    part: Part, tokens: int, element: int, hidden: float, vocab: float
) -> tuple[float, float]:
    """Return the bytes that the head keeps, and those of its loss at the widest moment.

    PyTorch's cross-entropy goes from logits over fp32 ones to their log-softmax, which it keeps;
    its backward holds three fp32 tensors of that size. hpczero's kernel, and tensor ranks, keep the
    logits and write the gradient over them; the kernel also keeps two numbers a token.
    """
    by_kernel = "cross_entropy" in part.kernels
    over_logits = by_kernel or part.tensor > 1
    logits = element * vocab * tokens
    kept = element * hidden * tokens + (logits if over_logits else _FP32 * vocab * tokens)
    in_fp32 = 3 * vocab * tokens
    if by_kernel:
        in_fp32 = 2 * tokens
    elif over_logits:
        in_fp32 = 2 * min(_LOGITS_BLOCK, vocab * tokens)
    return kept, 2 * element * hidden * tokens + (logits if over_logits else 0) + _FP32 * in_fp32


_FAMILIES: dict[str, Callable[[Model, int, int, Part], Moments]] = {"gpt": _gpt}


# All-gathers of units in a step where parameters are sharded (ZeRO-3), by the rules of
# `parallel.zero.gather`. There is room for two of the largest units. A unit that is needed and was
# released is gathered; the least recently used ones make room for it. A pass is a forward and the
# backwards until the next one. While it follows the longest pass of the step before, the unit that
# comes next is gathered ahead.

Use = tuple[int, ...]  # the units that are in use at the same time
Pass = list[Use]


def gathers_in_step(
    chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int
) -> Counter[int]:
    """Return size of a unit -> all-gathers of units of this size.

    `sizes` are those of the units, the layers that have parameters.
    """
    period = parallel.pipeline
    few = looked_at(parallel, micro_batches)
    before = gathers(chunks, sizes, parallel, stage, max(0, few - period))
    counts = gathers(chunks, sizes, parallel, stage, few)
    repeats = (micro_batches - few) // period
    by_size = Counter[int]()
    for unit, count in counts.items():
        by_size[sizes[unit]] += count + repeats * (count - before[unit])
    return by_size


def gathers(
    chunks: Chunks, sizes: Sequence[int], parallel: Parallel, stage: int, micro_batches: int
) -> Counter[int]:
    """Return unit -> its all-gathers, simulating every micro-batch."""
    units = [layer for chunk in chunks for layer in chunk if layer.parameters]
    holder = {
        parameter.name: number
        for number, layer in enumerate(units)
        for parameter in layer.parameters
    }
    forward = [list(_forward(chunk, holder)) for chunk in chunks]
    backward = [list(_backward(chunk, holder)) for chunk in chunks]
    passes: list[Pass] = []
    for action in actions(parallel, len(chunks), stage, micro_batches):
        if action.kind == "forward":
            passes.append(list(forward[action.chunk]))
        else:
            passes[-1] += backward[action.chunk]
    return gathered(sizes, passes)


def _forward(chunk: Sequence[Layer], holder: dict[str, int]) -> Iterator[Use]:
    """Yield the units of each layer: all that it works with are gathered while it runs."""
    for layer in layers_that_run([chunk]):
        yield tuple(sorted({holder[name] for name in layer.names}))


def _backward(chunk: Sequence[Layer], holder: dict[str, int]) -> Iterator[Use]:
    """Yield unit by unit, as autograd asks for them: a shared one (the logits' weight) first."""
    for layer in reversed(layers_that_run([chunk])):
        if layer.name not in _ONLY_FORWARD:
            for unit in sorted({holder[name] for name in layer.names}):
                yield (unit,)


def gathered(sizes: Sequence[int], passes: Sequence[Pass]) -> Counter[int]:
    """Return unit -> its all-gathers in any step but the first."""
    orders = ([unit for unit, _ in _one_by_one(uses)] for uses in passes)
    expected = max(orders, key=len, default=[])
    cache = _Cache(sizes)
    for uses in passes:
        for index, (unit, in_use) in enumerate(_one_by_one(uses)):
            cache.use(unit, in_use)
            if expected[index : index + 1] == [unit]:
                cache.expect(expected[index + 1 : index + 2], unit, in_use)
    return cache.gathers


def _one_by_one(uses: Iterable[Use]) -> Iterator[tuple[int, Use]]:
    """Yield each unit used and all in use with it; the same unit twice in a row is one use."""
    before = None
    for use in uses:
        for unit in use:
            if unit != before:
                yield unit, use
            before = unit


class _Cache:
    """The gathered units and their places in memory; least recently used first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.gathers = Counter[int]()
        self._sizes = sizes
        self._regions = [Gaps(SLOTS * max(sizes))]
        self._places: dict[int, tuple[Gaps, int]] = {}

    def use(self, unit: int, in_use: Use) -> None:
        if unit not in self._places and not self._gather(unit, in_use):
            # The units in use leave no gap that is large enough.
            self._regions.append(Gaps(self._sizes[unit]))
            self._gather(unit, in_use)
        self._places[unit] = self._places.pop(unit)

    def expect(self, coming: Sequence[int], now: int, in_use: Use) -> None:
        for unit in coming:
            if unit not in self._places:
                self._gather(unit, (*in_use, now))

    def _gather(self, unit: int, stay: Use) -> bool:
        place = self._free_place(unit)
        for other in list(self._places):
            if place is None and other not in stay:
                region, first = self._places.pop(other)
                region.give_back(first)
                place = self._free_place(unit)
        if place is None:
            return False
        self._places[unit] = place
        self.gathers[unit] += 1
        return True

    def _free_place(self, unit: int) -> tuple[Gaps, int] | None:
        for region in self._regions:
            if (first := region.take(self._sizes[unit])) is not None:
                return region, first
        return None
