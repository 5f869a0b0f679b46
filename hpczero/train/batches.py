"""What a rank reads at each step: its micro-batches of the global batch, as tensors."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from hpczero.data import sampler
from hpczero.data.dataset import Source
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class Batches:
    """The same global batches whatever `data_ranks` is; this rank takes the part of `data_rank`."""

    spec: Spec
    source: Source
    data_rank: int
    data_ranks: int

    def parts(self) -> list[range]:
        """This rank's positions in the global batch, a range per micro-batch (empty ones where there are more ranks than samples)."""
        train = self.spec.train
        return sampler.micro_batches_of(self.data_rank, train.global_batch, train.micro_batch, self.data_ranks)

    def training(self, step: int) -> list[MicroBatch]:
        windows, first = self.source.windows("train"), step * self.spec.train.global_batch
        return [
            self._read("train", part, [sampler.window(self.spec.seed, windows, first + position) for position in part], step)
            for part in self.parts()
        ]

    def evaluation_batches(self) -> int:
        """Global batches in an evaluation: as many as the spec asks for and the validation text fills (its last one may be shorter)."""
        available = -(-self.source.windows("validation") // self.spec.train.global_batch)
        return min(self.spec.train.eval_batches, available)

    def evaluation(self, number: int) -> list[MicroBatch]:
        """Global batch `number` of the evaluation: always the same windows, drawn from the whole split by a hash of the run's seed.

        The first windows of the split would be a few documents, whose loss is not the split's.
        """
        windows, first = self.source.windows("validation"), number * self.spec.train.global_batch
        parts = [range(part.start, max(part.start, min(part.stop, windows - first))) for part in self.parts()]
        drawn = [[sampler.window(self.spec.seed, windows, first + position) for position in part] for part in parts]
        read = [self._read("validation", part, own, 0) for part, own in zip(parts, drawn, strict=True)]
        return [replace(batch, by_sample=True) for batch in read]

    def _read(self, split: str, positions: range, windows: list[int], step: int) -> MicroBatch:
        rows = np.empty((len(windows), self.spec.model.seq_len + 1), np.int64)
        for row, window in zip(rows, windows, strict=True):
            self.source.fill(split, window, row)
        text = torch.from_numpy(rows)
        samples = torch.arange(positions.start, positions.stop, dtype=torch.int64)
        return MicroBatch(text[:, :-1], text[:, 1:], samples, step, self.spec.seed)
