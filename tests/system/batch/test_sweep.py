"""A sweep as an array of jobs of a real Slurm (scripts/slurm_testbed.sh)."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import hpczero
from tests.support.slurm import await_that, running
from tests.support.slurm_user import User

ENTRY = """[[sweep.list]]
"optimizer.lr" = {rate:.3f}
"""
SWEEP = """
name = "lr"
model = {{ layers = 1, hidden = 16, heads = 2, seq_len = 16, vocab = 256 }}
train = {{ steps = 2, global_batch = 2, micro_batch = 2, eval_batches = 2 }}
checkpoint.every = 2
extends = "spec.toml"

[batch]
nodes = 1
launcher = "mpirun"

[sweep]
at_once = 2

{entries}

[[sweep.list]]
name = "warm"
checkpoint = {{ resume = "{weights}", weights_only = true }}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with running() as variables:
        yield variables


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_runs_are_an_array_and_one_that_fails_is_submitted_alone(
    slurm: dict[str, str], tmp_path: Path, count: int
) -> None:
    """The weights that it begins with are not there when it starts, which only the run sees."""
    user = User(tmp_path, slurm)
    weights = tmp_path / "weights"
    entries = "\n".join(ENTRY.format(rate=number / 1000) for number in range(1, count))
    (tmp_path / "sweep.toml").write_text(SWEEP.format(entries=entries, weights=weights))
    assert f"a sweep of {count} runs" in user.does(*hpczero("check", "sweep.toml"))
    assert f"{count} runs" in user.does(*hpczero("submit", "sweep.toml"))
    queued = user.does("squeue", "--noheader", "--array", "--format=%F").split()
    assert len(set(queued)) == 1, "one array"
    assert states_of(user) == {"finished": count - 1, "failed": 1}

    said = user.does(*hpczero("status", "sweep.toml"))
    assert f"{count} runs in {tmp_path}/runs/lr: {count - 1} finished, 1 failed" in said
    assert "lr-warm failed: the input is wrong (exit code 2)" in said
    again = "submit sweep.toml --set sweep.run=warm"
    assert f"again: hpczero {again}" in said
    logs = sorted((tmp_path / "runs" / "lr").glob("lr-*/batch/*/log-*"))
    assert len(logs) == count, "each run has its own"
    assert len({log.name.partition("_")[0] for log in logs}) == 1
    assert str(weights) in user.does(*hpczero("logs", "lr-warm"))

    saved = tmp_path / "runs" / "lr" / "lr-lr0.001" / "checkpoints" / "step-00000002"
    shutil.copytree(saved, weights)
    assert f"{count - 1} runs finished" in user.does(*hpczero("submit", "sweep.toml", "--dry-run"))
    user.does(*hpczero(*again.split()))
    assert states_of(user) == {"finished": count}
    assert len(sorted((tmp_path / "runs" / "lr").glob("lr-*/batch/*/log-*"))) == count + 1
    is_compared(user)


def is_compared(user: User) -> None:
    """`compare` finds the run with the lowest loss, and its margin over the next."""
    runs = sorted((user.folder / "runs" / "lr").glob("lr-*"))
    losses = sorted(
        (json.loads((run / "summary.json").read_text())["validation_loss"], run.name)
        for run in runs
    )
    (lowest, best), (next_lowest, other) = losses[:2]
    found = json.loads(user.does(*hpczero("compare", "runs/lr", "--json")))["best"]
    assert (found["group"], found["next"]) == (best, other)
    assert found["margin"] == pytest.approx(next_lowest - lowest)
    assert found["half_interval"] > 0


def states_of(user: User) -> dict[str, int]:
    """Return the number of runs in each state, as soon as no job is left."""
    seen: list[dict[str, int]] = [{}]

    def over() -> bool:
        (user.folder / "state" / "hpczero" / "slurm.json").unlink(missing_ok=True)  # asked anew
        runs = json.loads(user.does(*hpczero("status", "sweep.toml", "--json")))["runs"]
        seen[0] = Counter(run["state"] for run in runs)
        return not {"queued", "running", "STALLED"} & set(seen[0])

    await_that(over, 2400, "the jobs end", look_every=3.0)
    return seen[0]
