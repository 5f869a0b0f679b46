"""The exit code that a batch chain goes by."""

from types import SimpleNamespace

import pytest

from hpczero.spec.schema import Spec
from hpczero.train import run


@pytest.mark.parametrize(
    ("state", "saved", "code"),
    [
        ("finished", 4, 0),
        ("finished", -1, 0),
        ("stopped", 4, 75),
        ("stopped", 3, 1),
        ("stopped", -1, 1),
        ("failed", 4, 1),
    ],
)
def test_the_next_job_goes_on_only_from_a_run_that_was_stopped_and_saved(
    state: str, saved: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = SimpleNamespace(state=state, saved=saved, steps=4)
    monkeypatch.setattr(run, "_carry_out", lambda *_: (outcome, {}))
    job = SimpleNamespace(spec=Spec())
    assert run._train(job, None, "lines", 0.0) == code
