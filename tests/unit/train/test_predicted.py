"""What a run says at its begin of how long a step should take: nothing of it ends the run."""

from types import SimpleNamespace
from typing import Any

import pytest

from hpczero.model.families import layers
from hpczero.planner.outlook import Outlook
from hpczero.spec.schema import Batch, Spec

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

from hpczero.train.run_report import _predicted

Events = list[tuple[str, dict[str, Any]]]


def begun(cluster: str, known: bool = True) -> tuple[Outlook | None, Events]:
    """Return what is predicted of a run of 3 ranks on two nodes, and its events."""
    events: Events = []
    spec = Spec(batch=Batch(cluster=cluster))
    device = SimpleNamespace(kind="cpu")
    world = SimpleNamespace(size=3, node_of_rank=[0, 0, 1], device=device, backend="mpi")
    job: Any = SimpleNamespace(spec=spec, world=world, layers=layers(spec.model) if known else None)
    reporter: Any = SimpleNamespace(event=lambda name, **values: events.append((name, values)))
    return _predicted(job, reporter), events


def test_the_step_on_a_known_cluster() -> None:
    found, events = begun("epyc-7763")
    assert found
    assert found.time
    assert (found.nodes.ranks, found.nodes.ranks_per_node) == (3, 2)
    values = {"cluster": "epyc-7763", "step_seconds": found.time.seconds}
    assert events == [("predicted", values)]


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert begun("") == (None, [])
    assert begun("epyc-7763", known=False) == (None, [])


def test_a_cluster_that_does_not_suit_is_a_warning() -> None:
    found, events = begun("dgx-h100")
    assert found
    assert found.problem
    assert events == [("WARN", {"what": next(found.warnings())})]
    assert "it has GPUs, and the job computes on CPUs" in events[0][1]["what"]


def test_an_unknown_cluster_is_a_warning() -> None:
    found, [(name, values)] = begun("summit")
    assert (found, name) == (None, "WARN")
    assert 'there is no cluster "summit"' in values["what"]
