"""The bytes that the planner expects are the bytes in the ledger of what really runs, along every axis, on one node and on several."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.sampler import micro_batches_of
from hpczero.model import shapes
from hpczero.model.batch import MicroBatch
from hpczero.parallel.pipeline import Pipeline
from hpczero.planner.volumes import Sent, Volumes
from hpczero.spec.schema import Data, Model, Parallel, Spec, Train, Zero
from tests.mpi.test_tensor import ODD, batch_of, parallel_model, trained
from tests.mpi.training import train

pytestmark = pytest.mark.mpi


layouts = pytest.mark.parametrize("ranks_per_node", [0, 2], ids=["one node", "nodes of two"])


@contextmanager
def laid_out(world: World, ranks_per_node: int) -> Iterator[World]:
    part = world.part(range(world.size), ranks_per_node)
    yield part
    part.close()


def expected(spec: Spec, world: World, axis: str) -> dict[str, Sent]:
    grid = Grid.build(spec.parallel, world.node_of_rank)
    return Volumes(spec, shapes.layers(spec.model), grid.size("data")).of_rank(grid, world.rank).get(axis, {})


def counted(world: World, axis: str) -> dict[str, Sent]:
    entries = world.ledger.as_dict().get(axis, {})
    return {name: Sent(int(entry["inside"]), int(entry["between"])) for name, entry in entries.items()}


def per_step(before: dict[str, Sent], after: dict[str, Sent], steps: int) -> dict[str, Sent]:
    """What more steps have sent more; what sends nothing is left out."""
    found = {}
    for name, sent in after.items():
        first = before.get(name, Sent())
        found[name] = Sent((sent.inside - first.inside) // steps, (sent.between - first.between) // steps)
    return {name: sent for name, sent in found.items() if sent != Sent()}


@layouts
@pytest.mark.parametrize(("stage", "shared", "accumulation"), list(product(range(4), (False, True), (1, 3))))
def test_data_axis(world: World, ranks_per_node: int, stage: int, shared: bool, accumulation: int) -> None:
    spec = Spec(
        model=Model(layers=3, hidden=24, heads=3, seq_len=17, vocab=61),
        data=Data(source="synthetic"),
        train=Train(global_batch=2 * accumulation * world.size - 1, micro_batch=2, eval_batches=0),
        zero=Zero(stage=stage, node_shared=shared),  # type: ignore[arg-type]
    )
    seen: dict[str, list[dict[str, Sent]]] = {"data": [], "world": []}
    with laid_out(world, ranks_per_node) as nodes:
        for steps in (1, 3):
            nodes.ledger.reset()
            train(nodes, spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})}))
            for axis, found in seen.items():
                found.append(counted(nodes, axis))
        for axis, (before, after) in seen.items():
            assert per_step(before, after, 2) == expected(spec, nodes, axis)


@layouts
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_axis(world: World, ranks_per_node: int, sequence_parallel: bool, tied: bool) -> None:
    if world.size > ODD.heads:
        return
    model = ODD.model_copy(update={"tied_embeddings": tied})
    parallel = Parallel(tensor=world.size, sequence_parallel=sequence_parallel)
    spec = Spec(model=model, train=Train(global_batch=5, micro_batch=2, precision="fp32"), parallel=parallel)
    with laid_out(world, ranks_per_node) as nodes:
        module = parallel_model(nodes, model, sequence_parallel)
        nodes.ledger.reset()
        trained(module, *(batch_of(model, len(samples)) for samples in micro_batches_of(0, 5, 2, 1)))
        assert per_step({}, counted(nodes, "tensor"), 1) == expected(spec, nodes, "tensor")


class Nothing:
    """Parts of a stage that hand on, and compute nothing."""

    def __init__(self, last_chunk: int | None, shape: Any) -> None:
        self.last_chunk, self.shape = last_chunk, shape

    def forward(self, chunk: int, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        return torch.zeros((), requires_grad=True) if chunk == self.last_chunk else torch.zeros(self.shape(batch), requires_grad=True)

    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None, last: bool) -> None:
        pass


@layouts
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_pipeline_axis(world: World, ranks_per_node: int, schedule: Any, chunks: int) -> None:
    model = Model(layers=22, hidden=24, heads=3, seq_len=17, tied_embeddings=False)
    parallel = Parallel(pipeline=world.size, schedule=schedule, chunks=chunks)
    spec = Spec(model=model, train=Train(global_batch=7, micro_batch=2, precision="fp32"), parallel=parallel)

    def shape(batch: MicroBatch) -> tuple[int, ...]:
        return len(batch.samples), model.seq_len, model.hidden

    with laid_out(world, ranks_per_node) as nodes:
        group, last = nodes.group("pipeline", range(nodes.size)), nodes.rank == nodes.size - 1
        nodes.ledger.reset()
        batches = [batch_of(model, len(samples)) for samples in micro_batches_of(0, 7, 2, 1)]
        Pipeline(group, schedule, chunks, shape, torch.float32).train(Nothing(chunks - 1 if last else None, shape), batches)
        assert per_step({}, counted(nodes, "pipeline"), 1) == expected(spec, nodes, "pipeline")
