"""The loop judges the result of a step."""

import pytest

from hpczero.parallel.zero.bad_gradients import BadGradient
from hpczero.parallel.zero.engine import StepResult
from hpczero.spec.schema import Spec, Train
from hpczero.train import trainer
from hpczero.train.trainer import Outcome, Trainer


def test_a_run_gives_up_after_so_many_steps_in_a_row_without_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "_MOST_SKIPPED", 3)
    own = object.__new__(Trainer)
    own.spec = Spec(train=Train(steps=100))
    own.skipped = 0
    outcome = Outcome("running", 0)
    seen = []
    for step, letter in enumerate("xx.xxx", 1):
        result = StepResult(1.0, 1.0, BadGradient("head.weight", 1) if letter == "x" else None)
        outcome = own._outcome(outcome, step, 2.0, None, "", result)
        seen.append(outcome.state)
    assert seen == ["running"] * 5 + ["failed"]
    assert "3 steps in a row" in outcome.reason
    assert "first in head.weight of data rank 1" in outcome.reason
