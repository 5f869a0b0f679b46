"""The state of a run, from its files and from what the scheduler still knows."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hpczero.batch import run_status, slurm
from hpczero.batch.command import QueuedJob
from hpczero.batch.submission import Submission
from hpczero.lock import RunLock
from tests.support.runs import by_hand

JOBS = ("11", "12", "13")


@pytest.fixture
def record(tmp_path: Path) -> Submission:
    own = Submission.new(tmp_path / "a-run", "slurm", "generic/slurm", 2, 4, 3600, 3)
    own.path.mkdir(parents=True)
    for number in JOBS:
        own = own.with_job(number)
    own.write()
    (own.path / "spec.toml").write_text("[train]\nsteps = 100\n")
    return own


def steps(record: Submission, count: int, ago: float = 0.0, seconds: float = 2.0) -> None:
    lines = [
        json.dumps(
            {
                "step": step,
                "loss": 5.0 - step / 100,
                "step_seconds": seconds,
                "tokens_per_second": 50.0,
            }
        )
        for step in range(1, count + 1)
    ]
    path = record.run / "metrics.jsonl"
    path.write_text("\n".join(lines) + '\n{"step": 99')
    os.utime(path, (time.time() - ago,) * 2)


def links(record: Submission, *lines: str) -> None:
    (record.path / "links").write_text(
        "".join(f"2026-01-05T1{hour}:00:00Z {line}\n" for hour, line in enumerate(lines))
    )


def queued(number: str, state: Any, reason: str = "") -> QueuedJob:
    return QueuedJob(number, state, reason, "")


def states(found: run_status.Progress) -> list[str]:
    return [link.state for link in found.links]


def test_a_run_that_waits(record: Submission) -> None:
    found = run_status.status_of(
        record.run,
        [
            queued("11", "queued", "Priority"),
            queued("12", "queued", "Dependency"),
            queued("13", "held", "JobHeldUser"),
        ],
    )
    assert (found.state, found.reason, found.step, found.steps) == ("queued", "Priority", 0, 100)
    assert states(found) == ["queued", "queued", "held"]


def test_a_run_that_runs(record: Submission) -> None:
    steps(record, 40)
    links(record, "11 began none", "11 ended 75", "12 began step-00000020")
    found = run_status.status_of(
        record.run, [queued("12", "running"), queued("13", "queued", "Dependency")]
    )
    assert (found.state, found.step, found.loss, found.seconds_per_step, found.seconds_left) == (
        "running",
        40,
        4.6,
        2.0,
        120.0,
    )
    assert states(found) == ["interrupted", "running", "queued"]
    assert found.job_seconds_left == 0.0
    soon = run_status.status_of(
        record.run,
        [queued("12", "running")],
        now=datetime(2026, 1, 5, 12, 40, tzinfo=UTC).timestamp(),
    )
    assert soon.job_seconds_left == 1200.0, "of an hour that began at twelve"
    assert found.node_hours == pytest.approx(2.0), (
        "of the first job; the second gave no sign of life"
    )


def test_no_step_for_ten_times_the_median_is_said(record: Submission) -> None:
    links(record, "11 began none")
    running = [queued("11", "running")]
    steps(record, 40, ago=50, seconds=10.0)
    assert run_status.status_of(record.run, running).state == "running"
    steps(record, 40, ago=120, seconds=10.0)
    found = run_status.status_of(record.run, running)
    assert found.state == "STALLED"
    assert "one takes 10 s" in found.reason
    steps(record, 40, ago=50, seconds=0.01)
    assert run_status.status_of(record.run, running).state == "running", (
        "a minute is nothing to worry about"
    )
    steps(record, 40, ago=3000, seconds=10.0)
    (record.run / "events.jsonl").write_text(
        json.dumps({"event": "start", "time": "2099-01-01T00:00:00+00:00"}) + "\n"
    )
    assert run_status.status_of(record.run, running).state == "running", (
        "it was started again since"
    )
    for ago, state in ((500, "running"), (700, "STALLED")):
        moment = datetime.fromtimestamp(time.time() - ago, UTC).isoformat()
        (record.run / "events.jsonl").write_text(
            json.dumps({"event": "start", "time": moment}) + "\n"
        )
        assert run_status.status_of(record.run, running).state == state, (
            "the first step after a start may take longer"
        )


def test_a_run_that_is_finished_and_forgotten_by_the_scheduler(record: Submission) -> None:
    steps(record, 100)
    links(record, "11 began none", "11 ended 0", "12 passed 0", "13 passed 0")
    (record.run / "summary.json").write_text('{"state": "finished"}')
    found = run_status.status_of(record.run, [])
    assert (found.state, found.step, found.seconds_left) == ("finished", 100, None)
    assert states(found) == ["finished", "passed", "passed"]


def test_a_run_that_failed_says_why(record: Submission) -> None:
    links(record, "11 began none", "11 ended 2", "12 passed 0", "13 passed 0")
    record.close("the input is wrong (exit code 2)")
    record.log("11").write_text(
        "".join(f"line {number}\n" for number in range(30))
        + "hpczero: nowhere.h5 does not exist\n\n"
    )
    found = run_status.status_of(record.run, [])
    assert (found.state, found.reason) == ("failed", "the input is wrong (exit code 2)")
    assert found.links[0].reason == "exit code 2 (the input is wrong)"
    assert found.last_lines[-1] == "hpczero: nowhere.h5 does not exist"
    assert len(found.last_lines) == 12


@pytest.mark.parametrize(
    ("code", "job", "reason"),
    [
        ("137", queued("11", "ended", "OUT_OF_MEMORY"), "exit code 137 (signal 9), OUT_OF_MEMORY"),
        ("1", queued("11", "ended", "FAILED"), "exit code 1"),
        ("", queued("11", "ended", "NODE_FAIL"), "NODE_FAIL"),
        ("", None, "it ended without a word: killed, or its node failed"),
    ],
)
def test_how_a_job_ended(record: Submission, code: str, job: QueuedJob | None, reason: str) -> None:
    links(record, "11 began none", *([f"11 ended {code}"] if code else []))
    found = run_status.status_of(record.run, [job] if job else [])
    assert found.links[0].reason == reason
    assert found.state == "failed"


def test_a_scheduler_that_does_not_answer_has_not_ended_the_jobs(record: Submission) -> None:
    links(record, "11 began none", "11 ended 75", "12 began step-00000020")
    found = run_status.status_of(record.run, [], silent={"slurm"})
    assert (found.state, states(found)) == ("unknown", ["interrupted", "unknown", "unknown"])
    assert run_status.status_of(record.run, [], silent={"pbs"}).state == "failed"


def test_a_job_that_was_requeued_runs_again(record: Submission) -> None:
    links(record, "11 began none", "11 ended 143", "11 began step-00000005")
    assert states(run_status.status_of(record.run, [queued("11", "running")]))[0] == "running"
    assert (
        states(run_status.status_of(record.run, [queued("11", "queued", "BeginTime")]))[0]
        == "queued"
    )


def test_files_that_are_half_written_or_nonsense(record: Submission) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "summary.json"):
        (record.run / name).write_bytes(b'\xff\x00{"step":\n[1]\nnull\n')
    (record.path / "links").write_bytes(b"\xff\n\n11 began\n")
    (record.path / "spec.toml").write_text("= nothing")
    found = run_status.status_of(record.run, [])
    assert (found.step, found.steps, found.loss) == (0, 0, None)


def test_the_words_of_squeue() -> None:
    text = """11|PENDING|Resources|2026-01-05T10:00:00|hpczero:ab12:0
