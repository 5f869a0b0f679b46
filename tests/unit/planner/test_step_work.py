"""The counts of a step are the ledger's bytes, which `planner.volumes` computes."""

from collections import Counter

import pytest

from hpczero.comm.grid import Grid
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.platform import CPUS, Platform
from hpczero.planner.sent import Sent
from hpczero.planner.step_work import StepWork
from hpczero.planner.volumes import Volumes
from hpczero.planner.work import parts_of
from hpczero.spec.attention import Attention
from hpczero.spec.schema import Memory, Model, Parallel, Spec, Train, Zero

GPUS = Platform("cuda", KERNELS_THAT_CHANGE_MEMORY["cuda"], native=True)
MODEL = Model(layers=6, hidden=64, heads=4, vocab=130, seq_len=32)
LAYOUTS = [(1, 1, 8, 4), (2, 1, 8, 4), (2, 2, 16, 4), (4, 1, 16, 2), (1, 4, 16, 4)]


def spec_of(tensor: int, pipeline: int, stage: int, **tables: object) -> Spec:
    parallel = Parallel(
        tensor=tensor,
        pipeline=pipeline,
        sequence_parallel=tensor == 2,
        order="tensor,data,pipeline",
    )
    train = Train(global_batch=19, micro_batch=2)
    zero = Zero(stage=stage, node_shared=False)
    return Spec(model=MODEL, train=train, parallel=parallel, zero=zero, **tables)


def test_blocks_of_a_decoder_have_the_layouts_after_those_of_the_encoder() -> None:
    attention = Attention(kind=("local", "dense"))
    model = Model(family="t5", layers=6, seq_len=626, attention=attention)
    (part,) = parts_of([layers(model)], model, Memory())
    counts = {(alike.layer.kind, bool(alike.sees)): count for alike, count in part.layers}
    assert counts == {
        ("embedding", False): 1,
        ("positions", False): 1,
        ("encoder", True): 2,
        ("encoder", False): 1,
        ("decoder", True): 1,
        ("decoder", False): 2,
        ("head", False): 1,
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("tensor", "pipeline", "ranks", "each"), LAYOUTS)
def test_bytes_are_the_ledger_s(
    tensor: int, pipeline: int, ranks: int, each: int, stage: int
) -> None:
    spec = spec_of(tensor, pipeline, stage, memory=Memory(recompute="block"))
    work = StepWork(spec, layers(MODEL), Allocation(ranks, each), CPUS)
    grid = Grid.build(spec.parallel, [rank // each for rank in range(ranks)])
    volumes = Volumes(spec, layers(MODEL), grid.size("data"))
    last_data = grid.size("data") - 1
    for rank in range(ranks):
        at = {axis: grid.coordinate(rank, axis) for axis in ("pipeline", "data", "tensor")}
        if at["data"] != last_data or at["tensor"]:
            continue
        sent = volumes.of_rank(grid, rank)
        traffic = work.traffic(at["pipeline"])
        data = sent.get("data", {})
        assert traffic.reduced.sent == data.get("reduce_scatter", Sent())
        assert traffic.gathered.sent == data.get("all_gather", Sent())
        counted = Counter[str]()
        for message in work.tensor_messages(at["pipeline"]) if tensor > 1 else ():
            counted[message.operation] += message.sent.inside * int(message.count)
        ledger = sent.get("tensor", {})
        for operation in ("all_reduce", "reduce_scatter"):
            assert counted[operation] == ledger.get(operation, Sent()).inside
        if pipeline > 1 and at["pipeline"] == 0:
            total = sent["pipeline"]["send"]
            assert work.message * work.batch.micro_batches == total.inside + total.between


def test_the_busiest_rank_s_samples() -> None:
    work = StepWork(spec_of(1, 1, 1), layers(MODEL), Allocation(8, 4), CPUS)
    assert (work.batch.micro_batches, work.batch.samples) == (2, 1.5)  # of 19, on 8 ranks: 3


def test_what_is_sharded_is_accumulated_by_its_owner() -> None:
    of_stages = [
        StepWork(spec_of(1, 1, stage), layers(MODEL), Allocation(8, 4), CPUS).accumulated(0, 0)
        for stage in range(4)
    ]
    assert of_stages[0] == of_stages[1] > 0
    assert of_stages[2] == of_stages[3] == 0


def test_activations_over_the_bus_are_those_of_gpus() -> None:
    away = spec_of(1, 1, 1, memory=Memory(offload_activations="cpu"))
    sizes = [
        StepWork(away, layers(MODEL), Allocation(8, 4), platform).over_bus(0, 0)
        for platform in (CPUS, GPUS)
    ]
    assert sizes[0] == 0 < sizes[1]


def test_where_states_are_elsewhere() -> None:
    cases = {("none", CPUS): False, ("cpu", CPUS): False, ("cpu", GPUS): True}
    for (offload, platform), expected in cases.items():
        spec = spec_of(1, 1, 1).model_copy(update={"zero": Zero(offload=offload)})
        assert StepWork(spec, layers(MODEL), Allocation(8, 4), platform).is_elsewhere == expected
