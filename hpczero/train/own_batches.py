"""`hpczero.data.batches`: the batches of `hpczero run`, for a loop of one's own.

A global batch is the same whatever the ranks: each gets its part of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hpczero.data.dataset import open_source
from hpczero.data.samples import Prefetcher
from hpczero.errors import HpczeroError, InputError
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Spec
from hpczero.train.arguments import refuse_what_differs
from hpczero.train.batches import Batches
from hpczero.train.initialize import Training, spec_of_all
from hpczero.train.mixed_data import as_recorded, identity_of_data, refuse_early_end


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one step, on its device; `for batch in it` gives them.

    `weight`: the sum of the targets' weights over all ranks. Where each backward gets the summed
    loss of a micro-batch divided by it, the step follows the mean loss of a target.

    In an evaluation of a mixture a batch is of one `source`, whose mean loss has the weight `share`
    in that of all; the shares add up to 1. Else these are "" and 1.
    """

    micro_batches: tuple[MicroBatch, ...]
    weight: float
    source: str = ""
    share: float = 1.0

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


def batches(
    spec: Spec | str | Path | Mapping[str, Any],
    engine: Training,
    split: Literal["train", "validation"] = "train",
) -> Iterator[GlobalBatch]:
    """Return the global batches of the steps from `engine.steps` to `train.steps`.

    Of the spec count [data], `model.seq_len`, `schedule.seq_len`, `model.vocab`, `seed` and of
    [train] the numbers of steps and samples. With the split "validation" they are those of an
    evaluation (`train.eval_batches`), the same ones each time. Collective; every rank takes all of
    them.
    """
    engine.refuse_closed()
    run = engine.run
    refuse_what_differs(run.world, "hpczero.data.batches", {"split": repr(split)})
    if split not in ("train", "validation"):
        raise InputError(f'split = {split!r}: there are "train" and "validation"')
    agreed = spec_of_all(spec, run.world)
    first = run.world.rank == 0
    source = run.world.run_on_all(lambda: open_source(agreed, run.world.broadcast_object, first))
    batch = agreed.train.global_batch
    identity = run.world.run_on_all(lambda: run.reads(identity_of_data(source), batch))
    source = as_recorded(source, identity)
    of_rank = Batches(agreed, source, engine.rank, engine.size)
    if split == "validation":
        return _evaluation(of_rank, engine)
    return _training(of_rank, engine)


def _training(of_rank: Batches, engine: Training) -> Iterator[GlobalBatch]:
    spec = of_rank.spec
    refuse_early_end(of_rank.source, spec)
    first = engine.steps
    last = spec.train.steps - 1
    jumps = engine.run.jumps
    prefetcher = Prefetcher(of_rank.training, first, last, spec.data.prefetch)
    try:
        for _ in range(first, last + 1):
            engine.refuse_closed()
            if engine.run.jumps != jumps:
                raise HpczeroError(
                    "a checkpoint was loaded while the batches of other steps were taken: call"
                    f" hpczero.data.batches again, for those from step {engine.steps} on"
                )
            with engine.run.world.doing("data"):
                micro_batches, waited = prefetcher.next()
            engine.run.clock.waited_for_data(waited)
            yield _on_device(micro_batches, engine)
    finally:
        prefetcher.close()


def _evaluation(of_rank: Batches, engine: Training) -> Iterator[GlobalBatch]:
    for part, of_part in zip(of_rank.source.parts(), of_rank.evaluations(), strict=True):
        for number in range(of_part.evaluation_batches()):
            found = _on_device(of_part.evaluation(number), engine)
            yield replace(found, source=part.name, share=part.weight)


def _on_device(micro_batches: list[MicroBatch], engine: Training) -> GlobalBatch:
    own = sum(batch.loss_weight for batch in micro_batches)
    weight = torch.tensor([own], dtype=torch.float64)
    engine.engine.axis.group.all_reduce(weight)
    device = engine.engine.device
    return GlobalBatch(tuple(batch.on(device) for batch in micro_batches), weight.item() or 1.0)
