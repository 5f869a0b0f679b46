"""Cut a model into pipeline stages, and say what each rank holds of it (pure).

The model is cut into stages x chunks contiguous parts; part c * stages + s is chunk c of stage s.
All stages work at the pace of the most expensive part, so the cut makes the largest cost as small
as possible. Costs are measured, or estimated from the model.

Of the parameters of its stage's layers a rank holds the part of its tensor rank (`LayoutCache`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import inf, lcm
from typing import TypeVar

from hpczero.model.families import family, known
from hpczero.model.shapes import Layer, Parameter
from hpczero.parallel.layout import UnitLayout, shard_range, unit_layout
from hpczero.spec.schema import Model, Spec

_Layer = TypeVar("_Layer")


class Tied(Layer):
    """A pseudo-layer that holds one parameter which layers of several stages use; it never runs.

    The parameter becomes a unit of its own on each of these stages. Such a unit is equally long on
    all of them, so they cut it into the same shards, and their gradients are summed shard by shard.
    """


Chunks = tuple[tuple[Layer, ...], ...]


# --------------------------------------------------------------------- the layers that ranks hold


def chunks_of_stages(spec: Spec, layers: Sequence[Layer]) -> list[Chunks]:
    """Return for each stage the layers of each of its chunks.

    A parameter shared with other stages (tied embeddings) comes, on each of them, before the first
    layer that uses it.
    """
    stages = spec.parallel.pipeline
    if stages == 1:
        return [(tuple(layers),)]
    assert known(spec.model), (
        f"{spec.model.family} has to be built before it can be cut into stages"
    )
    used = {name for layer in layers for name in layer.uses}
    parameters = [parameter for layer in layers for parameter in layer.parameters]
    tied = {parameter.name: parameter for parameter in parameters if parameter.name in used}
    cut_layers = cut_into_stages(
        layers, estimated_costs(spec.model, spec.seq_len), stages, spec.parallel.chunks
    )
    return [separate_tied(chunks, tied) for chunks in cut_layers]


def cut_into_stages(
    layers: Sequence[_Layer], costs: Sequence[float], stages: int, chunks: int
) -> list[list[list[_Layer]]]:
    """Return for each stage the layers of each of its chunks."""
    cuts = parts(costs, stages, chunks)
    return [
        [[layers[index] for index in part] for part in layers_of(cuts, stages, stage)]
        for stage in range(stages)
    ]


def separate_tied(chunks: Sequence[Sequence[Layer]], tied: Mapping[str, Parameter]) -> Chunks:
    """Separate the tied parameters of a stage from its layers.

    Each becomes a `Tied` before the first layer that uses it; layers that held it only use it.
    """
    missing = dict(tied)
    return tuple(
        tuple(chain.from_iterable(_without_tied(layer, tied, missing) for layer in chunk))
        for chunk in chunks
    )


def _without_tied(
    layer: Layer, tied: Mapping[str, Parameter], missing: dict[str, Parameter]
) -> Iterator[Layer]:
    """Yield the layer, after the tied parameters that are `missing` on the stage until here."""
    for name in [name for name in missing if name in layer.names]:
        yield Tied(name, (missing.pop(name),))
    parameters = tuple(parameter for parameter in layer.parameters if parameter.name not in tied)
    uses = dict.fromkeys((*layer.uses, *(name for name in tied if name in layer.names)))
    yield replace(layer, parameters=parameters, uses=tuple(uses))


def stages_of_ties(stages: Sequence[Chunks]) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each tied parameter."""
    holders: dict[str, list[int]] = {}
    for number, chunks in enumerate(stages):
        for layer in chain.from_iterable(chunks):
            if isinstance(layer, Tied):
                holders.setdefault(layer.name, []).append(number)
    return {name: tuple(numbers) for name, numbers in holders.items()}


def layers_that_run(chunks: Iterable[Sequence[Layer]]) -> list[Layer]:
    return [layer for chunk in chunks for layer in chunk if not isinstance(layer, Tied)]


def handed_on(spec: Spec, tensor_rank: int, seq_len: int) -> tuple[int, int]:
    """Return [positions, hidden] of the activation that a part hands on of a sequence.

    With sequence parallelism these are the positions of the tensor rank.
    """
    ranks = spec.parallel.tensor if spec.parallel.sequence_parallel else 1
    of_streams = [
        shard_range(length, 1, ranks, tensor_rank if ranks > 1 else 0)
        for length in spec.model.streams(seq_len)
    ]
    return sum(rows.stop - rows.start for rows in of_streams), spec.model.hidden


