"""Generation of tokens: a prompt goes through the model once, then each token once.

The next token is drawn from the model's distribution, sharpened by a temperature and cut down to
its likeliest tokens: `top_k` of them, and as few as have the share `top_p` together (Holtzman et
al. 2020). A draw is a hash of (seed, number of the prompt, position), so that a prompt's text does
not depend on which others it is generated with, but for rounding.

Legend: logits [samples, vocab].
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpczero.errors import HpczeroError
from hpczero.inference.decoder import Decoder, hidden_states
from hpczero.model.batch import MicroBatch
from hpczero.model.key_value_cache import KeyValueCache
from hpczero_kernels.random import key_of, words_at

_WORDS = 1 << 32  # values of a random word


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token. `temperature` 0: the likeliest; `top_k` 0, `top_p` 1: any.

    `ids`: those from this number on stand for nothing, as a vocabulary may be padded; 0: none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ids: int = 0

    def next(self, logits: Tensor, prompts: Tensor, positions: Tensor) -> Tensor:
        """Return a token [samples] for these positions of the prompts with these numbers."""
        logits = logits[:, : self.ids or None]
        if self.temperature == 0:
            return logits.argmax(-1)
        # of the largest logit nothing remains, however small the temperature is
        logits = (logits.double() - logits.max(-1, keepdim=True).values) / self.temperature
        count = min(self.top_k or logits.shape[-1], logits.shape[-1])
        # of equal logits the one with the smaller number is first
        likeliest, tokens = logits.sort(stable=True, dim=-1, descending=True)
        sums = likeliest[:, :count].softmax(-1).cumsum(-1)
        kept = (sums < self.top_p).sum(-1, keepdim=True).clamp(max=count - 1)
        words = words_at(key_of(self.seed, "sample"), prompts, positions)
        draw = (words.double() + 0.5)[:, None] / _WORDS * sums.gather(-1, kept)
        chosen = (sums <= draw).sum(-1, keepdim=True).clamp(max=count - 1)
        return tokens.gather(-1, chosen)[:, 0]


@dataclass(frozen=True)
class Request:
    """Prompts, each of at least one token, and where to end.

    `limit`: tokens in prompt and answer together; `most`: tokens in an answer; `end`: the token
    that ends one. `first`: the number of the first prompt.
    """

    prompts: Sequence[Sequence[int]]
    most: int
    limit: int
    end: int
    first: int = 0

    @property
    def room(self) -> int:
        """The most tokens that a prompt and its answer can have."""
        return min(max(map(len, self.prompts)) + self.most, self.limit)


@torch.inference_mode()
def generate(
    model: Decoder, request: Request, sampling: Sampling, device: torch.device
) -> Iterator[dict[int, int]]:
    """Yield the next tokens, each by the place of its prompt, as long as any answer goes on."""
    lengths = [len(prompt) for prompt in request.prompts]
    # tokens that each answer may still have
    left = [min(request.most, request.limit - length) for length in lengths]
    rows = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in request.prompts]
    open_ = list(range(len(rows)))  # places of the prompts whose answers go on
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    cache = KeyValueCache(lengths, request.room, device)
    last = torch.tensor(lengths, dtype=torch.int64, device=device) - 1
    positions = None
    while True:
        going_on = [row for row, place in enumerate(open_) if left[place]]
        if len(going_on) < len(open_):
            open_ = [open_[row] for row in going_on]
            cache.keep(going_on)
            tokens, last = tokens[going_on], last[going_on]
            positions = None if positions is None else positions[going_on]
        if not open_:
            return
        numbers = torch.tensor(open_, dtype=torch.int64, device=device) + request.first
        batch = MicroBatch(tokens, tokens, numbers, 0, 0, positions=positions, cache=cache)
        logits = _logits(model, batch, last)
        if logits.isnan().any():
            raise HpczeroError(
                "the model's logits are not numbers (NaN): `hpczero ckpt stats` shows whether its "
                "weights are"
            )
        cache.advance()
        positions = cache.positions
        chosen = sampling.next(logits, numbers, positions[:, 0])
        answer = dict(zip(open_, chosen.tolist(), strict=True))
        for place, token in answer.items():
            left[place] = 0 if token == request.end else left[place] - 1
        yield answer
        tokens = chosen[:, None]
        last = torch.zeros_like(tokens[:, 0])


def _logits(model: Decoder, batch: MicroBatch, last: Tensor) -> Tensor:
    """Return the logits of the token that follows each sample's position `last`."""
    x, head = hidden_states(model, batch)
    samples = torch.arange(len(x), dtype=torch.int64, device=x.device)
    scores: Tensor = head.scores(x[samples, last][:, None])[:, 0]
    return scores
