"""T5 of `transformers`: encoder and decoder, one embedding for both and for the head.

mpirun -n 2 python examples/t5.py
"""

import torch
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

import hpczero

SAMPLES, LENGTH, VOCAB = 12, 12, 100
SPEC = {
    "name": "t5",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "zero": {"stage": 3},
}


def build():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, dropout_rate=0.0, **sizes, **ids))


def samples(step, rank, size):
    """Return texts and what is to be made of them: the same backwards."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(2, VOCAB, (SAMPLES, LENGTH), generator=generator)
    return tokens[rank::size].contiguous(), tokens.flip(1)[rank::size].contiguous()


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        given, wanted = samples(engine.steps, engine.rank, engine.size)
        wanted = wanted.to(engine.device)
        logits = engine(input_ids=given.to(engine.device), labels=wanted).logits.float()
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        loss = loss / (SAMPLES * LENGTH)
        engine.backward(loss, last=True)
        engine.step()
        yield loss.item()


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
