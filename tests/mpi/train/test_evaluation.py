"""Evaluations within a run."""

import pytest

from hpczero.comm.world import World
from tests.support.grids import PLAIN, spec_of
from tests.support.training import train

pytestmark = pytest.mark.mpi


@pytest.mark.usual(2)
def test_a_run_trains_as_if_it_had_never_been_evaluated(world: World) -> None:
    """With dropout, which an evaluation leaves out, and the steps that follow it do not."""
    case = PLAIN | {"grid": (1, 1), "dropout": 0.3}
    plain, evaluated = (train(world, spec_of(case, steps=4, eval_every=every)) for every in (0, 1))
    assert len(evaluated.validation_losses) == 4
    assert evaluated.losses == plain.losses
    assert evaluated.norms == plain.norms
