"""summary.json and the closing words of a run that took several jobs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from hpczero.model.families import layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.outlook import Outlook, outlook
from hpczero.planner.platform import CPUS
from hpczero.spec.schema import Batch, Spec
from hpczero.train.summary import Earlier, LastJob, closing_words, fullest, measured_step, of_run

STEP_TOKENS = 100


def line(step: int, **more: Any) -> str:
    return (
        json.dumps({"step": step, "loss": 5.0 - step, "tokens": 50, "step_seconds": 2.0, **more})
        + "\n"
    )


EARLIER = Earlier.of(
    [
        line(1),
        line(2, validation_loss=2.5, validation_tokens=10, validation_tokens_of_split=40),
        line(3),
    ]
)
JOB = LastJob(
    first=3, steps=2, step_tokens=STEP_TOKENS, seconds=4.0, ranks=2, first_loss=1.5, final_loss=1.25
)


def said(run: dict[str, Any], steps: int) -> str:
    return "\n".join(closing_words({"steps": steps, "unigram_entropy": 3.0} | run, "tiny"))


def test_run_and_last_job_are_apart() -> None:
    found = of_run(JOB, EARLIER, None)
    assert (found["first_loss"], found["final_loss"], found["tokens"], found["seconds"]) == (
        4.0,
        1.25,
        350,
        10.0,
    )
    assert found["tokens_per_second"] == 35.0
    assert found["last_job"] == {
        "first_step": 4,
        "steps": 2,
        "first_loss": 1.5,
        "tokens": 200,
        "seconds": 4.0,
        "tokens_per_second": 50.0,
        "ranks": 2,
    }
    words = said(found, 5)
    assert "on 350 tokens in 5 steps\n" in words
    assert (
        "last job:   steps 4 to 5, 200 tokens (4 s, 50 tokens/s on 2 ranks), loss 1.5000 at "
        "its first step"
    ) in words
    assert "loss:       4.0000 at the first step, 1.2500 at the last" in words


def test_an_older_validation_says_when_it_was() -> None:
    found = of_run(JOB, EARLIER, None)
    assert (found["validation_loss"], found["validation_step"]) == (2.5, 2)
    assert "over 10 of 40 tokens after step 2;" in said(found, 5)
    new = {
        "validation_loss": 2.0,
        "validation_tokens": 40,
        "validation_tokens_of_split": 40,
        "validation_standard_error": 0.0,
    }
    words = said(of_run(JOB, EARLIER, new | {"validation_step": 5}), 5)
    assert "validation: 2.0000 over the whole split; the text's" in words


def test_a_run_of_one_job_is_one_line() -> None:
    job = LastJob(
        first=0,
        steps=1,
        step_tokens=STEP_TOKENS,
        seconds=4.0,
        ranks=1,
        first_loss=1.5,
        final_loss=1.5,
    )
    found = of_run(job, Earlier(), None)
    assert (
        found["tokens"],
        found["seconds"],
        found["tokens_per_second"],
        found["validation_loss"],
    ) == (100, 4.0, 25.0, None)
    assert "trained:    tiny, on 100 tokens in 1 step (4 s, 25 tokens/s on 1 rank)" in said(
        found, 1
    )
    assert "last job" not in said(found, 1)


def test_what_is_not_known_of_lost_lines_is_not_said() -> None:
    found = of_run(JOB, Earlier.of([line(3)]), None)
    assert (found["first_loss"], found["seconds"], found["tokens_per_second"]) == (None, None, None)
    assert found["tokens"] == 50 + 2 * STEP_TOKENS + 200
    assert "loss:       ? at the first step" in said(found, 5)


def test_nothing_left_to_do_keeps_the_runs_figures() -> None:
    job = LastJob(
        first=3,
        steps=0,
        step_tokens=STEP_TOKENS,
        seconds=0.5,
        ranks=1,
        first_loss=None,
        final_loss=None,
    )
    found = of_run(job, EARLIER, None)
    assert (
        found["first_loss"],
        found["final_loss"],
        found["tokens"],
        found["last_job"]["first_step"],
    ) == (4.0, 2.0, 150, None)


def test_figures_that_are_none_are_passed_over() -> None:
    earlier = Earlier.of([line(1, loss=None, tokens="many", step_seconds=True)])
    assert (earlier.first_loss, earlier.tokens, earlier.seconds) == (None, 0, 0.0)


def test_the_fullest_moment_is_said() -> None:
    assert fullest(None) is None
    line = {"step": 1200, "rank": 3, "host": "n2", "held": 1_230_000_000, "node": 2}
    found = fullest(line | {"predicted": {"weights": 900_000_000, "runtime": 250_000_000}})
    assert found == {
        "step": 1200,
        "rank": 3,
        "host": "n2",
        "held": 1_230_000_000,
        "predicted": 1_150_000_000,
    }
    summary = of_run(JOB, EARLIER, None) | {"fullest": found}
    words = "memory:     at most 1.23 GB: rank 3 on n2, at step 1,200 (predicted: 1.15 GB)"
    assert words in said(summary, 5)
    unknown = summary | {"fullest": fullest(line | {"predicted": {}})}
    assert said(unknown, 5).endswith("rank 3 on n2, at step 1,200")


def predicted() -> Outlook:
    spec = Spec(batch=Batch(cluster="epyc-7763"))
    found = outlook(spec, layers(spec.model), Allocation(2, 2), CPUS)
    assert found
    assert found.time
    return found


def test_the_step_is_the_median_of_this_job_s_beside_what_was_predicted() -> None:
    assert measured_step([], None) is measured_step([], predicted()) is None
    assert measured_step([0.5, 9.0, 0.25], None) == {"seconds": 0.5, "steps": 3, "predicted": None}
    found = measured_step([0.5, 0.25], predicted())
    assert found == {"seconds": 0.375, "steps": 2, "predicted": predicted().as_data()}
    assert json.loads(json.dumps(found)) == found


def test_the_closing_words_hold_the_step_against_what_was_predicted() -> None:
    summary = of_run(JOB, EARLIER, None)
    said_of_it = predicted().as_data() | {"step_seconds": 0.12345}
    step = {"seconds": 0.25, "steps": 3, "predicted": said_of_it}
    line = "a step:     0.25 s in the median, 0.123 s predicted for epyc-7763"
    assert said(summary | {"step": step}, 5).splitlines()[-1] == line


@pytest.mark.parametrize("step", [None, measured_step([0.25], None)])
def test_a_step_of_which_nothing_was_predicted_is_not_said(step: dict[str, Any] | None) -> None:
    summary = of_run(JOB, EARLIER, None)
    assert said(summary | {"step": step}, 5) == said(summary, 5)


def test_why_nothing_was_predicted_is_in_the_summary_alone() -> None:
    problem = replace(predicted(), time=None, problem="it has GPUs")
    step = measured_step([0.25], problem)
    assert step == {
        "seconds": 0.25,
        "steps": 1,
        "predicted": {"cluster": "epyc-7763", "problem": "it has GPUs"},
    }
    summary = of_run(JOB, EARLIER, None)
    assert said(summary | {"step": step}, 5) == said(summary, 5)


def test_what_is_lost_is_what_is_computed_again() -> None:
    again = [
        line(4, evaluation_seconds=0.5, time="2026-01-01T00:00:04+00:00"),
        line(5, time="2026-01-01T00:00:06+00:00"),
        line(6, step_seconds="x", evaluation_seconds=None),
    ]
    earlier = Earlier.of([line(1), line(2), line(3)], again)
    assert (earlier.steps, earlier.seconds) == (3, 6.0)
    assert earlier.lost == {
        "lost_steps": 3,
        "lost_seconds": 4.5,
        "lost_until": "2026-01-01T00:00:06+00:00",
    }


def test_nothing_is_lost_where_no_step_is_computed_again() -> None:
    assert Earlier.of([line(1)]).lost == {}
    assert Earlier().lost == {}
