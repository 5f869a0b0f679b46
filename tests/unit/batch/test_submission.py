"""The record of a submission."""

import math
from pathlib import Path

from hpczero.batch.submission import Submission


def test_the_last_moment_is_the_end_of_the_last_job_and_never_while_one_runs(
    tmp_path: Path,
) -> None:
    record = Submission.new(tmp_path, "slurm", "generic/slurm", 1, 1, 600, 2)
    record.path.mkdir(parents=True)
    assert record.last_event_time == 0
    events = [
        ("1970-01-01T00:00:05+00:00 17 began -", math.inf),
        ("1970-01-01T00:00:09+00:00 17 ended 75", 9),
        ("1970-01-01T00:00:11+00:00 18 began step-00000004", math.inf),
        ("1970-01-01T00:00:10+00:00 19 passed -", math.inf),
        ("1970-01-01T00:00:20+00:00 18 ended 1", 20),
        ("torn", 20),
    ]
    for line, expected in events:
        with (record.path / "links").open("a") as links:
            links.write(line + "\n")
        assert record.last_event_time == expected, line
