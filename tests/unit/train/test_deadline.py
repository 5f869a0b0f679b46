"""A run stops in time for its last checkpoint, by a clock of the test's own."""

import signal

import pytest

from hpczero import env
from hpczero.comm.status import Status
from hpczero.train.process import REASONS, Deadline, StopRequests


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def runs(deadline: Deadline, clock: Clock, step: float, most: int = 10_000) -> int:
    """Steps of so many seconds until it says stop."""
    for number in range(most):
        if deadline.is_near():
            return number
        clock.now += step
    return most


@pytest.mark.parametrize("step", [0.01, 1.0, 7.0, 30.0])
@pytest.mark.parametrize("save", [0.0, 2.0, 60.0])
def test_a_last_step_and_a_save_fit_before_the_end(step: float, save: float) -> None:
    clock = Clock()
    deadline = Deadline(clock.now + 600, save_seconds=save, clock=clock)
    steps = runs(deadline, clock, step, 100_000)
    left = 600 - steps * step
    assert left > save, "asked to stop now, it can save"
    assert left < 3 * step + 1.5 * save + 9, "and it does not stop much too early"


def test_a_save_that_took_longer_than_was_thought_counts() -> None:
    clock = Clock()
    deadline = Deadline(clock.now + 600, save_seconds=1.0, clock=clock)
    deadline.saved(100.0)
    deadline.saved(5.0)
    steps = runs(deadline, clock, 1.0)
    assert 600 - steps >= 150


def test_a_step_that_took_long_is_forgotten_in_time() -> None:
    clock = Clock()
    deadline = Deadline(clock.now + 600, save_seconds=1.0, clock=clock)
    assert not deadline.is_near()
    clock.now += 100  # a compiler at work
    runs(deadline, clock, 1.0, most=5)
    assert deadline.needed > 150
    runs(deadline, clock, 1.0, most=60)
    assert deadline.needed < 20


def test_without_a_deadline_nothing_ends() -> None:
    clock = Clock()
    assert runs(Deadline(None, 1.0, clock), clock, 1e6) == 10_000


def test_it_is_a_request_like_the_others() -> None:
    clock = Clock()
    with StopRequests(None, Deadline(clock.now + 60, 1.0, clock)) as requests:
        assert requests.pending() == [False] * len(REASONS)
        clock.now += 55
        assert requests.pending() == [False, False, False, False, True]
        clock.now -= 55
        assert requests.pending()[4], "once said, it stays"


def test_a_signal_is_noted_in_the_ranks_status_at_once() -> None:
    """A rank that never comes to the end of its step cannot be asked otherwise."""
    status = Status()
    with StopRequests(None, None, status) as requests:
        assert not status.is_to_end
        signal.raise_signal(signal.SIGTERM)
        assert status.is_to_end
        assert requests.pending()[0]


def test_who_says_when_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCZERO_DEADLINE", raising=False)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert env.deadline() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000")
    assert env.deadline() == 2000.0
    monkeypatch.setenv("HPCZERO_DEADLINE", "1500")
    assert env.deadline() == 1500.0
    monkeypatch.setenv("HPCZERO_DEADLINE", "soon")
    assert env.deadline() == 2000.0
