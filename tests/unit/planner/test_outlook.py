"""How long a job takes: what is said of it, and where it does not suit its cluster."""

from pathlib import Path
from typing import Any

import pytest

from hpczero.errors import InputError
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.bill import Bill
from hpczero.planner.cluster import find
from hpczero.planner.outlook import Outlook, outlook
from hpczero.planner.platform import CPUS, Platform
from hpczero.planner.step_time import predict
from hpczero.spec.schema import Batch, Model, Spec, Train
from hpczero.text import format_number
from tests.support.clusters import one_node

GPUS = Platform("cuda", KERNELS_THAT_CHANGE_MEMORY["cuda"], native=True)
TWO_NODES = Allocation(16, 8)
MODEL = Model(layers=8, hidden=1024, heads=16, vocab=32000, seq_len=1024)


def spec_of(cluster: str = "dgx-h100", steps: int = 10_000, **batch: Any) -> Spec:
    train = Train(global_batch=64, micro_batch=2, steps=steps)
    return Spec(model=MODEL, train=train, batch=Batch(cluster=cluster, **batch))


def of(spec: Spec, nodes: Allocation = TWO_NODES, platform: Platform = GPUS) -> Outlook:
    found = outlook(spec, layers(spec.model), nodes, platform)
    assert found
    return found


def step_seconds(spec: Spec) -> float:
    cluster = find(spec.batch.cluster).cluster
    return predict(spec, layers(spec.model), TWO_NODES, cluster, GPUS).seconds


def test_nothing_is_said_without_a_cluster() -> None:
    spec = spec_of("")
    assert outlook(spec, layers(spec.model), TWO_NODES, GPUS) is None


def test_an_unknown_cluster_is_an_error() -> None:
    spec = spec_of("summit")
    with pytest.raises(InputError, match='there is no cluster "summit"'):
        outlook(spec, layers(spec.model), TWO_NODES, GPUS)


def test_the_lines_say_the_step_its_causes_and_the_training() -> None:
    spec = spec_of(walltime="2h", chain=9)
    found = of(spec)
    seconds = step_seconds(spec)
    step, *causes, training = found.in_lines()
    assert found.time
    tokens = format_number(64 * 1024 / seconds)
    used = f"{found.time.utilisation:.1%}"
    assert step == (
        f"{seconds:.3g} s a step, {tokens} tokens/s, {used} of the peak (predicted for dgx-h100)"
    )
    assert causes == [f"{share:>4.0%} {words}" for _, share, words in found.time.largest()]
    assert len(causes) == 3
    bill = Bill.of(10_000, seconds, 2, 7200)
    count = "1 job" if bill.jobs == 1 else f"{bill.jobs} jobs"
    assert training == (
        f"the training: {bill.days:.3g} days, {bill.node_hours:,.4g} node-hours, {count} of 2h"
    )
    assert list(found.warnings()) == []


def test_as_data_it_has_the_same() -> None:
    spec = spec_of(walltime="2h")
    seconds = step_seconds(spec)
    data = of(spec).as_data()
    bill = Bill.of(10_000, seconds, 2, 7200)
    assert (data["cluster"], data["step_seconds"]) == ("dgx-h100", seconds)
    assert data["tokens_per_second"] == pytest.approx(64 * 1024 / seconds)
    assert sum(data["causes"].values()) == pytest.approx(seconds)
    assert (data["days"], data["node_hours"], data["jobs"]) == (
        bill.days,
        bill.node_hours,
        bill.jobs,
    )


@pytest.mark.parametrize("jobs", [2, 40, 1000])
def test_a_chain_that_is_too_short_is_said(jobs: int) -> None:
    steps = int((jobs - 0.5) * 3000 / step_seconds(spec_of()))
    spec = spec_of(steps=steps, walltime="1h", chain=jobs - 1)
    assert list(of(spec).warnings()) == [
        f"the training takes about {jobs:,} jobs of 1h, and batch.chain is {jobs - 1:,}: "
        f"batch.chain = {jobs:,} would finish it"
    ]
    assert list(of(spec_of(steps=steps, walltime="1h", chain=jobs)).warnings()) == []


def test_ranks_that_share_a_gpu_are_slower() -> None:
    def seconds(**batch: Any) -> float:
        time = of(spec_of(**batch)).time
        assert time
        return time.seconds

    assert seconds(gpus_per_node=1) > 4 * seconds()
    assert seconds(gpus_per_node=8) == seconds()


def test_a_chain_that_no_spec_can_have_needs_more_time() -> None:
    spec = spec_of(steps=int(1500 * 3000 / step_seconds(spec_of())), walltime="1h", chain=1000)
    (said,) = of(spec).warnings()
    assert said.endswith("batch.chain is 1,000: more walltime or nodes would finish it")


def test_a_walltime_without_time_to_train_is_said() -> None:
    found = of(spec_of(walltime="10m"))
    assert list(found.warnings()) == [
        'batch.walltime = "10m": a job needs about 0:10:00 to start, to read a checkpoint and to '
        "write one"
    ]
    assert not any("the training" in line for line in found.in_lines())
    data = found.as_data()
    assert data["step_seconds"] > 0
    assert data["days"] is data["node_hours"] is data["jobs"] is None
    assert list(of(spec_of(walltime="11m", steps=1)).warnings()) == []


@pytest.mark.parametrize(
    ("cluster", "platform", "said"),
    [
        ("epyc-7763", GPUS, "it has CPUs, and the job computes on GPUs"),
        ("dgx-h100", CPUS, "it has GPUs, and the job computes on CPUs"),
    ],
)
def test_a_cluster_of_other_devices_predicts_nothing(
    cluster: str, platform: Platform, said: str
) -> None:
    problem_is_all(of(spec_of(cluster), platform=platform), cluster, said)


def problem_is_all(found: Outlook, cluster: str, said: str) -> None:
    assert list(found.in_lines()) == []
    (warning,) = found.warnings()
    assert warning.startswith(f'no time is predicted for batch.cluster = "{cluster}": {said}')
    data = found.as_data()
    assert data.keys() == {"cluster", "problem"}
    assert data["problem"].startswith(said)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (TWO_NODES, "the cluster's file does not have the network, which 2 nodes use"),
        (Allocation(8, 8), "the cluster's file does not have links in a node, which 8 ranks use"),
    ],
)
def test_links_that_the_file_lacks_predict_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: Allocation, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    one_node(tmp_path)
    problem_is_all(of(spec_of("small.toml"), nodes, CPUS), "small.toml", said)


def test_more_nodes_than_there_are_predict_nothing() -> None:
    found = of(spec_of("juwels-booster"), Allocation(4 * 937, 4))
    problem_is_all(found, "juwels-booster", "it has 936 nodes, and the job takes 937")


def test_one_rank_needs_no_links(tmp_path: Path) -> None:
    found = of(spec_of(str(one_node(tmp_path))), Allocation(1, 1), CPUS)
    assert found.cluster == "small"
    assert found.time
    assert not found.problem


def test_a_model_that_has_to_be_built_predicts_nothing() -> None:
    mine = MODEL.model_copy(update={"family": "mine:make"})
    spec = spec_of().model_copy(update={"model": mine})
    found = outlook(spec, [], TWO_NODES, GPUS)
    assert found
    problem_is_all(found, "dgx-h100", "mine:make has to be built before")
