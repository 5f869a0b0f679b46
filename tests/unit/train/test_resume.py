"""The recorded identity of a run that goes on from a checkpoint, without MPI."""

from hpczero.spec.keys import keys
from hpczero.spec.schema import Spec
from hpczero.train.resume import flat, identity_of, resumed_identity

ABC = {"data.fingerprint": "abc"}


def test_initial_values_stay_those_of_the_checkpoints_rule() -> None:
    """One that names no rule is of the time of rule 1; a model of one's own has none."""
    here = identity_of(ABC, rule=3)
    assert resumed_identity(identity_of(ABC, rule=2), here) == identity_of(ABC, rule=2)
    assert resumed_identity(identity_of(ABC), here) == identity_of(ABC, rule=1)
    assert resumed_identity(identity_of(ABC, rule=2), identity_of(ABC)) == identity_of(ABC)


def test_a_checkpoint_of_a_version_without_some_keys_has_their_defaults() -> None:
    now = Spec().model_dump(mode="json")
    then = Spec().model_dump(mode="json")
    del then["optimizer"]["outer"], then["optimizer"]["freeze"]
    del then["zero"]["shard_ranks"], then["comm"]["compress"]
    assert flat(then) == flat(now)
    assert flat(now)["optimizer.outer.every"] == 0
    assert list(flat(now)) == list(keys())
