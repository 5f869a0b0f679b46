"""Figures of runs beside each other, their order and the best, against what was made."""

import math
from pathlib import Path
from statistics import fmean, stdev

import pytest

from hpczero.runs.compared import TRAINING, VALIDATION, Compared, compare
from hpczero.runs.record import read_run
from tests.support.made_runs import TEXT, Made, evaluated, line, steady

SEEDS = {"a-1": 2.0, "a-2": 2.2, "b-1": 2.1, "b-2": 2.28}


def compared(folder: Path, each: bool = False, **made: Made) -> Compared:
    runs = [read_run(one.write(folder / name)) for name, one in made.items()]
    return compare(runs, ["finished"] * len(runs), each)


def of_seeds(*left_out: str) -> dict[str, Made]:
    return {
        name: steady(loss, seed=int(name[-1]), lr=0.001 if name[0] == "a" else 0.1)
        for name, loss in SEEDS.items()
        if name not in left_out
    }


def test_the_last_figures_of_a_run(tmp_path: Path) -> None:
    lines = [line(step, 5 - step / 10, tokens=10, seconds=0.5) for step in range(1, 41)]
    lines[19] |= evaluated(1.5, 0.1)
    lines[29] |= evaluated(1.75, 0.2)
    events = [{"time": "2026-01-01T00:00:00+00:00", "event": "start", "ranks": [{}] * 6}]
    summary = {"data": TEXT, "fullest": {"held": 5e9}}
    found = compared(tmp_path, x=Made(lines, events=events, summary=summary), y=steady(2.0))
    one = found.figures[0]
    assert (one.step, one.tokens, one.seconds, one.tokens_per_second) == (40, 400, 20, 20)
    assert (one.ranks, one.held) == (6, 5e9)
    assert (one.training_steps, one.training_loss) == (2, pytest.approx((1.1 + 1.0) / 2))
    assert one.training_error == pytest.approx(stdev([1.1, 1.0]) / math.sqrt(2))
    assert (one.validation_loss, one.standard_error) == (1.75, 0.2)
    assert (one.validation_step, one.validation_tokens) == (30, 300)
    assert (one.best_validation_loss, one.best_validation_step) == (1.5, 20)


def test_seeds_are_a_mean_a_deviation_and_a_range(tmp_path: Path) -> None:
    found = compared(tmp_path, **of_seeds())
    assert [group.name for group in found.groups] == ["a", "b"]
    spread = found.spread(found.groups[0], "validation_loss")
    assert spread.mean == pytest.approx(fmean([2.0, 2.2]))
    assert spread.deviation == pytest.approx(stdev([2.0, 2.2]))
    assert (spread.low, spread.high) == (2.0, 2.2)
    assert found.best
    assert found.best.margin.source == "paired seeds"
    assert found.best.margin.margin == pytest.approx(0.09)
    assert found.best.same_windows
    assert found.warnings == []


def test_the_losses_at_equal_points(tmp_path: Path) -> None:
    found = compared(tmp_path, **of_seeds())
    table = found.table("steps", 4)
    assert (table.points, table.common, table.span) == ([10, 20, 30, 40], 40, 2)
    first = table.training[0][0]
    assert first.mean == pytest.approx(2.1 + (1 / 9 + 1 / 10) / 2)
    assert first.deviation == pytest.approx(stdev([2.0, 2.2]))
    assert [math.isfinite(one.mean) for one in table.validation[0]] == [False] * 3 + [True]
    assert found.table("tokens", 4).training[1][3].mean == pytest.approx(
        2.19 + (1 / 39 + 1 / 40) / 2
    )


@pytest.mark.parametrize(("steps", "points"), [(30, [7.5, 15, 22.5, 30]), (8, [8, 20, 30, 40])])
def test_a_shorter_run_ends_the_table_unless_it_ended_early(
    steps: int, points: list[float], tmp_path: Path
) -> None:
    found = compared(tmp_path, long=steady(2.0), short=steady(3.0, steps=steps))
    table = found.table("tokens", 4)
    assert table.points == [point * 100 for point in points]
    assert table.common == steps * 100
    known = [math.isfinite(one.mean) for one in table.training[1]]
    assert known == [point <= steps for point in points]
    assert "from 3,000 to 4,000 tokens" in found.warnings[-1] or steps == 8


def test_one_shorter_run_of_three_does_not_end_the_table(tmp_path: Path) -> None:
    made = {"a": steady(2.0), "b": steady(2.5, lr=0.1), "c": steady(3.0, lr=0.2, steps=28)}
    table = compared(tmp_path, **made).table("steps", 4)
    assert (table.points, table.common) == ([10, 20, 28, 40], 28)
    assert [math.isfinite(one.mean) for one in table.training[2]] == [True] * 3 + [False]


