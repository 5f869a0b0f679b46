"""The learning rate at every step, and the loss scale."""

import pytest

from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.zero.loss_scale import LossScale
from hpczero.spec.schema import Optimizer, Schedule, Spec, Train


def rates(steps: int, **schedule: object) -> list[float]:
    spec = Spec(
        train=Train(steps=steps), optimizer=Optimizer(lr=1.0), schedule=Schedule(**schedule)
    )
    return [learning_rate(spec, step) for step in range(steps)]


def test_warm_up_reaches_the_full_rate_at_its_last_step():
    assert rates(8, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear():
    assert rates(6, name="linear", warmup_steps=1, min_lr=0.2) == pytest.approx(
        [1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine():
    values = rates(11, name="cosine", min_lr=0.1)
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.55)
    assert values[10] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)


def test_wsd_keeps_the_rate_then_decays():
    values = rates(10, name="wsd", warmup_steps=2, decay_steps=4)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])
    assert rates(10, name="wsd")[:9] == [1.0] * 9


def test_polynomial_is_what_is_left_to_a_power():
    assert rates(5, name="polynomial", power=2.0) == pytest.approx([1, 9 / 16, 1 / 4, 1 / 16, 0])
    assert rates(6, name="polynomial", warmup_steps=1) == rates(6, name="linear", warmup_steps=1)
    assert rates(5, name="polynomial", power=0.5, min_lr=0.5)[3:] == pytest.approx([0.75, 0.5])


def test_the_inverse_root_begins_at_the_end_of_the_warm_up():
    values = rates(64, name="inverse_sqrt", warmup_steps=4)
    assert values[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, (4 / 5) ** 0.5])
    assert values[15] == pytest.approx(0.5)
    assert values[63] == pytest.approx(0.25)
    assert rates(64, name="inverse_sqrt", min_lr=0.3)[63] == 0.3
    assert rates(4, name="inverse_sqrt")[3] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "name", ["constant", "linear", "cosine", "wsd", "polynomial", "inverse_sqrt"]
)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 2), (3, 2)])
def test_tiny_runs_have_a_rate(name, steps, warmup):
    values = rates(steps, name=name, warmup_steps=warmup)
    assert all(0 <= rate <= 1 for rate in values)
    assert max(values) == 1


def test_beyond_the_last_step_the_rate_stays_low():
    spec = Spec(
        train=Train(steps=5),
        optimizer=Optimizer(lr=1.0),
        schedule=Schedule(name="cosine", min_lr=0.1),
    )
    assert learning_rate(spec, 50) == pytest.approx(0.1)


def test_loss_scale_halves_on_overflow_and_doubles_after_a_thousand_good_steps():
    scale = LossScale(1024.0, dynamic=True)
    scale = scale.after(overflow=True)
    assert scale.value == 512.0
    for _ in range(999):
        scale = scale.after(overflow=False)
    assert scale.value == 512.0
    doubled = scale.after(overflow=False)
    assert (doubled.value, doubled.after(overflow=False).value) == (1024.0, 1024.0)
    assert scale.good_steps == 999
    assert scale.after(overflow=True).after(overflow=False).good_steps == 1


def test_loss_scale_stays_in_bounds():
    low, high = LossScale(2.0**-14, dynamic=True), LossScale(2.0**24, dynamic=True, good_steps=999)
    assert low.after(overflow=True).value == 2.0**-14
    assert high.after(overflow=False).value == 2.0**24


def test_constant_scale_never_moves():
    scale = LossScale(1.0, dynamic=False)
    assert scale.after(overflow=True) == scale.after(overflow=False) == scale
