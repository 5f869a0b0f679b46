"""`hpczero.data.batches`: a loop of one's own reads what `hpczero run` reads, on any ranks."""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hpczero
from hpczero.checkpoint.load import Checkpoint
from hpczero.comm.world import World
from hpczero.data.dataset import SyntheticSource, open_source
from hpczero.data.mixture import MixtureRecord
from hpczero.errors import HpczeroError, InputError
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches, Validation, mixed
from hpczero.train.mixed_data import MIXTURE
from tests.support.own_loops import spec_of
from tests.support.token_files import several_documents
from tests.support.user_modules import made

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]

SPEC: dict[str, Any] = spec_of(
    "",
    model={"seq_len": 9, "vocab": 300},
    data={"source": "synthetic"},
    train={"steps": 4, "global_batch": 5, "micro_batch": 2},
)


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 8)
        self.head = nn.Linear(8, 300)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self.head(self.embedding(batch.tokens)).flatten(0, 1)
        loss = functional.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        weights = batch.weights
        return (loss if weights is None else loss * weights.flatten()).sum()


def losses(world: World, spec: dict[str, Any]) -> list[float]:
    found = []
    with hpczero.initialize(made(Bigrams), spec, world) as engine:
        for step in hpczero.data.batches(spec, engine):
            total = torch.zeros(1, dtype=torch.float64)
            for number, batch in enumerate(step, 1):
                loss = engine(batch) / step.weight
                engine.backward(loss, last=number == len(step))
                total += loss.item()
            engine.step()
            world.everyone.all_reduce(total)
            found.append(total.item())
    return found


def test_the_samples_are_those_of_a_run(world: World, shared_folder: str) -> None:
    spec = SPEC | {"output": shared_folder}
    source = SyntheticSource(1, 300, 9)
    of_all = Batches(Spec.model_validate(spec), source, 0, 1)
    with hpczero.initialize(made(Bigrams), spec, world) as engine:
        engine.steps = 1  # as after `resume`
        found = list(hpczero.data.batches(spec, engine))
        assert len(found) == 3
        for number, step in enumerate(found, 1):
            assert step.weight == 5 * 9
            own = torch.cat([batch.samples for batch in step])
            expected = torch.cat([batch.tokens for batch in of_all.training(number)])
            assert torch.equal(torch.cat([batch.tokens for batch in step]), expected[own])
            counts = world.all_gather_objects(own.tolist())
            assert sorted(chain.from_iterable(counts)) == list(range(5))


@pytest.mark.parametrize("documents", ["packed", "masked", "padded"])
def test_any_ranks_give_the_losses_of_one(world: World, shared_folder: str, documents: str) -> None:
    path = f"{shared_folder}/text.h5"
    if world.rank == 0:
        several_documents(Path(shared_folder))
    world.everyone.barrier()
    data = {"source": path, "documents": documents}
    alone = world.part([world.rank])
    expected = losses(alone, SPEC | {"output": f"{shared_folder}/{world.rank}", "data": data})
    alone.close()
    assert losses(world, SPEC | {"output": shared_folder, "data": data}) == pytest.approx(
        expected, rel=1e-5
    )
    assert expected[0] == pytest.approx(math.log(300), rel=0.2)


def test_an_evaluation_reads_the_same_each_time(world: World, shared_folder: str) -> None:
    path = f"{shared_folder}/text.h5"
    if world.rank == 0:
        several_documents(Path(shared_folder))
    world.everyone.barrier()
    spec = SPEC | {"output": shared_folder, "data": {"source": path}}
    with hpczero.initialize(made(Bigrams), spec, world) as engine:
        once, again = (
            [
                batch.tokens
                for step in hpczero.data.batches(spec, engine, "validation")
                for batch in step
            ]
            for _ in range(2)
        )
        assert once
        assert all(map(torch.equal, once, again))


def test_a_loop_does_not_go_on_with_other_data(world: World, shared_folder: str) -> None:
    spec = SPEC | {"output": shared_folder, "checkpoint": {"every": 1}}
    with hpczero.initialize(made(Bigrams), spec, world) as engine:
        for step in hpczero.data.batches(spec, engine):
            engine.backward(sum(engine(batch) for batch in step) / step.weight)
            engine.step()
            engine.save()
            break
    with hpczero.initialize(made(Bigrams), spec, world) as engine:
        assert engine.resume().step == 1
        assert len(list(hpczero.data.batches(spec, engine))) == 3
        with pytest.raises(InputError, match="is a checkpoint of a run on other data"):
            hpczero.data.batches(spec | {"seed": 2}, engine)


def mixture_at(folder: Path) -> MixtureRecord:
    """Return the record of the mixture in the run's newest checkpoint."""
    [newest] = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1:]
    with Checkpoint.open(newest) as checkpoint:
        return MixtureRecord.from_text(checkpoint.identity[MIXTURE])


