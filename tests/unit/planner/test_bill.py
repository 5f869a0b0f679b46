"""Days, node-hours and jobs of a training."""

import pytest

from hpczero.errors import InputError
from hpczero.planner.bill import OF_A_JOB, Bill


def test_jobs_train_between_their_start_and_their_last_save() -> None:
    training = 10**6 * 1.5
    assert Bill.of(10**6, 1.5, 1, 10**8) == Bill(training + OF_A_JOB, 1, 1)
    three = Bill.of(10**6, 1.5, 1, OF_A_JOB + int(training / 2.5))
    assert three.jobs == 3
    assert three.seconds == training + 3 * OF_A_JOB
    assert three.node_hours == pytest.approx(24 * three.days)
    one, eight = (Bill.of(100, 1.5, nodes, 10**6).node_hours for nodes in (1, 8))
    assert eight == pytest.approx(8 * one)


def test_a_job_needs_time_to_train() -> None:
    with pytest.raises(InputError, match="more walltime"):
        Bill.of(100, 1.5, 1, OF_A_JOB)
