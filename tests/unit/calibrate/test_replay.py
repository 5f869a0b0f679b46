"""A step composed again of a trace's spans takes what it took, and each cause its part."""

import random

import pytest

from hpczero.calibrate.replay import replay
from hpczero.planner.composed import Pipeline
from hpczero.planner.step_costs import CAUSES
from tests.support.traced_steps import Known, course, traced

PIPELINES = [
    Pipeline("1f1b", 2, 1, 4),
    Pipeline("1f1b", 3, 1, 5),
    Pipeline("gpipe", 3, 1, 4),
    Pipeline("interleaved", 2, 2, 4),
    Pipeline("interleaved", 3, 2, 7),
]
ALONE = Pipeline("1f1b", 1, 1, 3)
UNIT = 50_000  # ns: what is shorter than 20,000 is no wait for a message


def drawn(of: Pipeline, seed: int, **more: dict[str, int]) -> Known:
    """Draw the times of a step's parts and messages."""
    choice = random.Random(seed)
    parts = of.stages * of.chunks
    forward = [UNIT * choice.randint(20, 30) for _ in range(parts)]
    backward = [UNIT * choice.randint(30, 60) for _ in range(parts)]
    transfers = [UNIT * choice.randint(1, 9) for _ in range(parts - 1)]
    return Known(forward, backward, transfers, **more)


def test_one_stage_takes_its_actions_and_what_is_around_them() -> None:
    known = Known([2_000_000], [5_000_000], waits={"tensor": 250_000, "data": 500_000})
    found = replay(traced(ALONE, known))
    expected = {
        "compute": 3 * (7_000_000 - 2 * 750_000),
        "tensor": 6 * 250_000,
        "data": 6 * 500_000,
        "optimizer": 700_000,
        "overhead": 400_000,
    }
    assert found.causes == pytest.approx(
        {cause: expected.get(cause, 0) / 1e9 for cause in CAUSES}, abs=1e-12
    )
    assert found.seconds == pytest.approx(found.measured, rel=1e-6)
    assert found.measured == pytest.approx((3 * 7_000_000 + 1_100_000) / 1e9)


@pytest.mark.parametrize("of", PIPELINES, ids=lambda of: f"{of.kind}-{of.stages}")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_pipeline_takes_its_course(of: Pipeline, seed: int) -> None:
    known = drawn(of, seed)
    found = replay(traced(of, known))
    causes = found.causes
    makespan, still = (course(of, known, messages).makespan for messages in (True, False))
    assert found.seconds == pytest.approx(found.measured, rel=1e-6)
    assert found.measured == pytest.approx((makespan + 1_100_000) / 1e9)
    # the first stage ends last
    parts = [chunk * of.stages for chunk in range(of.chunks)]
    computing = sum(known.forward[part] + known.backward[part] for part in parts)
    assert causes["compute"] == pytest.approx(computing * of.micro_batches / 1e9)
    assert causes["messages"] == pytest.approx((makespan - still) / 1e9)
    assert causes["messages"] > 0
    assert causes["bubble"] == pytest.approx((still - computing * of.micro_batches) / 1e9)
    assert (causes["optimizer"], causes["overhead"]) == pytest.approx((7e-4, 4e-4))
    assert causes["data"] == causes["tensor"] == 0


@pytest.mark.parametrize("of", PIPELINES, ids=lambda of: f"{of.kind}-{of.stages}")
def test_waits_inside_actions_land_in_their_causes(of: Pipeline) -> None:
    waits = {"tensor": 150_000, "data": 20_000, "data gathers": 20_000, "shard": 10_000}
    waits |= {"shard gathers": 20_000, "replica": 10_000, "replica averages": 20_000}
    waits |= {"pipeline": 50_000, "world": 25_000}
    known = drawn(of, 4, waits=waits)
    found = replay(traced(of, known))
    plain = replay(traced(of, drawn(of, 4)))
    times = 2 * of.chunks * of.micro_batches / 1e9  # actions of a stage
    of_causes = {"tensor": 150_000, "data": 100_000, "messages": 50_000}
    for cause, seconds in of_causes.items():
        more = found.causes[cause] - plain.causes[cause]
        assert more == pytest.approx(times * seconds)
    assert found.causes["overhead"] - plain.causes["overhead"] == pytest.approx(times * 25_000)
    less = plain.causes["compute"] - found.causes["compute"]
    assert less == pytest.approx(times * sum(waits.values()))
    assert found.causes["bubble"] == pytest.approx(plain.causes["bubble"])
    assert found.seconds == pytest.approx(found.measured, rel=1e-6)


def test_messages_too_short_to_tell_are_none() -> None:
    of = Pipeline("1f1b", 2, 1, 4)
    known = Known([2_000_000] * 2, [4_000_000] * 2, [15_000])
    found = replay(traced(of, known))
    delay = course(of, known).makespan - course(of, known, transfers=False).makespan
    assert found.causes["messages"] == 0
    assert found.causes["bubble"] == pytest.approx(6e-3)
    assert found.measured - found.seconds == pytest.approx(delay / 1e9)


def test_pipelines_beside_each_other_are_one_in_the_mean() -> None:
    of = Pipeline("1f1b", 2, 1, 4)
    alone, beside = (replay(traced(of, drawn(of, 5), columns)) for columns in (1, 3))
    assert beside.causes == pytest.approx(alone.causes)
    assert beside.seconds == pytest.approx(beside.measured, rel=1e-6)


def test_a_wait_in_the_optimizer_step_is_not_counted_twice() -> None:
    """Stages that end early wait there for the first one: that is the bubble already."""
    of = Pipeline("1f1b", 3, 1, 5)
    known = Known([1_000_000] * 3, [9_000_000] * 3, [50_000] * 2)
    found = replay(traced(of, known))
    assert course(of, known).intervals[2][-1].end < course(of, known).makespan - 18_000_000
    assert found.causes["optimizer"] == pytest.approx(7e-4)
    assert found.causes["data"] == 0
    assert found.seconds == pytest.approx(found.measured, rel=1e-6)


def test_a_data_rank_that_is_early_waits_for_the_late_one() -> None:
    """Its wait is data's: what it computes less is in the mean of its stage."""
    known = Known([2_000_000], [5_000_000], late=1_000_000)
    found = replay(traced(ALONE, known, columns=2))
    assert found.causes["data"] == pytest.approx(5e-4)
    assert found.causes["compute"] == pytest.approx((21_000_000 - 500_000) / 1e9)
    assert found.seconds == pytest.approx(found.measured, rel=1e-6)
