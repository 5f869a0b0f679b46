"""Activations that are computed again in backward: the same numbers on every grid, to the bit."""

import pytest

from hpczero.comm.world import World
from hpczero.spec.schema import Memory, Spec
from tests.support.covering import Case, covering
from tests.support.grids import bitwise, factors, on_grid, possible, spec_of

pytestmark = pytest.mark.mpi


def with_memory(spec: Spec, **how: object) -> Spec:
    return spec.model_copy(update={"memory": Memory.model_validate(how)})


def selection(ranks: int, everything: bool = False) -> list[Case]:
    chosen = factors(ranks) | {"recompute": ["selective", "block"], "every": [1, 2]}
    return covering(chosen, (), possible)


@pytest.mark.cases(of=selection)
@pytest.mark.few(8)
def test_it_changes_no_number(world: World, case: Case) -> None:
    spec = spec_of(case)
    kept = on_grid(world, case, spec)
    again = with_memory(spec, recompute=case["recompute"], recompute_every=case["every"])
    assert bitwise(kept, on_grid(world, case, again))