12|PENDING|JobHeldUser|N/A|hpczero:ab12:1
15|SPECIAL_EXIT|None|N/A|
13|RUNNING|None|2026-01-05T09:00:00|
14|TIMEOUT|TimeLimit|2026-01-05T09:00:00|a|b
slurm_load_jobs error: nonsense
"""
    first, second, special, third, fourth = slurm.parse(text)
    assert (first.state, first.reason, first.start, first.tag) == (
        "queued",
        "Resources",
        "2026-01-05T10:00:00",
        "hpczero:ab12:0",
    )
    assert (second.state, second.reason, second.start) == ("held", "JobHeldUser", "")
    assert special.state == "held", "it may run again"
    assert (third.state, third.reason) == ("running", "")
    assert (fourth.state, fourth.reason, fourth.tag) == ("ended", "TIMEOUT", "a|b")


def test_a_folder_with_signs_of_slurms_own_in_its_name() -> None:
    words = slurm.submission(Path("/a%j/job.sh"), Path("/a%j"), "tag", "", held=False)
    assert "--output=/a%%j/log-%j" in words


@pytest.mark.parametrize(
    ("ended", "saved", "state", "reason"),
    [
        ("finished", 100, "finished", ""),
        ("stopped", 40, "continues", "SIGTERM"),
        ("stopped", 0, "stopped", "SIGTERM"),
        ("failed", 0, "failed", "SIGTERM"),
        ("", 40, "failed", "it ended without a word: killed, or its node failed"),
    ],
)
def test_a_run_that_was_started_by_hand(
    tmp_path: Path, ended: str, saved: int, state: str, reason: str
) -> None:
    found = run_status.status_of(by_hand(tmp_path / "run", ended=ended, saved=saved), [])
    assert (found.state, found.reason) == (state, reason)
    assert (found.step, found.steps, found.loss, found.last_save) == (40, 100, 4.6, saved or None)
    assert found.age_seconds is not None
    assert found.age_seconds < 60


def test_a_run_that_was_started_by_hand_and_goes_on(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "run")
    with RunLock(run):
        found = run_status.status_of(run, [])
        assert (found.state, found.seconds_left) == ("running", 120.0)
        assert f"process {os.getpid()} on " in found.reason
        later = run_status.status_of(run, [], now=time.time() + 700)
        assert later.state == "STALLED"
    assert run_status.status_of(run, []).state == "failed"


def test_a_run_that_was_cancelled(record: Submission) -> None:
    links(record, "11 began none", "11 ended 75", "12 began step-00000005")
    record.close("cancelled")
    found = run_status.status_of(record.run, [queued("12", "ended", "deleted by ada")])
    assert (found.state, states(found)) == ("cancelled", ["interrupted", "gone", "cancelled"])
    by_hand(record.run)  # and started again, by hand
    os.utime(record.path / "over", (1, 1))
    (record.path / "links").unlink()
    assert run_status.status_of(record.run, []).state == "failed"
    by_hand(record.run, ended="stopped", saved=40)
    assert run_status.status_of(record.run, []).state == "continues"


def test_a_chain_that_stopped_in_time_continues(record: Submission) -> None:
    links(record, *(f"{one} {word}" for one in JOBS for word in ("began none", "ended 75")))
    by_hand(record.run, ended="stopped", saved=40)
    os.utime(record.run / "events.jsonl")
    found = run_status.status_of(record.run, [])
    assert (found.state, found.reason) == ("continues", "SIGTERM")
    record.close("no progress: 3 jobs in a row ended without a new checkpoint")
    os.utime(record.path / "over", (time.time() + 10,) * 2)
    found = run_status.status_of(record.run, [])
    assert found.state == "stopped"
    assert found.reason.startswith("no progress")


def test_where_no_scheduler_answers_the_lock_says_which_job_runs(
    record: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    links(record, "11 began none")
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    with RunLock(record.run):
        found = run_status.status_of(record.run, [], silent={"slurm"})
        assert (found.state, states(found)) == ("running", ["running", "unknown", "unknown"])


def test_the_first_span_of_a_job_that_was_requeued_counts(record: Submission) -> None:
    """Its node failed, so that it said nothing of an end: it counts until the job began again."""
    began = ["2026-01-05T10:00:00Z 11 began none", "2026-01-05T10:30:00Z 11 began none"]
    (record.path / "links").write_text("\n".join([*began, "2026-01-05T10:45:00Z 11 ended 0", ""]))
    record.log("11").write_text("a word after its end\n")
    assert run_status.status_of(record.run, []).node_hours == pytest.approx(2 * 0.75)
    late = began[1].replace("10:30", "16:30")
    (record.path / "links").write_text(
        "\n".join([began[0], late, "2026-01-05T16:45:00Z 11 ended 0", ""])
    )
    assert run_status.status_of(record.run, []).node_hours == pytest.approx(2 * 1.25), (
        "an hour is its walltime"
    )


def test_a_requeued_job_has_its_walltime_again(record: Submission) -> None:
    """It began at ten and again at half past: at eleven it has half an hour of its hour left."""
    began = ["2026-01-05T10:00:00Z 11 began none", "2026-01-05T10:30:00Z 11 began none"]
    (record.path / "links").write_text("\n".join([*began, ""]))
    now = datetime(2026, 1, 5, 11, tzinfo=UTC).timestamp()
    found = run_status.status_of(record.run, [queued("11", "running")], now=now)
    assert found.job_seconds_left == 1800.0


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(record: Submission) -> None:
    for path in ("metrics.jsonl", "events.jsonl", "summary.json", "spec.toml", "lock"):
        os.mkfifo(record.run / path)
    (record.path / "spec.toml").unlink()
    assert run_status.status_of(record.run, []).step == 0


@pytest.mark.parametrize("step", ['"many"', "null", "[1]", "1e400", '{"a": 1}'])
def test_figures_of_wrong_types_are_left_out(record: Submission, step: str) -> None:
    line = f'{{"step": 3, "step_seconds": 1.0, "loss": {step}, "tokens_per_second": {step}}}'
    bad = f'{{"step": {step}, "step_seconds": {step}}}'
    (record.run / "metrics.jsonl").write_text(f"{line}\n{bad}\n")
    found = run_status.status_of(record.run, [])
    assert (found.step, found.loss, found.tokens_per_second) == (3, None, None)


@pytest.mark.parametrize(
    "values",
    [
        {"jobs": ["--user=root"]},
        {"jobs": ["11 12"]},
        {"jobs": "-u"},
        {"nodes": "2"},
        {"nodes": 10**400},
        {"walltime": None},
        {"walltime": True},
        {"scheduler": "lsf"},
        {"scheduler": ["slurm"]},
        {"id": 5},
    ],
)
def test_a_record_of_a_submission_that_nobody_wrote(
    record: Submission, values: dict[str, Any]
) -> None:
    """Its job numbers become words of scancel and qdel."""
    path = record.path / "submission.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    assert Submission.read(record.path) is None
    assert run_status.status_of(record.run, []).links == []


def test_a_pipe_among_the_books_is_not_waited_for(record: Submission) -> None:
    for name in ("links", "over"):
        os.mkfifo(record.path / name)
    assert run_status.status_of(record.run, []).links != []
    (record.path / "submission.json").unlink()
    os.mkfifo(record.path / "submission.json")
    assert run_status.status_of(record.run, []).links == []
