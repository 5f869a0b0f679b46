"""The micro-batches that a rank reads at each step, and the validation loss of those it evaluates.

An evaluation reads windows of tokens drawn without replacement from the whole validation split, so
that the mean loss over them estimates the mean over the split without bias. The standard error
follows from how much they differ among each other, however alike windows of one document are
(Cochran 1977, Sampling Techniques, chapter 2):

    standard error = sqrt((1 - n / N) s^2 / n)

where n of N windows are read, and s^2 is the variance of their losses. Windows may have different
numbers of targets (documents that are masked or padded): the loss of a target is then a ratio of
two sums, and what varies is the difference of a window's loss from that ratio times its targets
(the same book, chapter 2.11). A model that gives one loss for a whole micro-batch tells the same
variance by fewer numbers: the mean of m windows differs by s^2 / m.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite, sqrt
from operator import add
from typing import Any

import numpy as np
import torch

from hpczero.data.documents import Cut
from hpczero.data.masked_samples import Objective
from hpczero.data.objective import objective_of
from hpczero.data.samples import micro_batches_of
from hpczero.data.token_source import Part, TokenSource
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class Batches:
    """The global batches, the same for any number of `data_ranks`; this rank reads its part.

    Evaluations have the longest sequences.
    """

    spec: Spec
    source: TokenSource
    data_rank: int
    data_ranks: int
    objective: Objective | None = None  # that of the spec and source; `replace` keeps it
    _shorter: dict[int, "Batches"] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.spec.model.masks and not self.objective:
            object.__setattr__(self, "objective", objective_of(self.spec, self.source))

    def parts(self) -> list[range]:
        """Return this rank's positions in the global batch, a range per micro-batch.

        Some are empty if there are more ranks than samples.
        """
        train = self.spec.train
        return micro_batches_of(
            self.data_rank, train.global_batch, train.micro_batch, self.data_ranks
        )

    def training(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, in sequences as long as `schedule.seq_len` says."""
        spec = self.spec.at_step(step)
        if spec is self.spec:
            return self._of_step(step)
        if spec.seq_len not in self._shorter:
            source = self.source.of_length(spec.text_len)
            self._shorter[spec.seq_len] = replace(self, spec=spec, source=source)
        return self._shorter[spec.seq_len]._of_step(step)

    def _of_step(self, step: int) -> list[MicroBatch]:
        first = step * self.spec.train.global_batch
        return [self._read("train", first, part, step) for part in self.parts()]

    def evaluations(self) -> list["Batches"]:
        """Return the evaluations of each source of a mixture, or of the only source."""
        return [replace(self, source=part.source) for part in self.source.parts()]

    def evaluation_batches(self) -> int:
        """Return the number of global batches in an evaluation; the last one may be shorter."""
        available = -(-self.source.windows("validation") // self.spec.train.global_batch)
        return min(self.spec.train.eval_batches, available)

    def evaluation(self, number: int) -> list[MicroBatch]:
        """Return global batch `number` of the evaluation: always the same windows.

        They are drawn from the whole split by a hash of the run's seed. The first windows would be
        a few documents, whose loss is not the split's.
        """
        windows = self.source.windows("validation")
        first = number * self.spec.train.global_batch
        parts = [
            range(part.start, max(part.start, min(part.stop, windows - first)))
            for part in self.parts()
        ]
        return [replace(self._read("validation", first, part, 0), by_sample=True) for part in parts]

    def facts_after(self, steps: int) -> dict[str, Any]:
        """Return what an evaluation after so many steps is told with, whatever the losses are."""
        read = self.source.samples_of_sources(steps * self.spec.train.global_batch)
        entropy = self.source.unigram_entropy("validation")
        return ({"samples_of_sources": read} if read else {}) | {"unigram_entropy": entropy}

    def _read(self, split: str, first: int, positions: range, step: int) -> MicroBatch:
        """Read these positions of the global batch whose first sample is `first`."""
        here = range(first + positions.start, first + positions.stop)
        samples = torch.arange(positions.start, positions.stop, dtype=torch.int64)
        seed = self.spec.seed
        if self.objective:
            made = self.objective.samples(self.source, split, here)
            tensors: dict[str, Any] = {
                name: torch.from_numpy(array)
                for name, array in vars(made).items()
                if array is not None
            }
            return MicroBatch(**tensors, samples=samples, step=step, seed=seed)
        rows = np.empty((len(positions), self.spec.seq_len + 1), np.int64)
        source = self.source
        windows = source.chosen(split, seed, here)
        cuts = [source.fill(split, window, row) for row, window in zip(rows, windows, strict=True)]
        text = torch.from_numpy(rows)
        batch = MicroBatch(text[:, :-1], text[:, 1:], samples, step, seed)
        return batch if self.spec.data.documents == "packed" else with_documents(batch, cuts)

    def targets_of_split(self, split: str) -> int:
        """Return the most targets that samples of a split have."""
        if self.objective is None:
            return self.source.targets(split)
        return self.source.windows(split) * self.spec.model.target_count(self.spec.seq_len)


def with_documents(batch: MicroBatch, cuts: Sequence[Cut | None]) -> MicroBatch:
    """Return the micro-batch with positions, weights and documents as its samples are cut."""
    seq_len = batch.tokens.shape[1]
    positions = np.tile(np.arange(seq_len), (len(cuts), 1))
    weights = np.ones(positions.shape, np.float32)
    documents = []
    for cut, row, scored in zip(cuts, positions, weights, strict=True):
        begins = cut.begins if cut else ()
        for begin in begins:
            row[begin:] = np.arange(seq_len - begin)
        if cut:
            scored[cut.silent] = 0.0
        documents.append((*begins, seq_len))
    return replace(
        batch,
        positions=torch.from_numpy(positions),
        weights=torch.from_numpy(weights),
        documents=tuple(documents),
    )


@dataclass(frozen=True)
class Validation:
    """The mean loss in nats per target, over `tokens` of the split's.

    `standard_error` is None if there is only one number.
    """

    loss: float
    standard_error: float | None
    tokens: int
    of_tokens: int  # what the whole split has to predict
    of_sources: Mapping[str, float] = field(default_factory=dict)  # losses, of a mixture

    def facts(self) -> dict[str, Any]:
        facts = {
            "validation_loss": self.loss,
            "validation_standard_error": self.standard_error,
            "validation_tokens": self.tokens,
            "validation_tokens_of_split": self.of_tokens,
        }
        return facts | ({"validation_losses": dict(self.of_sources)} if self.of_sources else {})


def mixed(of_parts: Sequence[tuple[Part, Validation]]) -> Validation:
    """Return the loss of samples as they are mixed: each source's counts by its share."""
    if len(of_parts) == 1:
        return of_parts[0][1]
    errors = [part.weight * (one.standard_error or 0.0) for part, one in of_parts]
    is_known = all(one.standard_error is not None for _, one in of_parts)
    return Validation(
        sum(part.weight * one.loss for part, one in of_parts),
        sqrt(sum(error * error for error in errors)) if is_known else None,
        sum(one.tokens for _, one in of_parts),
        sum(one.of_tokens for _, one in of_parts),
        {part.name: one.loss for part, one in of_parts},
    )


@dataclass(frozen=True)
class Tally:
    """Sums over groups of windows, each with one loss; all add up over ranks and batches.

    The weight of a group is the sum of its targets'. Squares and products of a group are divided by
    its windows.
    """

    loss: float = 0.0
    weight: float = 0.0
    loss_squares: float = 0.0
    weight_squares: float = 0.0
    products: float = 0.0  # of loss and weight
    groups: float = 0.0
    windows: float = 0.0

    @classmethod
    def of(cls, batches: Iterable[MicroBatch], losses: Iterable[list[float]]) -> "Tally":
        """`losses`: of each batch, either one for each of its windows, or one for all of them."""
        tally = cls()
        for batch, groups in zip(batches, losses, strict=True):
            if not len(batch.samples):
                continue
            weights = [batch.loss_weight] if len(groups) == 1 else batch.weight_of_samples()
            each = len(batch.samples) / len(groups)  # windows in a group
            for loss, weight in zip(groups, weights, strict=True):
                squares = loss * loss / each, weight * weight / each
                tally += cls(loss, weight, *squares, loss * weight / each, 1.0, each)
        return tally

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*map(add, self.values(), other.values()))

    def values(self) -> list[float]:
        return [getattr(self, field.name) for field in fields(self)]

    def validation(self, of_windows: int, of_targets: int) -> Validation:
        """Estimate the loss of a split of so many windows and targets."""
        tokens = round(self.weight)
        error = self._standard_error(of_windows)
        return Validation(self.loss / tokens, error, tokens, of_targets)

    def _standard_error(self, of_windows: int) -> float | None:
        unseen = 1 - self.windows / of_windows
        if unseen <= 0:
            return 0.0
        if self.groups < 2 or not isfinite(self.loss):
            return None
        mean = self.loss / self.weight
        squares = self.loss_squares - 2 * mean * self.products + mean**2 * self.weight_squares
        variance = max(0.0, squares) / (self.groups - 1)
        return sqrt(unseen * variance / self.windows) * self.windows / self.weight