def test_an_evaluation_leaves_alone_where_a_mixture_is(world: World, shared_folder: str) -> None:
    """Weights change at a resume, and the loop evaluates some steps later."""
    folder = Path(shared_folder)
    if world.rank == 0:
        for name, first in (("a", 0), ("b", 100)):
            np.save(folder / f"{name}.npy", np.arange(3000, dtype="<u2") % 100 + first)
    world.everyone.barrier()

    def mixed(weight: float, steps: int) -> dict[str, Any]:
        weights = {"a": weight, "b": 1.0}
        sources = [
            {"path": str(folder / f"{name}.npy"), "weight": share}
            for name, share in weights.items()
        ]
        train = SPEC["train"] | {"steps": steps}
        return SPEC | {
            "name": "run",
            "output": shared_folder,
            "data": {"sources": sources},
            "train": train,
        }

    def trained(spec: dict[str, Any], until: int, evaluate_at: int = -1) -> None:
        with hpczero.initialize(made(Bigrams), spec, world) as engine:
            engine.resume()
            for step in hpczero.data.batches(spec, engine):
                engine.backward(sum(engine(batch) for batch in step) / step.weight)
                engine.step()
                if engine.steps == evaluate_at:
                    list(hpczero.data.batches(spec, engine, "validation"))
                if engine.steps == until:
                    break
            engine.save(wait=True)

    trained(mixed(1.0, 8), 8)
    trained(mixed(3.0, 20), 16, evaluate_at=13)
    found = mixture_at(folder)
    assert (found.first, list(found.counts.values())) == (40, [20, 20])
    assert list(found.counts_at(80).values()) == [20 + 30, 20 + 10]


def test_an_evaluation_of_a_mixture_names_and_weighs_its_sources(
    world: World, shared_folder: str
) -> None:
    """The losses are those that `hpczero run` gives."""
    folder = Path(shared_folder)
    if world.rank == 0:
        for name, first in (("a", 0), ("b", 100)):
            np.save(folder / f"{name}.npy", np.arange(3000, dtype="<u2") % 100 + first)
    world.everyone.barrier()
    paths = [str(folder / name) for name in ("a.npy", "b.npy")]
    sources = [
        {"path": path, "weight": weight} for path, weight in zip(paths, (3.0, 1.0), strict=True)
    ]
    data = {"sources": sources, "validation_fraction": 0.2}
    spec = SPEC | {"output": shared_folder, "data": data}
    spec["train"] = SPEC["train"] | {"eval_batches": 3}
    with hpczero.initialize(made(Bigrams), spec, world) as engine:
        steps = list(hpczero.data.batches(spec, engine, "validation"))
        assert [(step.source, step.share) for step in steps] == (
            [(paths[0], 0.75)] * 3 + [(paths[1], 0.25)] * 3
        )
        summed = torch.zeros(2, dtype=torch.float64)
        weights, shares = torch.zeros(2), torch.zeros(2)
        for step in steps:
            at = paths.index(step.source)
            for batch in step:
                assert ((100 * at <= batch.tokens) & (batch.tokens < 100 * at + 100)).all()
                summed[at] += engine(batch).item()
            weights[at] += step.weight
            shares[at] = step.share
        world.everyone.all_reduce(summed)
        agreed = Spec.model_validate(spec)
        of_all = Batches(agreed, open_source(agreed, lambda value: value), 0, 1)
        found = []
        for part, evaluation in zip(of_all.source.parts(), of_all.evaluations(), strict=True):
            whole = [batch for number in range(3) for batch in evaluation.evaluation(number)]
            mean = sum(engine(batch).item() for batch in whole) / (3 * 5 * 9)
            found.append((part, Validation(mean, None, 1, 1)))
        assert (shares * summed / weights).sum().item() == pytest.approx(mixed(found).loss)
        training = next(hpczero.data.batches(spec, engine))
        assert (training.source, training.share) == ("", 1.0)


def test_batches_are_of_the_steps_that_the_loop_is_at(world: World, shared_folder: str) -> None:
    spec = SPEC | {"output": shared_folder}
    with hpczero.initialize(made(Bigrams), spec, world) as engine:
        engine.save()
        steps = hpczero.data.batches(spec, engine)
        next(steps)
        assert engine.resume().step == 0
        with pytest.raises(HpczeroError, match="a checkpoint was loaded while the batches of"):
            next(steps)
        steps = hpczero.data.batches(spec, engine)
        next(steps)
        with pytest.raises(InputError, match="split = 'test': there are"):
            hpczero.data.batches(spec, engine, "test")  # type: ignore[arg-type]
        if world.size > 1:
            split: Any = "validation" if world.rank else "train"
            with pytest.raises(InputError, match="split is 'train' on rank 0 and 'valid"):
                hpczero.data.batches(spec, engine, split)
    with pytest.raises(HpczeroError, match="this engine is closed"):
        next(steps)
    with pytest.raises(HpczeroError, match="this engine is closed"):
        hpczero.data.batches(spec, engine)
