"""Evaluation of a checkpoint on the windows of a token file, shared out among ranks.

Windows go through the model in batches that do not depend on the number of ranks; data rank d of D
takes batches d, d + D, …. Tensor ranks share each batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import exp, log, nan

import numpy as np
import torch

from hpczero.comm.group import Group
from hpczero.data.samples import window
from hpczero.data.token_source import TokenSource
from hpczero.device import Device
from hpczero.inference.decoder import Decoder, hidden_states
from hpczero.model.batch import MicroBatch
from hpczero.parallel.tensor.vocabulary import likeliest
from hpczero.train.batches import Tally, with_documents

Advance = Callable[[int], None]  # takes the number of windows that are done


@dataclass(frozen=True)
class EvaluationSet:
    """The windows to evaluate: all of a split, or `count` of them, drawn by the seed.

    `sizes`: bytes of text that each id stands for, if known.
    """

    source: TokenSource
    split: str
    seq_len: int
    documents: str
    seed: int
    count: int = 0
    sizes: torch.Tensor | None = None

    @property
    def windows(self) -> int:
        there = self.source.windows(self.split)
        return min(self.count or there, there)

    def read(self, numbers: range) -> MicroBatch:
        """Read windows by their place among those that are evaluated."""
        there = self.source.windows(self.split)
        rows = np.empty((len(numbers), self.seq_len + 1), np.int64)
        cuts = [
            self.source.fill(self.split, self._window(number, there), row)
            for number, row in zip(numbers, rows, strict=True)
        ]
        text = torch.from_numpy(rows)
        samples = torch.arange(numbers.start, numbers.stop, dtype=torch.int64)
        batch = MicroBatch(text[:, :-1], text[:, 1:], samples, 0, self.seed, by_sample=True)
        return batch if self.documents == "packed" else with_documents(batch, cuts)

    def _window(self, number: int, there: int) -> int:
        return window(self.seed, there, number) if self.windows < there else number


@dataclass(frozen=True)
class Figures:
    """Sums over targets; they add up over batches and ranks."""

    tally: Tally = field(default_factory=Tally)
    hits: float = 0.0  # weight of the targets that the model held likeliest
    size: float = 0.0  # bytes of text of the targets; NaN: not known

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(self.tally + other.tally, self.hits + other.hits, self.size + other.size)

    def summed(self, group: Group) -> "Figures":
        """Return the sums over the ranks of a group. Collective."""
        sums = torch.tensor([*self.tally.values(), self.hits, self.size], dtype=torch.float64)
        group.all_reduce(sums)
        *tally, hits, size = sums.tolist()
        return Figures(Tally(*tally), hits, size)

    def facts(self, text: EvaluationSet) -> dict[str, float | int | None]:
        estimate = self.tally.validation(text.source.windows(text.split), 0)
        bits = self.tally.loss / log(2)
        return {
            "loss": estimate.loss,
            "standard_error": estimate.standard_error,
            "perplexity": exp(min(estimate.loss, 700.0)),
            "bits_per_byte": bits / self.size if self.size > 0 else None,
            "accuracy": self.hits / self.tally.weight,
            "tokens": estimate.tokens,
            "tokens_of_split": text.source.targets(text.split),
            "windows": round(self.tally.windows),
            "bytes": round(self.size) if self.size >= 0 else None,
        }


@dataclass(frozen=True)
class RankWork:
    """This rank's part of an evaluation; `tensor`: the group that shares each batch, if any."""

    data: Group
    tensor: Group | None
    batch: int  # windows
    device: Device


@torch.inference_mode()
def evaluate(model: Decoder, text: EvaluationSet, work: RankWork, advance: Advance) -> Figures:
    """Return the figures over all ranks. Collective."""
    found = Figures()
    for numbers in _batches(text.windows, work):
        found += _of_batch(model, text.read(numbers), text.sizes, work)
        advance(len(numbers))
    return found.summed(work.data)


def _batches(windows: int, work: RankWork) -> Iterator[range]:
    step = work.batch * work.data.size
    for first in range(work.data.rank * work.batch, windows, step):
        yield range(first, min(first + work.batch, windows))


def _of_batch(
    model: Decoder, batch: MicroBatch, sizes: torch.Tensor | None, work: RankWork
) -> Figures:
    there = batch.on(work.device)
    x, head = hidden_states(model, there)
    logits = head.scores(x)
    guessed = likeliest(logits, head.loss.vocab, work.tensor).cpu()
    losses = head.loss(logits, there.targets, there.weights, by_sample=True)
    weights = (
        torch.ones(batch.targets.shape, dtype=torch.float32)
        if batch.weights is None
        else batch.weights
    )
    hits = (weights * (guessed == batch.targets)).double().sum().item()
    of_targets = torch.zeros_like(batch.targets) if sizes is None else sizes[batch.targets]
    is_known = sizes is not None and not (weights * (of_targets < 0)).any()
    size = (weights * of_targets).double().sum().item() if is_known else nan
    return Figures(Tally.of([batch], [losses.double().tolist()]), hits, size)
