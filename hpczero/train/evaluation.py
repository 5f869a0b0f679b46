"""The validation loss of a random sample of windows, and how far it may be from the whole split's.

The windows that an evaluation reads are drawn without replacement from the whole split
(`Batches.evaluation`), so that the mean over them estimates the mean over the split without bias.
The standard error follows from how much they differ among each other, however alike windows of one
document are (Cochran 1977, Sampling Techniques, chapter 2):

    standard error = sqrt((1 - n / N) s^2 / n)

where n of N windows are read, and s^2 is the variance of their losses.

A model that gives one loss for a whole micro-batch tells the same variance by fewer numbers: the
mean of m windows differs by s^2 / m.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, sqrt

from hpczero.model.batch import MicroBatch


@dataclass(frozen=True)
class Validation:
    """The mean loss in nats per token, over so many of the split's tokens.

    `standard_error` is None where one number says nothing.
    """

    loss: float
    standard_error: float | None
    tokens: int
    of_tokens: int  # what the whole split has to predict

    def facts(self) -> dict[str, float | int | None]:
        return {
            "validation_loss": self.loss,
            "validation_standard_error": self.standard_error,
            "validation_tokens": self.tokens,
            "validation_tokens_of_split": self.of_tokens,
        }


@dataclass(frozen=True)
class Tally:
    """Sums over groups of windows, each with one loss; all add up over ranks and batches."""

    loss: float = 0.0  # summed over tokens
    squares: float = 0.0  # of each group's loss, divided by its windows
    groups: float = 0.0
    windows: float = 0.0

    @classmethod
    def of(cls, batches: Iterable[MicroBatch], losses: Iterable[list[float]]) -> "Tally":
        """`losses`: of each batch, either one for each of its windows, or one for all of them."""
        found = cls()
        for batch, own in zip(batches, losses, strict=True):
            samples = len(batch.samples)
            if samples:
                each = samples / len(own)
                found += cls(sum(own), sum(loss * loss for loss in own) / each, len(own), samples)
        return found

    def __add__(self, other: "Tally") -> "Tally":
        pairs = zip(self.values(), other.values(), strict=True)
        return Tally(*(own + theirs for own, theirs in pairs))

    def values(self) -> list[float]:
        return [self.loss, self.squares, self.groups, self.windows]

    def validation(self, of_windows: int, seq_len: int) -> Validation:
        """From these to the loss of a split of so many windows."""
        tokens = round(self.windows) * seq_len
        error = self._standard_error(of_windows, seq_len)
        return Validation(self.loss / tokens, error, tokens, of_windows * seq_len)

    def _standard_error(self, of_windows: int, seq_len: int) -> float | None:
        unseen = 1 - self.windows / of_windows
        if unseen <= 0:
            return 0.0
        if self.groups < 2 or not isfinite(self.loss):
            return None
        variance = max(0.0, self.squares - self.loss**2 / self.windows) / (self.groups - 1)
        return sqrt(unseen * variance / self.windows) / seq_len
