"""BERT (Devlin et al. 2019) in plain PyTorch that knows no parallelism.

As published a norm follows each sum with the residual stream, and the embedding; with
`model.norm_order = "pre"` norms stand where GPT has them (Megatron-LM's BERT, Shoeybi et al. 2019).
Attention looks both ways. The head works on the masked positions alone, and on the first one, whose
vector says of two sentences whether they belong together.

Legend: [samples, seq, hidden], picked [samples, targets, hidden].
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from hpczero.model import gpt, maps
from hpczero.model.batch import MicroBatch
from hpczero.model.gpt import Norm
from hpczero.model.modules import CrossEntropy, Dropout, Layered, Linear
from hpczero.spec.schema import Model
from hpczero_kernels.operations import OPERATIONS


class Bert(Layered):
    def __init__(self, model: Model) -> None:
        blocks = (gpt.Block(model, index) for index in range(model.layers))
        super().__init__(model, embedding=Embedding(model), blocks=blocks, head=Head(model))


class Lookup(gpt.Lookup):
    """Embeddings of tokens, of their positions and of their segments."""

    def __init__(self, vocab: int, seq_len: int, hidden: int) -> None:
        super().__init__(vocab, seq_len, hidden)
        self.segments = nn.Parameter(torch.empty(2, hidden))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert segments is not None
        return super().forward(tokens, positions) + maps.of_segments(self.segments, segments)


class Embedding(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lookup = Lookup(model.vocab, model.seq_len, model.hidden)
        self.norm = Norm(model) if model.norm_order == "post" else nn.Identity()
        self.dropout = Dropout(model, "embedding")

    def forward(self, tokens: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        vectors = self.lookup(tokens, batch.positions, batch.segments)
        return self.dropout(self.norm(vectors), batch)


class Pick(nn.Module):
    """The vectors at some positions of each sample."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class Head(nn.Module):
    """The loss of masked tokens, and of the sentences' order, which counts once for each target."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden = model.hidden
        self.pick = Pick()
        self.norm = Norm(model) if model.norm_order == "pre" else nn.Identity()
        self.transform = Linear(hidden, hidden)
        self.gelu = partial(OPERATIONS[model.kernels].gelu, by_tanh=False)
        self.transform_norm = Norm(model)
        self.logits = Linear(hidden, model.vocab)
        self.loss = CrossEntropy(model)
        if model.sentences != "none":
            self.pooler = Linear(hidden, hidden)
            self.sentences = Linear(hidden, 2)

    def forward(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        positions = batch.target_positions
        assert positions is not None
        assert batch.weights is not None
        first = positions.new_zeros(len(positions), 0 if batch.labels is None else 1)
        picked = self.norm(self.pick(x, torch.cat([first, positions], 1)))
        scores = self.scores(picked[:, first.shape[1] :])
        loss: torch.Tensor = self.loss(scores, batch.targets, batch.weights, batch.by_sample)
        if batch.labels is None:
            return loss
        scores = self.label_scores(picked[:, 0]).float()
        of_labels = functional.cross_entropy(scores, batch.labels, reduction="none")
        of_labels = of_labels * batch.weights.sum(1)
        return loss + (of_labels if batch.by_sample else of_labels.sum())

    def scores(self, picked: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that may be at these positions."""
        return self.logits(self.transform_norm(self.gelu(self.transform(picked))))

    def label_scores(self, first: torch.Tensor) -> torch.Tensor:
        """Return the logits [samples, 2] of the label, from the vector of the first position."""
        return self.sentences(torch.tanh(self.pooler(first)))
