"""The matrices that Muon orthogonalises, what that costs, and which rank does which (pure)."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hpczero.model.shapes import Parameter
from hpczero.model.work import Product
from hpczero.spec.optimizer import Optimizer

STEPS = 5  # of Newton and Schulz


def is_matrix(parameter: Parameter, optimizer: Optimizer) -> bool:
    """Return True for a matrix, or a stack of them, that Muon steps.

    AdamW steps the other parameters: biases, norms, what `optimizer.not_muon` names, and whatever
    has three dimensions or more and is no stack of hpczero's own models (convolutions, tokens).
    """
    if parameter.is_bias or len(parameter.shape) != 2 + parameter.is_stack:
        return False
    return not any(fnmatchcase(parameter.name, pattern) for pattern in optimizer.not_muon)


def stack_dim(parameter: Parameter) -> int:
    """Return the dimension of `divided`, of three, that numbers matrices.

    It is the first, but for sections side by side, as in a weight [inputs, outputs].
    """
    return 1 if parameter.sections > 1 and parameter.split == 1 else 0


def stack_shape(parameter: Parameter) -> tuple[int, int, int]:
    """Return how many matrices a parameter is, and their rows and columns.

    A fused map is one for each of its sections.
    """
    stack = list(parameter.divided)
    count = stack.pop(stack_dim(parameter)) if len(stack) > 2 else 1
    rows, columns = stack
    return count, rows, columns


def products(parameter: Parameter) -> list[Product]:
    """Return the products that orthogonalise a parameter's matrices."""
    count, rows, columns = stack_shape(parameter)
    short, long = sorted((rows, columns))
    times = count * STEPS
    return [
        Product(short, short, long, times, weight=False),
        Product(short, short, short, times, weight=False),
        Product(short, long, short, times, weight=False),
    ]


def operations(parameter: Parameter) -> int:
    """Return the additions and multiplications of these products."""
    return int(sum(product.operations for product in products(parameter)))


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Return a rank for each cost, so that all have about as much: the largest are dealt first."""
    loads = [0] * ranks
    chosen = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        chosen[number] = loads.index(min(loads))
        loads[chosen[number]] += costs[number]
    return chosen
