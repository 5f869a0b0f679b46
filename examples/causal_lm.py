"""A causal language model of `transformers`, with gradients of two micro-batches a step.

mpirun -n 2 python examples/causal_lm.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hpczero

SAMPLES, LENGTH, VOCAB = 12, 16, 128
SPEC = {
    "name": "causal-lm",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "zero": {"stage": 3},
}


def build():
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads))


def samples(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator).sort().values
    return tokens[rank::size]


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        total = 0.0
        tokens = samples(engine.steps, engine.rank, engine.size).to(engine.device)
        for part in tokens.chunk(2):
            loss = engine(input_ids=part, labels=part).loss  # the mean of its samples
            loss = loss * len(part) / SAMPLES
            engine.backward(loss)
            total += loss.item()
        engine.step()
        yield total


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
