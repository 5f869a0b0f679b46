"""Which layers each pipeline stage holds (pure): a contiguous cut of the model with the smallest largest cost.

The model is cut into stages x chunks parts; part number c * stages + s is chunk c of stage s. All stages work at the pace of the most
expensive part, so that is what the cut makes as small as it can be. Costs are measured ones, or estimated from the model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from math import inf, lcm

from hpczero.model.families import family, known
from hpczero.model.shapes import Layer, Parameter
from hpczero.parallel.layout import UnitLayout, shard_range, unit_layout
from hpczero.spec.schema import Model, Spec


# What the ranks hold of the model: of its layers those of their pipeline stage, of these the part of their tensor rank (pure).
class Tied(Layer):
    """Not a layer that runs, but a parameter that layers of several stages work with: on each of them a unit of its own, so that it is cut alike."""


Chunks = tuple[tuple[Layer, ...], ...]


def chunks_of_stages(spec: Spec, layers: Sequence[Layer]) -> list[Chunks]:
    """For each stage the layers of each of its chunks. What a layer shares with other stages (tied embeddings) comes before it, on each of them."""
    stages = spec.parallel.pipeline
    if stages == 1:
        return [(tuple(layers),)]
    assert known(spec.model), (
        f"how to cut {spec.model.family} into stages is not known without building it"
    )
    cuts = parts(estimated_costs(spec.model), stages, spec.parallel.chunks)
    used = {name for layer in layers for name in layer.uses}
    tied = {
        parameter.name: parameter
        for layer in layers
        for parameter in layer.parameters
        if parameter.name in used
    }
    return [
        apart([[layers[index] for index in part] for part in layers_of(cuts, stages, stage)], tied)
        for stage in range(stages)
    ]


def apart(chunks: Sequence[Sequence[Layer]], tied: Mapping[str, Parameter]) -> Chunks:
    """A stage's chunks of layers, which only use what is tied, behind what the stage does not have yet of that."""
    missing = dict(tied)
    return tuple(
        tuple(chain.from_iterable(_apart(layer, tied, missing) for layer in chunk))
        for chunk in chunks
    )


def stages_of_ties(stages: Sequence[Chunks]) -> dict[str, tuple[int, ...]]:
    """Return which stages hold each parameter that several of them work with."""
    holders: dict[str, list[int]] = {}
    for number, chunks in enumerate(stages):
        for layer in chain.from_iterable(chunks):
            if isinstance(layer, Tied):
                holders.setdefault(layer.name, []).append(number)
    return {name: tuple(numbers) for name, numbers in holders.items()}


def layers_that_run(chunks: Iterable[Sequence[Layer]]) -> list[Layer]:
    """The layers that run."""
    return [layer for chunk in chunks for layer in chunk if not isinstance(layer, Tied)]


def _apart(
    layer: Layer, tied: Mapping[str, Parameter], missing: dict[str, Parameter]
) -> Iterator[Layer]:
    for name in [name for name in missing if name in layer.names]:
        yield Tied(name, (missing.pop(name),))
    own = tuple(parameter for parameter in layer.parameters if parameter.name not in tied)
    yield replace(
        layer,
        parameters=own,
        uses=tuple(dict.fromkeys((*layer.uses, *(name for name in tied if name in layer.names)))),
    )


def handed_on(spec: Spec, tensor_rank: int) -> tuple[int, int]:
    """What a part of the model hands on to the next one of a sequence: [positions, hidden], with sequence parallelism the rank's own positions."""
    ranks = spec.parallel.tensor if spec.parallel.sequence_parallel else 1
    rows = shard_range(spec.model.seq_len, 1, ranks, tensor_rank if ranks > 1 else 0)
    return rows.stop - rows.start, spec.model.hidden