class LayoutCache:
    """A cache of layouts: layers of the same shapes, most of a model, have the same one."""

    def __init__(self, shards: int, tensor_ranks: int = 1) -> None:
        self.shards = shards
        self.tensor_ranks = tensor_ranks
        self._by_name: dict[tuple[str, int, int], UnitLayout] = {}
        self._layouts: dict[object, UnitLayout] = {}

    def of(self, layers: Sequence[Layer], tensor_rank: int = 0) -> list[UnitLayout]:
        """Return the layouts of the layers that have parameters of their own: the units.

        The names in a layout may be those of another layer of the same shapes.
        """
        return [self._of(layer, tensor_rank) for layer in layers if layer.parameters]

    def _of(self, layer: Layer, tensor_rank: int) -> UnitLayout:
        key = layer.name, len(layer.parameters), tensor_rank  # fewer where some are tied
        if key not in self._by_name:
            self._by_name[key] = self._of_shapes(layer, tensor_rank)
        return self._by_name[key]

    def _of_shapes(self, layer: Layer, tensor_rank: int) -> UnitLayout:
        shapes = tuple(
            (parameter.shape, parameter.cut(self.tensor_ranks)) for parameter in layer.parameters
        )
        key = tensor_rank, shapes
        if key not in self._layouts:
            self._layouts[key] = unit_layout(layer, self.shards, self.tensor_ranks, tensor_rank)
        return self._layouts[key]


# --------------------------------------------------------------------------------------- the cut


def parts(costs: Sequence[float], stages: int, chunks: int = 1) -> tuple[range, ...]:
    """Return the layers of each part, in the order of the model; `costs` are those of layers."""
    return _cut_once(tuple(costs), stages * chunks)


@lru_cache(maxsize=1024)
def _cut_once(costs: tuple[float, ...], count: int) -> tuple[range, ...]:
    return cut(costs, count)


def layers_of(cuts: Sequence[range], stages: int, stage: int) -> tuple[range, ...]:
    """Return the layers of a stage's chunk 0, 1, ..."""
    return tuple(cuts[stage::stages])


def estimated_costs(model: Model, seq_len: int) -> list[int]:
    """Return the floating-point operations of one sequence in each layer, forward and backward."""
    assert known(model), (
        f"the layers of {model.family} are not known from the spec: their costs have to be measured"
    )
    return family(model).operations(model, seq_len)


def cut(costs: Sequence[float], count: int) -> tuple[range, ...]:
    """Return `count` contiguous parts of at least one layer each, with the smallest largest cost.

    Of the cuts that have it, this is the most even one (smallest sum of squares), and of those the
    one with the fewest layers in front: the first stages keep the most activations.

    Exact, by dynamic programming in two passes: the smallest largest cost, then the sum of squares
    within it.
    """
    assert 0 < count <= len(costs), (count, len(costs))
    assert all(0 <= cost < inf for cost in costs), (
        f"costs are finite and not negative: {list(costs)}"
    )
    before = [0, *accumulate(_as_whole_numbers(costs))]  # cost of the first i layers
    limit = _smallest_limit(before, count)
    end = len(costs)
    bounds = [end]
    for begin_of in reversed(_most_even(before, count, limit)):
        end = begin_of[end]
        bounds.append(end)
    bounds.reverse()
    return tuple(range(begin, end) for begin, end in pairwise(bounds))


def _smallest_limit(before: Sequence[int], count: int) -> int:
    """Return the smallest largest cost of `count` parts.

    smallest[i] is that of the first i layers in `part` parts. Longer prefixes never cost less, and
    longer last parts never cost less, so the best last cut is where the two meet.
    """
    layers = len(before) - 1
    smallest: list[int] = list(before)
    for part in range(2, count + 1):
        longer = [0] * (layers + 1)
        last = part - 1  # the last cut
        for i in range(part, layers + 1):
            while last + 1 < i and smallest[last + 1] <= before[i] - before[last + 1]:
                last += 1
            choices = [last, last + 1] if last + 1 < i else [last]
            longer[i] = min(max(smallest[j], before[i] - before[j]) for j in choices)
        smallest = longer
    return smallest[layers]


def _most_even(before: Sequence[int], count: int, limit: int) -> list[dict[int, int]]:
    """Return for each part: where it ends -> where it best begins. No part exceeds the limit."""
    layers = len(before) - 1
    squares = {0: 0}  # where a part ends -> smallest sum of squares up to there
    begins = []
    for after in reversed(range(count)):  # parts that follow
        longer: dict[int, int] = {}
        best: dict[int, int] = {}
        for begin in sorted(squares):
            for end in range(begin + 1, layers - after + 1):
                cost = before[end] - before[begin]
                if cost > limit:
                    break
                if before[-1] - before[end] > after * limit or (after == 0 and end < layers):
                    continue
                square = squares[begin] + cost * cost
                if end not in longer or square < longer[end]:
                    longer[end] = square
                    best[end] = begin
        squares = longer
        begins.append(best)
    return begins


def _as_whole_numbers(costs: Sequence[float]) -> list[int]:
    """Return the costs in a unit in which all are whole numbers.

    Rounding errors in sums of floats would tell equal parts apart.
    """
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]
