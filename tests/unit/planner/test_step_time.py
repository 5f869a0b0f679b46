"""The time of a step: its causes add up, and it is monotone where physics is."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.errors import InputError
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster, find
from hpczero.planner.composed import Pipeline, causes_of_action, compose
from hpczero.planner.platform import CPUS, Platform
from hpczero.planner.step_costs import CAUSES, Edge
from hpczero.planner.step_time import StepTime, predict
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import (
    Checkpoint,
    Comm,
    Memory,
    Model,
    Optimizer,
    Parallel,
    Spec,
    Train,
    Zero,
)
from tests.support.fitting import changed

GPUS = Platform("cuda", KERNELS_THAT_CHANGE_MEMORY["cuda"], native=True)
DGX = find("dgx-a100-80").cluster
CALIBRATED = changed(DGX, {"network.hidden": 0.3, "node.hidden": 0.6})
TWO_NODES = Allocation(16, 8)
EPYC = find("epyc-7763").cluster
MODEL = Model(
    family="llama", layers=8, hidden=1024, heads=16, kv_heads=8, vocab=32000, seq_len=1024
)


def spec_of(model: Model = MODEL, **tables: Any) -> Spec:
    train = tables.pop("train", Train(global_batch=64, micro_batch=2))
    return Spec(model=model, train=train, **tables)


def time_of(
    spec: Spec, nodes: Allocation = TWO_NODES, cluster: Cluster = DGX, **software: Any
) -> StepTime:
    platform = CPUS if cluster.device.kind == "cpu" else GPUS
    return predict(spec, layers(spec.model), nodes, cluster, platform, **software)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Spec, Allocation, Cluster]:
    chunks = draw(st.sampled_from([1, 1, 2]))
    pipeline = draw(st.sampled_from([1, 2, 4])) if chunks == 1 else 2
    tensor = draw(st.sampled_from([1, 2, 8]))
    ranks = tensor * pipeline * draw(st.sampled_from([1, 2, 3, 8]))
    parallel = Parallel(
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else draw(st.sampled_from(["1f1b", "gpipe"])),
        sequence_parallel=draw(st.booleans()),
        order=draw(st.sampled_from(["auto", "tensor,data,pipeline", "data,tensor,pipeline"])),
    )
    spec = spec_of(
        train=Train(
            global_batch=draw(st.integers(1, 100)), micro_batch=draw(st.sampled_from([1, 4]))
        ),
        parallel=parallel,
        zero=Zero(
            stage=draw(st.integers(0, 3)), offload=draw(st.sampled_from(["none", "none", "cpu"]))
        ),
        memory=Memory(
            recompute=draw(st.sampled_from(["none", "selective", "block"])),
            loss_chunk=draw(st.sampled_from([0, "auto"])),
        ),
        checkpoint=Checkpoint(every=10, asynchronous=draw(st.booleans())),
    )
    cluster = draw(st.sampled_from([DGX, EPYC, CALIBRATED]))
    return spec, Allocation(ranks, draw(st.sampled_from([4, 8]))), cluster


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_causes_add_up_and_none_is_negative(job: tuple[Spec, Allocation, Cluster]) -> None:
    spec, nodes, cluster = job
    step = time_of(spec, nodes, cluster)
    assert set(step.causes) == set(CAUSES)
    assert all(seconds >= 0 for seconds in step.causes.values())
    assert sum(step.causes.values()) == pytest.approx(step.seconds, rel=1e-12)
    assert 0 < step.utilisation < 1
    assert step.tokens_per_second == pytest.approx(
        spec.train.global_batch * spec.seq_len / step.seconds
    )
    end = max(stage[-1].end for stage in step.intervals())
    assert end <= step.seconds * (1 + 1e-9)
    assert [cause for cause, _, _ in step.largest()] == sorted(
        step.causes, key=lambda cause: -step.causes[cause]
    )[:3]


def data_seconds(cluster: Cluster = DGX, **keys: Any) -> float:
    zero = {"stage": 3, **{key: keys.pop(key) for key in ("stage", "shard_ranks") if key in keys}}
    return time_of(spec_of(zero=Zero(**zero), **keys), cluster=cluster).causes["data"]


SLOW = changed(DGX, {"network.adapter_gb_s": 0.5, "network.adapters": 1})


@pytest.mark.parametrize("stage", range(4))
def test_shards_inside_nodes_spare_the_network(stage: int) -> None:
    """At stage 3 most of all: sums of replicas alone leave a node, once in a step."""
    everywhere, inside = (
        data_seconds(SLOW, stage=stage, shard_ranks=shards) for shards in ("all", "node")
    )
    assert inside < everywhere / (8 if stage == 3 else 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_gathered_in_8_bits_take_less(stage: int) -> None:
    """Gathers half as long, sums of gradients as long as before; much of both is hidden."""
    plain = data_seconds(SLOW, stage=stage)
    narrow = data_seconds(SLOW, stage=stage, comm=Comm(compress="int8"))
    assert 0.5 * plain < narrow < plain


def test_smaller_messages_of_replicas_take_less() -> None:
    sums = data_seconds(SLOW, shard_ranks="node")
    compressed = data_seconds(SLOW, shard_ranks="node", comm=Comm(compress="int8"))
    assert 0.4 < compressed / sums < 0.7
    signs = Optimizer(name="one_bit_adam", freeze=10)
    assert data_seconds(SLOW, shard_ranks="node", optimizer=signs) < 0.4 * sums


def test_local_steps_hide_their_exchange_behind_the_next_step() -> None:
    def of(every: int, cluster: Cluster = SLOW, **keys: Any) -> float:
        outer = Optimizer(outer=Outer(every=every, **keys))
        return data_seconds(cluster, shard_ranks="node", optimizer=outer)

    alone = data_seconds(DGX, shard_ranks="node", optimizer=Optimizer(outer=Outer(every=10**9)))
    assert of(1) > of(10) > of(100) > alone
    assert of(100) - alone == pytest.approx((of(10) - alone) / 10, rel=0.05)
    assert of(100, precision="int4") < of(100)
    assert of(100, fragments=10) < of(100), "each has a step to hide behind"
    hides = changed(SLOW, {"network.hidden": 1.0})
    assert of(100, hides, fragments=100) == pytest.approx(of(10**9, hides), rel=0.01)


BETTER = [
    ("device.bandwidth_gb_s", 2.0),
    ("device.launch_us", 0.5),
    ("device.step_us", 0.5),
    ("device.products.{}.peak_tflops", 1.7),
    ("device.products.{}.half_outer", 0.5),
    ("device.products.{}.attention", 1.3),
    ("node.bandwidth_gb_s", 2.0),
    ("node.link_gb_s", 3.0),
    ("node.link_us", 0.1),
    ("network.adapter_gb_s", 4.0),
    ("network.latency_us", 0.1),
    ("network.adapters", 2),
]


@given(jobs(), st.sampled_from(BETTER))
@settings(max_examples=150, deadline=None)
def test_a_better_machine_is_never_slower(
    job: tuple[Spec, Allocation, Cluster], better: tuple[str, float]
) -> None:
    spec, nodes, cluster = job
    path = better[0].format("fp32" if cluster is EPYC else "bf16")
    value: Any = cluster
    for word in path.split("."):
        value = value[word] if isinstance(value, dict) else getattr(value, word)
    faster = changed(cluster, {path: value * better[1]})
    before = time_of(spec, nodes, cluster).seconds
    assert time_of(spec, nodes, faster).seconds <= before * (1 + 1e-9)


@pytest.mark.parametrize(("data", "bus"), [(3.0, 3.0), (0.5, 3.0), (3.0, 0.5)])
def test_less_computing_is_never_slower(data: float, bus: float) -> None:
    """Also where both of what it hides are longer."""

    def seconds(computing: float) -> float:
        costs: Any = SimpleNamespace(
            action=lambda *_: {"compute": computing},
            data=lambda *_: data,
            bus=lambda *_: bus,
            hidden=lambda: 0.7,
        )
        return sum(causes_of_action(costs, "forward", 0, 0).values())

    taken = [seconds(computing) for computing in (0.0, 0.4, 1.0, 2.9, 3.1, 9.0)]
    assert taken == sorted(taken)


@pytest.mark.parametrize("where", ["network", "node"])
def test_what_is_measured_to_be_hidden_counts_where_data_ranks_lie(where: str) -> None:
    nodes = TWO_NODES if where == "network" else Allocation(8, 8)
    other = {"network": "node", "node": "network"}[where]
    spec = spec_of(zero=Zero(stage=2))

    def data(*hidden: tuple[str, float]) -> float:
        changes = {f"{table}.hidden": share for table, share in hidden}
        return time_of(spec, nodes, changed(DGX, changes)).causes["data"]

    assert data((where, 1.0)) < data() < data((where, 0.0))
    assert data((where, 0.7)) == data() == data((other, 0.0))


def test_a_rank_works_on_messages_as_far_as_computing_does_not_hide_them() -> None:
    """Each of two stages, on two nodes, sends a micro-batch's message and gets one."""
    spec = spec_of(parallel=Parallel(pipeline=2, order="tensor,data,pipeline"))

    def step(hidden: float | None, cluster: Cluster = EPYC) -> StepTime:
        return time_of(spec, cluster=changed(cluster, {"network.hidden": hidden}))

    usual = step(None)
    (transfer,) = usual.durations.transfers
    for hidden in (0.0, 0.25, 1.0):
        durations = step(hidden).durations
        work = (1 - hidden) / 2 * transfer
        for kind in ("forward", "backward"):
            pairs = zip(getattr(durations, kind), getattr(usual.durations, kind), strict=True)
            assert [now - before for now, before in pairs] == pytest.approx([work, work])
    assert step(0.0).causes["messages"] > step(0.25).causes["messages"] > usual.causes["messages"]
    on_gpus = [step(hidden, DGX).durations for hidden in (None, 0.0)]
    assert on_gpus[0] == on_gpus[1]  # the host works on them


