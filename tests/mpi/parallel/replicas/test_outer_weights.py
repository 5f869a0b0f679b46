"""The outer weights are those that validation sees; pipelines with tied embeddings, and modules of
users among tensor ranks, step as one process simulates it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.comm.world import World
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from tests.support.own_twin import OwnTwin, layers_in
from tests.support.replicas import METHODS, own_spec_of, spec_of
from tests.support.tensor_plans import Mlp
from tests.support.training import LearnableSource, Record, distance, train
from tests.support.user_modules import made
from tests.support.workers_twin import Twin

pytestmark = pytest.mark.mpi

LOCAL = [name for name in METHODS if "local" in name]


def trained(world: World, spec: Spec, per_node: int) -> Record:
    nodes = world.part(range(world.size), per_node)
    found = train(nodes, spec)
    nodes.close()
    return found


def with_steps(spec: Spec, steps: int) -> Spec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})


def validated(spec: Spec, model: torch.nn.Module) -> float:
    """Return the loss of a serial model on the validation text."""
    batches = Batches(spec, LearnableSource(spec), 0, 1)
    loss = tokens = 0.0
    with torch.no_grad():
        for number in range(batches.evaluation_batches()):
            for batch in batches.evaluation(number):
                if len(batch.samples):
                    loss += float(model(batch).sum())
                    tokens += batch.targets.numel()
    return loss / tokens


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("method", LOCAL)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.few(1)
def test_validation_is_of_the_outer_weights(world: World, method: str, stage: int) -> None:
    """In the middle of a round; at the end, of the mean of all replicas' weights."""
    spec = spec_of(
        method, {"stage": stage}, optimizer={"lr": 3e-3}, steps=10, eval_every=6, eval_batches=2
    )
    schedule = spec.schedule.model_copy(update={"name": "constant"})
    spec = spec.model_copy(update={"schedule": schedule})
    found = trained(world, spec, per_node=world.size // 2)
    if world.rank:
        return
    assert len(found.validation_losses) == 2
    for steps, loss in zip((6, 10), found.validation_losses, strict=True):
        twin = Twin(with_steps(spec, steps), 2, world.size // 2)
        twin.train()
        model = twin.models[0]  # with the mean of all
        mean = validated(spec, model)
        for name, weight in twin.weights.items():
            weight.copy_(twin.outer[name])
        outer = validated(spec, model)
        assert loss == pytest.approx(outer if steps == 6 else mean, rel=1e-5)
        assert steps == 10 or abs(mean - outer) > 1e-4 * outer


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.few(1)
def test_stages_with_tied_embeddings_are_one_stage(world: World, method: str, stage: int) -> None:
    """The embedding, which both stages step, stays the same on them (`train` asserts it).

    Where what is sent is cut into other blocks, or fragments, numbers are near.
    """
    steps, optimizer = 10, {"lr": 2e-4}
    if method == "one_bit_adam":
        optimizer["freeze"] = 5
    zero = {"stage": stage, "shard_ranks": 1}
    cut = spec_of(method, zero, {"pipeline": 2}, optimizer, steps=steps)
    found = trained(world, cut, per_node=2)
    assert {"pipeline", "replica"} <= found.ledger.as_dict().keys()
    if world.rank > 1:
        return
    two = world.part(range(2), 1)
    expected = train(two, spec_of(method, zero, None, optimizer, steps=steps))
    first = train(two, spec_of(method, zero, None, optimizer, steps=1))
    two.close()
    exact = method in ("sums", "local steps")
    assert found.losses == pytest.approx(expected.losses, rel=1e-5 if exact else 2e-3)
    kept = {n: values for n, values in expected.weights.items() if not n.endswith("qkv.bias")}
    moved = distance(kept, first.weights)
    assert distance(kept, found.weights) < (0.01 if exact else 0.6) * moved


def of_classes(module: Any, step: int, rank: int, size: int) -> Tensor:
    """Return a data rank's part of the mean loss of 12 samples."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 16, generator=generator)
    y = torch.randint(5, (12,), generator=generator)
    own = slice(rank, None, size)
    loss: Tensor = module(x[own], y[own])
    return loss / size


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.few(1)
def test_a_tensor_plan_is_followed_on_every_worker(world: World, method: str, stage: int) -> None:
    """Also what tensor ranks hold in common stays the same on them, or the engine refuses."""
    steps = 10
    tables: dict[str, Any] = {
        "optimizer": {"eps": 1e-4},
        "train": {"grad_clip": 0.7, "steps": steps},
        "zero": {"stage": stage},
        "parallel": {"tensor": 2},
    }
    plan = {"blocks.*.1": "column", "blocks.*.3": "row"}
    nodes = world.part(range(4), 2)
    losses = []
    with hpczero.initialize(
        made(Mlp), own_spec_of(method, **tables), nodes, tensor_plan=plan
    ) as engine:
        axis = engine.engine.axis
        twin = OwnTwin(
            engine.spec, (2, axis.size, 2), made(Mlp), layers_in(engine.engine), of_classes
        )
        assert axis.group.size == 2 * axis.size
        for step in range(steps):
            loss = of_classes(engine, step, engine.rank, engine.size)
            engine.backward(loss)
            engine.step()
            total = loss.detach().double().view(1)
            axis.group.all_reduce(total)
            losses.append(total.item())
        found = engine.full_state_dict()
    nodes.close()
    if world.rank:
        return
    first = {name: values.clone() for name, values in twin.weights.items()}
    twin.train()
    assert losses == pytest.approx(twin.losses, rel=1e-5)
    expected = twin.outer or twin.weights
    off = [(found[name] - expected[name]).norm() for name in expected]
    moved = [(first[name] - expected[name]).norm() for name in expected]
    assert torch.stack(off).norm() < 0.01 * torch.stack(moved).norm()
