"""Checkpoints of modules that a tensor plan cuts: no trace of the cut, whatever reads them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hpczero
from hpczero.checkpoint.load import Checkpoint
from hpczero.comm.world import World
from tests.support.tensor_plans import MODELS, STEPS, loss_of, made, spec_of

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2), pytest.mark.ranks(2, 3, 4)]


def losses(engine: Any, until: int) -> list[float]:
    """Every data rank has all samples: the sum over ranks is divided by them."""
    found = []
    while engine.steps < until:
        loss = loss_of(engine, engine.steps)
        engine.backward(loss / engine.size)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama 1", "bert"])
@pytest.mark.slow
def test_what_a_plan_cut_is_read_with_and_without_it(
    world: World, shared_folder: str, name: str
) -> None:
    kind, plan = MODELS[name]
    cut = spec_of(world.size, 2) | {"output": shared_folder, "name": "cut"}
    with hpczero.initialize(made(kind), cut, world, tensor_plan=plan) as engine:
        losses(engine, STEPS // 2)
        engine.save(wait=True)
        state = engine.full_state_dict()
        rest = losses(engine, STEPS)
    if world.rank == 0:
        path = Path(shared_folder) / "cut" / "checkpoints" / f"step-{STEPS // 2:08d}"
        with Checkpoint.open(path) as checkpoint:
            for name_of_one, tensor in made(kind).named_parameters():
                saved = checkpoint[f"/model/{name_of_one}"].numpy()
                assert torch.equal(torch.from_numpy(saved), state[name_of_one].float())
                assert saved.shape == tuple(tensor.shape)
    with hpczero.initialize(made(kind), cut, world, tensor_plan=plan) as engine:
        assert engine.resume().step == STEPS // 2
        assert losses(engine, STEPS) == rest, "to the bit"
    whole = spec_of(1, 3) | {"output": shared_folder, "name": "whole"}
    with hpczero.initialize(made(kind), whole, world) as engine:
        assert engine.load(f"{shared_folder}/cut").step == STEPS // 2
        assert losses(engine, STEPS) == pytest.approx(rest, rel=1e-5)
        engine.save(wait=True, step=3)
    with hpczero.initialize(made(kind), cut | {"name": "again"}, world, tensor_plan=plan) as engine:
        engine.load(f"{shared_folder}/whole")
        after = engine.full_state_dict()
    if world.rank == 0:
        path = Path(shared_folder) / "whole" / "checkpoints" / "step-00000003"
        with Checkpoint.open(path) as checkpoint:
            for name_of_one, _ in made(kind).named_parameters():
                saved = torch.from_numpy(checkpoint[f"/model/{name_of_one}"].numpy())
                assert torch.equal(saved, after[name_of_one].float())