@given(jobs())
@settings(max_examples=40, deadline=None)
def test_less_to_do_is_never_slower(job: tuple[Spec, Allocation, Cluster]) -> None:
    spec, nodes, cluster = job
    # the order "auto" may be another one where other bytes are sent
    parallel = spec.parallel.model_copy(update={"order": "tensor,data,pipeline"})
    spec = spec.model_copy(update={"parallel": parallel})
    before = time_of(spec, nodes, cluster)
    kept = spec.model_copy(update={"memory": Memory(loss_chunk=spec.memory.loss_chunk)})
    after = time_of(kept, nodes, cluster)
    # Stages at ZeRO 3 may gather more: a block that is computed again asks in backward once for
    # weights that others ask for twice, which decides what makes room.
    more = spec.zero.stage == 3 and spec.parallel.pipeline > 1
    more &= after.causes["data"] > before.causes["data"]
    assert more or after.seconds <= before.seconds * (1 + 1e-9)
    for cause in ("compute", "attention", "memory"):
        assert after.causes[cause] <= before.causes[cause] * (1 + 1e-9)
    if spec.parallel.pipeline > 1:
        return  # other sizes cut the layers elsewhere
    narrow = spec.model.model_copy(update={"ffn": 1024})
    less = spec.model_copy(update={"model": narrow})
    assert time_of(less, nodes, cluster).seconds <= before.seconds * (1 + 1e-9)


