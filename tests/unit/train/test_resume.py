"""The recorded identity of a run that goes on from a checkpoint, without MPI."""

from hpczero.train.resume import identity_of, resumed_identity


def test_initial_values_stay_those_of_the_checkpoints_rule() -> None:
    """One that names no rule is of the time of rule 1; a model of one's own has none."""
    here = identity_of("abc", rule=3)
    assert resumed_identity(identity_of("abc", rule=2), here) == identity_of("abc", rule=2)
    assert resumed_identity(identity_of("abc"), here) == identity_of("abc", rule=1)
    assert resumed_identity(identity_of("abc", rule=2), identity_of("abc")) == identity_of("abc")
