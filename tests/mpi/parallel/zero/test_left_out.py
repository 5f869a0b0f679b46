"""Parameters without a gradient in a step are left out of it, and count their own updates, as in
torch.optim.AdamW.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hpczero
import hpczero.checkpoint
from hpczero.checkpoint import manifest
from hpczero.comm.world import World
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Model, Spec
from tests.support.saving import spec_of as checkpoint_spec
from tests.support.saving import trained
from tests.support.user_modules import WAYS, made

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]

WIDTH, STEPS, LR, EPS = 16, 7, 1e-2, 1e-6


class Optional(nn.Module):
    """A chain of layers, of which some may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number in used:
                x = torch.tanh(layer(x))
        return x.square().sum() / 10


def samples(rank: int, size: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))[rank::size]


def used_in(step: int) -> set[int]:
    return {0, 4} | ({1} if step % 3 == 0 else set()) | ({2} if step >= 3 else set()) | {3}


def by_pytorch(freeze: Any) -> dict[str, torch.Tensor]:
    module = made(Optional)
    groups = [
        {
            "params": [own for own in module.parameters() if (own.dim() > 1) == decays],
            "weight_decay": 0.1 * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, LR, (0.9, 0.95), EPS)
    for step in range(STEPS):
        freeze(module, step)
        optimizer.zero_grad()
        used = used_in(step)
        (
            module(samples(0, 2), used) + module(samples(1, 2), used - {4} if step % 2 else used)
        ).backward()
        optimizer.step()
    return module.state_dict()


def freeze(module: Any, step: int) -> None:
    module.layers[0].requires_grad_(step >= 4)
    module.layers[3].bias.requires_grad_(step not in (2, 3))


@pytest.mark.parametrize(("stage", "shared"), WAYS)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.few(3)
def test_frozen_and_unused_parameters_are_stepped_as_by_pytorch(
    world: World, stage: int, shared: bool
) -> None:
    """The second half of the samples leaves a layer out in some steps: on some ranks only, at
    two ranks.
    """
    spec = {
        "train": {"precision": "fp32", "steps": STEPS, "grad_clip": 0},
        "optimizer": {"lr": LR, "eps": EPS},
        "zero": {"stage": stage, "node_shared": shared},
    }
    gathers = stage == 3 and not (
        shared and world.size > 1
    )  # then all ranks have to run the same layers
    with hpczero.initialize(made(Optional), spec, world) as engine:
        for step in range(STEPS):
            freeze(engine.module, step)
            if step == 2:  # what is dropped was never there: layer 2 has still to join
                engine.backward(engine(samples(world.rank, world.size), {0, 1, 2, 3, 4}))
                engine.zero_grad()
            used = used_in(step)
            parts = [
                (samples(half, 2), used - {4} if half and step % 2 else used) for half in (0, 1)
            ]
            for number, (x, layers) in enumerate(parts):
                if gathers or world.size == 1:
                    engine.backward(engine(x[world.rank :: world.size], layers))
                elif number == min(world.rank, 1):
                    engine.backward(engine(x if world.rank < 2 else x[:0], layers))
            engine.step(lr=LR)
        found = engine.full_state_dict()
        missed = engine.engine.absent.missed
    assert missed["layers.0.weight"] == 4
    assert missed["layers.3.bias"] == 2
    assert "layers.3.weight" not in missed
    assert "layers.4.weight" not in missed
    if world.rank == 0:
        for name, tensor in by_pytorch(freeze).items():
            assert (tensor - found[name]).norm() <= 2e-5 * tensor.norm(), name


class Growing(nn.Module):
    """Module that model.family names: a layer joins in the fourth forward; a buffer says when."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.late, self.head = (
            nn.Linear(model.hidden, model.hidden),
            nn.Linear(model.hidden, model.vocab),
        )
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        x = self.embedding(batch.tokens)
        if self.forwards > 3:
            x = self.late(x)
        return functional.cross_entropy(
            self.head(x).flatten(0, 1).float(), batch.targets.flatten(), reduction="sum"
        )


def growing(output: str, grid: str, steps: int, resume: str = "auto") -> Spec:
    spec = checkpoint_spec(output, grid, resume=resume, keep=0)
    train = spec.train.model_copy(
        update={"steps": steps, "global_batch": 4, "micro_batch": 2 if "2" in grid else 4}
    )
    model = spec.model.model_copy(update={"family": f"{__name__}:Growing"})
    schedule = spec.schedule.model_copy(update={"name": "constant"})
    return spec.model_copy(update={"train": train, "model": model, "schedule": schedule})


def grids_of(ranks: int, everything: bool) -> list[dict[str, str]]:
    names = {1: ["alone"], 2: ["data 2", "data 2, parameters cut", "data 2, one copy"]}
    return [{"grid": name} for name in names.get(ranks, [])]


@pytest.mark.cases(of=grids_of)
@pytest.mark.few(1)
def test_counts_of_updates_survive_saving(
    world: World, shared_folder: str, case: dict[str, str]
) -> None:
    grid = case["grid"]
    whole = trained(world, growing(f"{shared_folder}/whole", grid, steps=6))
    for steps in (2, 5, 6):
        again = trained(world, growing(f"{shared_folder}/parts", grid, steps=steps))
    assert again.losses == whole.losses[5:]
    paths = sorted(Path(shared_folder).glob("whole/*/checkpoints/step-*"))
    (last,) = Path(shared_folder).glob("parts/*/checkpoints/step-*6")
    with hpczero.checkpoint.open(paths[-1]) as one, hpczero.checkpoint.open(last) as other:
        for tensor in one.table.tensors:
            for part in ("model", "optimizer/moment1", "optimizer/moment2"):
                name = f"/{part}/{tensor.name}"
                assert torch.equal(one[name].torch(), other[name].torch()), name
    found = [manifest.read(path) for path in paths]
    assert [content.state.missed.get("late.weight") for content in found] == [1, 2, 3, 3, 3, 3]
    assert {content.format for content in found} == {2}


@pytest.mark.ranks(1, 2)
def test_a_model_that_uses_all_has_checkpoints_of_format_1(
    world: World, shared_folder: str
) -> None:
    spec = growing(shared_folder, "data 2" if world.size > 1 else "alone", steps=1)
    model = spec.model.model_copy(update={"family": "tests.support.models:TextModel"})
    trained(world, spec.model_copy(update={"model": model}))
    (path,) = Path(shared_folder).glob("*/checkpoints/step-*")
    assert manifest.read(path).format == 1
    assert b"missed" not in (path / "MANIFEST.json").read_bytes()
