"""A rank that sleeps, stops, dies or does something else than the others: the job ends, and it
is named.
"""

from pathlib import Path

import pytest

from tests.support import faults
from tests.support.faults import KINDS, Case

FEW = [
    Case("stop", 0, shared=False, units=6),  # a rank waits for the first of six operations
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case("kill", 3, shared=False, units=6),
            Case("stop", 1, shared=True, units=40),
            Case("return", 2, shared=False, units=2),
            Case("eval_one", 3, shared=False, units=6),  # it meets the others in another operation
        )
    ),
]
PLACES = [(shared, units) for shared in (False, True) for units in (2, 6, 40)]
# Every kind at every stage, in all of these places by turns; `python -m tests.support.faults` tries
# all.
MANY = [
    Case(kind, stage, *PLACES[(number + stage) % len(PLACES)])
    for number, kind in enumerate(KINDS)
    for stage in range(4)
]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_job_ends_and_names_the_rank(case: Case, tmp_path: Path) -> None:
    outcome = faults.try_out(case, tmp_path, seconds=2.0)
    assert outcome.complaint(case) == "", outcome


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_kind_of_fault_at_every_stage(case: Case, tmp_path: Path) -> None:
    outcome = faults.try_out(case, tmp_path)
    assert outcome.complaint(case) == "", outcome


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("most likely the cause: rank 2 on here", True),
        ("most likely the cause: ranks 0 2 on here", False),
        ("most likely the cause: rank 1 on here", False),
        ("not come: rank 2 on here", False),
    ],
)
def test_a_rank_counts_as_named_if_it_is_the_only_one(text: str, expected: bool) -> None:
    assert faults.named(Case("stop", 0, shared=False, units=6), text) == expected