class Units:
    """The layouts of layers, of which those with the same shapes, most of a model, are made once."""

    def __init__(self, shards: int, tensor_ranks: int = 1) -> None:
        self.shards, self.tensor_ranks = shards, tensor_ranks
        self._made: dict[object, UnitLayout] = {}

    def of(self, layers: Sequence[Layer], tensor_rank: int = 0) -> list[UnitLayout]:
        """A layer that has no parameters of its own is no unit. The names in a layout may be those of an equal layer."""
        return [self._of(layer, tensor_rank) for layer in layers if layer.parameters]

    def _of(self, layer: Layer, tensor_rank: int) -> UnitLayout:
        key = (
            tensor_rank,
            tuple(
                (parameter.shape, parameter.split, parameter.grain)
                for parameter in layer.parameters
            ),
        )
        if key not in self._made:
            self._made[key] = unit_layout(layer, self.shards, self.tensor_ranks, tensor_rank)
        return self._made[key]


def parts(costs: Sequence[float], stages: int, chunks: int = 1) -> tuple[range, ...]:
    """The layers of each part, in the order of the model; `costs` are those of the layers."""
    return cut(costs, stages * chunks)


def layers_of(cuts: Sequence[range], stages: int, stage: int) -> tuple[range, ...]:
    """What a stage holds of the parts: the layers of its chunk 0, 1, ..."""
    return tuple(cuts[stage::stages])


def estimated_costs(model: Model) -> list[int]:
    """Floating-point operations of one sequence in each layer, forward and backward."""
    assert known(model), (
        f"the layers of {model.family} are not known from the spec: their costs have to be measured"
    )
    return family(model).operations(model)


def cut(costs: Sequence[float], count: int) -> tuple[range, ...]:
    """`count` contiguous parts of at least one layer each. Their largest cost is the smallest possible; of the cuts that have it, this is the most
    even one (smallest sum of squares), and of those the one with the fewest layers in front: the first stages keep the most activations.

    Exact, by dynamic programming in two passes: the smallest largest cost, then the sum of squares within it.
    """
    assert 0 < count <= len(costs), (count, len(costs))
    assert all(0 <= cost < inf for cost in costs), (
        f"costs are finite and not negative: {list(costs)}"
    )
    before = [0, *accumulate(_whole(costs))]  # cost of the first i layers
    limit = _smallest_limit(before, count)
    ends, last = _most_even(before, count, limit), len(costs)
    bounds = [last]
    for table in reversed(ends):
        last = table[last]
        bounds.append(last)
    bounds.reverse()
    return tuple(range(begin, end) for begin, end in pairwise(bounds))


def _smallest_limit(before: Sequence[int], count: int) -> int:
    """smallest[i]: of the first i layers in `part` parts, the smallest largest cost. Longer prefixes never cost less, longer last parts never
    less either, so the best place for the last cut is where the two meet.
    """
    layers = len(before) - 1
    smallest: list[int] = list(before)
    for part in range(2, count + 1):
        longer = [0] * (layers + 1)
        place = part - 1
        for i in range(part, layers + 1):
            while place + 1 < i and smallest[place + 1] <= before[i] - before[place + 1]:
                place += 1
            choices = [place, place + 1] if place + 1 < i else [place]
            longer[i] = min(max(smallest[j], before[i] - before[j]) for j in choices)
        smallest = longer
    return smallest[layers]


def _most_even(before: Sequence[int], count: int, limit: int) -> list[dict[int, int]]:
    """For each part: where it ends -> where it best begins. No part costs more than the limit."""
    layers, total = len(before) - 1, before[-1]
    squares, begins = {0: 0}, []
    for part in range(1, count + 1):
        rest = count - part
        found: dict[int, int] = {}
        best: dict[int, int] = {}
        for begin in sorted(squares):
            for end in range(begin + 1, layers - rest + 1):
                cost = before[end] - before[begin]
                if cost > limit:
                    break
                if total - before[end] > rest * limit or (rest == 0 and end < layers):
                    continue
                square = squares[begin] + cost * cost
                if end not in found or square < found[end]:
                    found[end], best[end] = square, begin
        squares = found
        begins.append(best)
    return begins


def _whole(costs: Sequence[float]) -> list[int]:
    """The same costs in a unit in which all are whole numbers: sums of floats would tell equal parts apart by their rounding."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]
