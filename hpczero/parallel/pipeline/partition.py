"""Which layers each pipeline stage holds (pure): a contiguous cut of the model with the smallest largest cost.

The model is cut into stages x chunks parts; part number c * stages + s is chunk c of stage s. All stages work at the pace of the most
expensive part, so that is what the cut makes as small as it can be. Costs are measured ones, or estimated from the model.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf, lcm

from hpczero.model.shapes import ffn, head_dim, known
from hpczero.spec.schema import Model

_FORWARD_AND_BACKWARD = 3  # backward makes two products of the size of forward's: the gradients of the input and of the weight


def parts(costs: Sequence[float], stages: int, chunks: int = 1) -> tuple[range, ...]:
    """The layers of each part, in the order of the model; `costs` are those of the layers."""
    return cut(costs, stages * chunks)


def layers_of(cuts: Sequence[range], stages: int, stage: int) -> tuple[range, ...]:
    """What a stage holds of the parts: the layers of its chunk 0, 1, ..."""
    return tuple(cuts[stage::stages])


def estimated_costs(model: Model) -> list[int]:
    """Floating-point operations of one sequence in each layer, forward and backward."""
    assert known(model), f"the layers of {model.family} are not known from the spec: their costs have to be measured"
    return _FAMILIES[model.family](model)


def cut(costs: Sequence[float], count: int) -> tuple[range, ...]:
    """`count` contiguous parts of at least one layer each. Their largest cost is the smallest possible; of the cuts that have it, this is the most
    even one (smallest sum of squares), and of those the one with the fewest layers in front: the first stages keep the most activations.

    Exact, by dynamic programming in two passes: the smallest largest cost, then the sum of squares within it.
    """
    assert 0 < count <= len(costs), (count, len(costs))
    assert all(0 <= cost < inf for cost in costs), f"costs are finite and not negative: {list(costs)}"
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


def _gpt(model: Model) -> list[int]:
    """Products of matrices, and of attention's queries with all keys; the embedding only adds what it looks up."""
    inner, seq = model.heads * head_dim(model), model.seq_len
    weights = model.hidden * (4 * inner + 2 * ffn(model))
    block = 2 * weights + 4 * seq * inner
    costs = [model.hidden, *[block] * model.layers, 2 * model.hidden * model.vocab]
    return [_FORWARD_AND_BACKWARD * seq * cost for cost in costs]


_FAMILIES: dict[str, Callable[[Model], list[int]]] = {"gpt": _gpt}
