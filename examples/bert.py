"""BERT of `transformers` with masked tokens: the head's weight is the embedding's.

mpirun -n 2 python examples/bert.py
"""

import torch
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

import hpczero

SAMPLES, LENGTH, VOCAB, MASK = 12, 16, 120, 3
SPEC = {
    "name": "bert",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "zero": {"stage": 2},
}


def build():
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "max_position_embeddings": LENGTH}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, **sizes, **more, **without))


def samples(step, rank, size):
    """Return tokens of which some are hidden, the tokens themselves, and which are hidden."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(4, VOCAB, (SAMPLES, LENGTH), generator=generator).sort().values
    hidden = torch.rand(tokens.shape, generator=generator) < 0.15
    hidden[:, 0] = True  # at least one each
    shown = tokens.masked_fill(hidden, MASK)
    return shown[rank::size], tokens[rank::size], hidden[rank::size], int(hidden.sum())


def loop(engine):
    """Train; yield this rank's part of each step's loss: a mean over all ranks' hidden tokens."""
    while engine.steps < engine.spec.train.steps:
        shown, tokens, hidden, count = samples(engine.steps, engine.rank, engine.size)
        logits = engine(input_ids=shown.to(engine.device)).logits.float()
        wanted = tokens.masked_fill(~hidden, -100).to(engine.device)  # the others do not count
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        loss = loss / count
        engine.backward(loss, last=True)
        engine.step()
        yield loss.item()


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