def test_more_micro_batches_make_the_bubble_a_smaller_share() -> None:
    shares = []
    for batch in (8, 32, 128):
        train = Train(global_batch=batch, micro_batch=1)
        step = time_of(spec_of(train=train, parallel=Parallel(pipeline=4)), Allocation(8, 8))
        shares.append(step.causes["bubble"] / step.seconds)
    assert shares[0] > shares[1] > shares[2] > 0


def test_tensor_ranks_on_several_nodes_are_a_disaster() -> None:
    parallel = Parallel(tensor=16, order="tensor,data,pipeline")
    train = Train(global_batch=8, micro_batch=8)
    across = time_of(spec_of(train=train, parallel=parallel), Allocation(16, 8))
    inside = time_of(spec_of(train=train, parallel=parallel), Allocation(16, 16))
    assert across.causes["tensor"] > 3 * inside.causes["tensor"]
    assert across.largest(1)[0][0] == "tensor"


def test_tiny_micro_batches_wait_for_the_host() -> None:
    model = MODEL.model_copy(update={"hidden": 256, "layers": 24, "seq_len": 128})
    step = time_of(spec_of(model, train=Train(global_batch=1, micro_batch=1)), Allocation(1, 8))
    cause, share, sentence = step.largest(1)[0]
    assert (cause, share > 0.5) == ("launch", True)
    assert "micro_batch" in sentence


def test_ranks_of_cpus_share_the_node() -> None:
    one, full = (time_of(spec_of(), Allocation(ranks, 128), EPYC) for ranks in (1, 64))
    assert one.peak == pytest.approx(full.peak)
    assert full.seconds < one.seconds * 1.5  # the node is the same, and all of it is used


