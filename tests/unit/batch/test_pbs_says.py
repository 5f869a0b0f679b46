"""The words of a real PBS (tests/unit/batch/pbs), and what is made of them."""

from pathlib import Path

import pytest

from hpczero.batch import pbs
from hpczero.batch.command import Answer, QueuedJob

CAPTURED = Path(__file__).parent / "pbs"


def jobs(name: str) -> dict[str, QueuedJob]:
    return {job.number: job for job in pbs.parse((CAPTURED / name).read_text())}


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        ("qstat-xf-walltime-exceeded.txt", "66.headnode", "exceeded resource walltime"),
        ("qstat-xf-qdel-running.txt", "2053.headnode", "deleted by user@headnode.hpc.example"),
        (
            "qstat-xf-deleted-while-queued-and-stuck-dependents.txt",
            "93.headnode",
            "deleted before it began",
        ),
        (
            "qstat-xf-bad-dependency-and-cascade.txt",
            "87.headnode",
            "removed by PBS, as the job that it depended on was",
        ),
        ("qstat-xf-F-R-H-W.txt", "1.headnode", "exit status 0"),
    ],
)
def test_why_a_job_ended(name: str, number: str, reason: str) -> None:
    found = jobs(name)[number]
    assert (found.state, found.reason) == ("ended", reason)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("265", "killed by signal 9"),
        ("271", "killed by signal 15"),
        ("-29", "exceeded resource walltime"),
        ("-4", "the daemon of its node was started again"),
        ("-7", "exit status -7"),
        ("256", "exit status 256"),
        ("2", "exit status 2"),
    ],
)
def test_why_a_job_ended_without_a_comment(status: str, reason: str) -> None:
    (found,) = pbs.parse(f"Job Id: 1.h\n    job_state = F\n    Exit_status = {status}\n\n")
    assert found.reason == reason


def test_jobs_that_wait_and_run() -> None:
    found = jobs("qstat-xf-F-R-H-W.txt")
    assert [job.state for job in found.values()] == ["ended", "running", "held", "queued", "queued"]
    assert found["6.headnode"].start == "Thu Dec 31 23:59:00 2026", (
        "when it may begin at the earliest"
    )
    assert found["3.headnode"].start == "Sun Nov 22 19:00:56 2026"
    assert found["4.headnode"].reason == "waits for job 3.headnode"
    assert {job.tag for job in found.values()} >= {"hpczero:3da115b3edbd:0"}
    (suspended,) = jobs("qstat-f-suspended.txt").values()
    assert (suspended.state, suspended.reason) == ("running", "suspended")


def test_a_value_of_several_lines_says_nothing_of_the_job() -> None:
    """PBS shows a line end in a value of -v as it is, without a tab."""
    text = (
        "Job Id: 1.h\n    job_state = R\n    Variable_List = A=one\njob_state = F\n,HPCZERO_TAG=t\n"
    )
    (found,) = pbs.parse(text)
    assert found.state == "running"


def test_queues_that_no_users_job_runs_in_are_left_out() -> None:
    text = (CAPTURED / "qstat-Qf-odd-queues.txt").read_text()
    found = pbs.queues(text)
    assert list(found) == ["workq", "debug", "nolimit", "nodesonly", "secs", "days"]
    assert found["workq"] == {"nodes": 4, "walltime": "02:00:00"}
    assert pbs.queues_left_out(text) == [
        "off (takes no jobs)",
        "route (hands jobs on to others)",
        "exec1 (takes jobs from another queue only)",
        "stopped (stopped)",
    ]


def test_what_is_said_of_several_jobs_is_said_once() -> None:
    unknown = "".join(f"qdel: Unknown Job Id {number}.headnode\n" for number in range(31, 38))
    down = "Connection refused\nqdel: cannot connect to server headnode (errno=15010)\n"
    first = ", ".join(f"{number}.headnode" for number in range(31, 36))
    said = Answer(153, "", unknown + down * 3).complaint
    assert said == (
        f"qdel: Unknown Job Id {first} and 2 more "
        "Connection refused qdel: cannot connect to server headnode (errno=15010)"
    )
    assert Answer(3, "", "").complaint == "exit code 3"
    assert Answer(3, "", "qsub: 3 4 5\n").complaint == "qsub: 3 4 5"


def test_the_last_job_of_a_chain_is_deleted_first() -> None:
    """Or the next one is released before it is deleted."""
    assert pbs.cancel(["1", "2", "3"]) == ["qdel", "3", "2", "1"]
