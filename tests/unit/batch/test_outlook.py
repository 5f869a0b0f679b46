"""`render` and `submit` say how long a job takes, where its cluster is known."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpczero.batch.sites import all_names, facts
from hpczero.cli import main
from hpczero.model.families import layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.outlook import outlook
from hpczero.planner.platform import Platform
from hpczero.spec.load import load
from tests.support.clusters import one_node

SPEC = """
name = "small"
output = "runs"
[model]
layers = 8
hidden = 512
heads = 8
[data]
source = "synthetic"
[train]
steps = 4_000_000
global_batch = 64
micro_batch = 2
[batch]
site = "generic/pbs"
cluster = "epyc-7763"
nodes = 2
ranks_per_node = 4
walltime = "2h"
"""


@pytest.fixture
def said_of_it(queue: Path, tmp_path: Path) -> list[str]:
    """Return the lines of the job's outlook, as the verbs print them."""
    (tmp_path / "spec.toml").write_text(SPEC)
    one_node(tmp_path)
    spec = load("spec.toml").spec
    kernels = frozenset({"glu", "rms_norm"})
    found = outlook(spec, layers(spec.model), Allocation(8, 4), Platform("cpu", kernels))
    assert found
    assert found.time
    return [f"hpczero: {line}" for line in [*found.in_lines(), *found.warnings()]]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines that a verb prints beside the script."""
    assert main([*arguments]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!")
    return err.splitlines()


VERBS = [("render",), ("submit", "--dry-run")]


@pytest.mark.parametrize("verb", VERBS)
def test_the_time_is_said_beside_the_script(
    verb: Sequence[str], said_of_it: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(said_of_it) == 6
    assert "s a step, " in said_of_it[0]
    assert "would finish it" in said_of_it[-1]
    lines = printed(capsys, *verb, "spec.toml")
    at = lines.index(said_of_it[0])
    assert lines[at : at + 6] == said_of_it


@pytest.mark.usefixtures("said_of_it")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "setting", ["batch.cluster=", 'batch.command=["python", "train.py"]', "model.family=mine:make"]
)
def test_nothing_is_said_of_what_is_not_known(
    verb: Sequence[str], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, *verb, "spec.toml", "--set", setting)
    assert lines
    assert not [line for line in lines if "a step" in line or "predicted" in line]


@pytest.mark.usefixtures("said_of_it")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["batch.cluster=small.toml", "batch.nodes=1"],
            "the cluster's file does not have links in a node, which 4 ranks use",
        ),
        (
            ["batch.cluster=dgx-h100", "train.device=cpu"],
            "it has GPUs, and the job computes on CPU",
        ),
    ],
)
def test_why_nothing_is_predicted_is_said(
    verb: Sequence[str], settings: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    lines = printed(capsys, *verb, "spec.toml", *options)
    name = settings[0].partition("=")[2]
    (line,) = (line for line in lines if "no time is predicted" in line)
    assert line.startswith(f'hpczero: no time is predicted for batch.cluster = "{name}": {said}')


@pytest.mark.usefixtures("said_of_it")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["batch.cluster=summit"], 'there is no cluster "summit"'),
        (["batch.cluster=summit", 'batch.command=["./mine"]'], 'there is no cluster "summit"'),
        (["batch.cluster=small.toml", "batch.nodes=1", "model.hidden=4096"], "8.0 GB"),
    ],
)
def test_an_unknown_cluster_and_a_job_too_large_for_it_are_refused(
    verb: Sequence[str], settings: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    assert main([*verb, "spec.toml", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("hpczero: ")) == ("", 1)
    assert said in err


def test_the_cluster_of_a_site_has_the_nodes_of_its_partition() -> None:
    named = {}
    for name in all_names():
        _, site, partition = facts(name)
        batch = site.spec.get("batch", {}) | partition.spec.get("batch", {})
        if "cluster" in batch:
            named[name] = partition, find(batch["cluster"]).cluster.hardware
    assert {"perlmutter/gpu", "perlmutter/cpu", "lumi/standard-g"} <= named.keys()
    for partition, node in named.values():
        assert node.gpus == partition.gpus
        assert node.gpu_memory_gb == pytest.approx(partition.gpu_memory_gb, rel=0.1)  # GiB or GB
        assert node.memory_gb >= partition.memory_gb, "the scheduler may keep some"