def test_states_elsewhere_are_hidden_by_a_long_forward() -> None:
    here = spec_of(zero=Zero(stage=1))
    away = spec_of(zero=Zero(stage=1, offload="cpu"))
    longer = Train(global_batch=2048, micro_batch=128)
    assert time_of(away).causes["offload"] > 0
    assert time_of(away).seconds > time_of(here).seconds
    of_longer = time_of(away.model_copy(update={"train": longer}))
    assert of_longer.causes["offload"] < time_of(away).causes["offload"]


@pytest.mark.parametrize(("cluster", "precision"), [(DGX, "bf16"), (EPYC, "fp32")])
def test_the_update_goes_at_the_rate_of_its_kernel(cluster: Cluster, precision: str) -> None:
    spec = spec_of(train=Train(global_batch=64, micro_batch=2, precision=precision))
    usual = time_of(spec, cluster=cluster)
    reached = cluster.device.bandwidth_reached
    for passes, factor in (
        ({precision: {"adamw": reached / 2}}, 2),
        ({precision: {"norm": reached / 2}}, 1),  # another kernel
        ({"fp16": {"adamw": reached / 2}}, 1),  # in another precision
    ):
        device = cluster.device.model_copy(update={"passes": passes})
        slower = time_of(spec, cluster=cluster.model_copy(update={"device": device}))
        assert slower.causes["optimizer"] == pytest.approx(factor * usual.causes["optimizer"])
        assert slower.causes | {"optimizer": 0} == usual.causes | {"optimizer": 0}


def test_a_run_without_a_file_system_says_nothing_of_checkpoints() -> None:
    spec = spec_of(checkpoint=Checkpoint(every=10))
    assert time_of(spec).causes["checkpoint"] == 0
    files = DGX.model_dump(exclude_none=True) | {"files": {"node_gb_s": 1.0}}
    cluster = Cluster.model_validate(files)
    rare = spec_of(checkpoint=Checkpoint(every=50))
    at_once = spec_of(checkpoint=Checkpoint(every=10, asynchronous=False))
    seconds = [
        time_of(each, cluster=cluster).causes["checkpoint"] for each in (rare, spec, at_once)
    ]
    assert 0 < seconds[0] < seconds[1] <= seconds[2]


def test_a_model_that_is_not_known_is_an_error() -> None:
    spec = spec_of(MODEL.model_copy(update={"family": "mine:make"}))
    with pytest.raises(InputError, match="mine:make has to be built before"):
        predict(spec, [], Allocation(8, 8), DGX, GPUS)


def test_a_hundred_thousand_ranks_are_not_listed() -> None:
    train = Train(global_batch=12_500, micro_batch=1)
    spec = spec_of(train=train, parallel=Parallel(tensor=8, pipeline=10))
    assert time_of(spec, Allocation(100_000, 8)).seconds > 0


class Spans:
    """Costs that are given, as a run that was measured has them."""

    def like(self, stage: int) -> int:
        return stage

    def action(self, kind: str, stage: int, chunk: int) -> dict[str, float]:
        return {"compute": 1.0 if kind == "forward" else 2.0}

    def data(self, kind: str, stage: int, chunk: int) -> float:
        return 0.0

    def bus(self, kind: str, stage: int, chunk: int) -> float:
        return 0.0

    def transfer(self, part: int) -> float:
        return 0.25

    def weights(self, stage: int) -> Edge:
        return Edge(0.5, 0.25)

    def gradients(self, stage: int) -> Edge:
        return Edge(0.5, 3.0)

    def after(self) -> dict[str, float]:
        return {"optimizer": 1.0}

    def beside_next(self, step: float) -> float:
        return 0.0

    def checkpoint(self, step: float) -> float:
        return 0.0

    def hidden(self) -> float:
        return 1.0


def test_a_step_is_composed_of_any_costs() -> None:
    causes, durations = compose(Pipeline("1f1b", 2, 1, 4), Spans())
    assert causes["compute"] == 12
    assert causes["optimizer"] == 1
    assert causes["data"] == 0.5 + 0.5 + 1.0  # of the sums, 2 of 3 are behind the last backward
    assert (list(durations.forward), list(durations.transfers)) == ([1.0, 1.0], [0.25])
    # the last stage's forward and backward, once; each message is waited for
    assert causes["bubble"] == 3
    still, _ = compose(Pipeline("1f1b", 1, 1, 4), Spans())
    assert still["messages"] == 0
    assert replace(Edge(0.5, 0.25), offload=1.0).offload == 1.0