def test_a_group_with_a_run_that_failed_has_no_place_in_the_order(tmp_path: Path) -> None:
    """Otherwise the seeds that were lucky would stand for all."""
    died = Made([line(1, float("nan"))], {"train.steps": "40", "optimizer.lr": "0.001"}, seed=2)
    found = compared(tmp_path, **of_seeds("a-2"), **{"a-2": died})
    assert [group.name for group in found.groups] == ["b", "a"]
    assert found.best is None
    assert "a has no place in the order: 1 of 2 runs has no validation loss" in found.warnings
    assert "a-2: no finite loss in 1 of 1 step" in found.warnings
    assert math.isnan(found.spread(found.groups[1], "validation_loss").mean)


def test_runs_with_one_seed_read_the_same_windows_if_they_read_as_many(tmp_path: Path) -> None:
    made = steady(2.5, lr=0.1)
    more = Made(made.lines, {**made.settings, "train.eval_batches": "9"})
    same = compared(tmp_path / "same", a=steady(2.0), b=made).best
    longer = compared(tmp_path / "longer", a=steady(2.0), b=more).best
    other = compared(tmp_path / "other", a=steady(2.0), b=steady(2.5, seed=2, lr=0.1)).best
    assert same and longer and other  # noqa: PT018
    assert [one.same_windows for one in (same, longer, other)] == [True, False, False]
    assert same.margin.source == "evaluations"


def test_without_evaluations_training_losses_count(tmp_path: Path) -> None:
    runs = {
        name: Made([line(step, loss + step % 2 / 10) for step in range(1, 81)], lr)
        for name, loss, lr in (("a", 2.0, {}), ("b", 2.06, {"optimizer.lr": "0.1"}))
    }
    found = compared(tmp_path, **runs)
    assert found.best
    assert (found.by, found.best.by) == (TRAINING, TRAINING)
    error = stdev([0.1, 0.0, 0.1, 0.0]) / math.sqrt(4)
    assert found.best.margin.half == pytest.approx(1.96 * math.sqrt(2) * error, rel=1e-4)
    assert not found.best.margin.is_more_than_noise


def other(made: Made, **more: object) -> Made:
    return Made(made.lines, made.settings, made.seed, made.events, {**made.summary, **more})


def test_losses_of_other_texts_have_no_best(tmp_path: Path) -> None:
    another = other(steady(1.0, lr=0.1), data={"path": "b.h5", "fingerprint": "another text"})
    found = compared(tmp_path, a=steady(2.0), b=another)
    assert found.best is None
    assert found.by == VALIDATION
    assert "losses of different texts cannot be compared" in found.warnings[0]


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [({}, True), ({"data.source": '"another.h5"'}, False), ({"model.family": '"bert"'}, False)],
)
def test_a_run_that_has_not_said_its_text(
    settings: dict[str, str], is_known: bool, tmp_path: Path
) -> None:
    made = steady(1.0, lr=0.1)
    unfinished = Made(made.lines, {**made.settings, **settings}, summary={})
    found = compared(tmp_path, a=steady(2.0), b=unfinished)
    assert bool(found.best) == is_known


def test_random_tokens_are_alike_whatever_their_seed(tmp_path: Path) -> None:
    made = {}
    for name, one in of_seeds().items():
        data = {"path": "synthetic", "vocabulary": 9, "fingerprint": f"synthetic-{one.seed}-9"}
        made[name] = other(one, data=data)
    assert compared(tmp_path, **made).best


def test_longer_sequences_are_said(tmp_path: Path) -> None:
    made = steady(1.0, lr=0.1)
    longer = Made(made.lines, {**made.settings, "model.seq_len": "2048"})
    found = compared(tmp_path, a=steady(2.0), b=longer)
    assert found.best
    assert "sequences of 128 and 2,048 tokens" in found.warnings[0]


def test_a_run_of_which_only_the_summary_is_left(tmp_path: Path) -> None:
    figures = {"validation_loss": 1.0, "validation_standard_error": 0.1, "validation_step": 9}
    sums = {"steps": 9, "tokens": 900, "seconds": 3, "ranks": 2, "final_loss": 1.1, "data": TEXT}
    found = compared(tmp_path, a=steady(2.0), b=Made(events=[], summary=figures | sums))
    (one,) = [figure for figure in found.figures if figure.ranks == 2]
    assert (one.step, one.tokens, one.seconds, one.tokens_per_second) == (9, 900, 3, 300)
    assert (one.validation_loss, one.validation_tokens, one.training_loss) == (1.0, 900, 1.1)
    assert "b has no step in metrics.jsonl" in found.warnings[0]
    assert found.groups[0].name == "b"
