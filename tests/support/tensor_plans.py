"""Modules of users with tensor plans, and the same training by plain PyTorch on one rank."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hpczero
from hpczero.comm.world import World
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.tensor.heads import Column
from hpczero.spec.schema import Spec

STEPS, SAMPLES, VOCAB, LENGTH = 20, 12, 41, 12
Plan = Mapping[str, str | Column]

LLAMA: Plan = {
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "*.self_attn.[qkv]_proj": "column",
    "*.self_attn.o_proj": "row",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
}
GPT2: Plan = {
    "transformer.wte": "vocabulary",
    "lm_head": "vocabulary",
    "*.attn.c_attn": Column(sections=3),
    "*.mlp.c_fc": "column",
    "*.c_proj": "row",
}
BERT: Plan = {
    "*.word_embeddings": "vocabulary",
    "cls.predictions.decoder": "vocabulary",
    "*.self.query": "column",
    "*.self.key": "column",
    "*.self.value": "column",
    "*.intermediate.dense": "column",
    "*.output.dense": "row",
}
LAYERS = {"llama": "model.layers.*", "gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*"}


class Mlp(nn.Module):
    """Numbers [samples, 16] and classes -> the mean loss; widths that no ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 37), nn.GELU(), nn.Linear(37, 24))
            for _ in range(3)
        )
        self.last = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.last(x), y)


def llama(key_heads: int, name: str = "Llama", **more: Any) -> nn.Module:
    transformers = transformers_or_skip()
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 50,
        "num_attention_heads": 4,
        "num_key_value_heads": key_heads,
        "head_dim": 8,
        "vocab_size": VOCAB,
    }
    config = getattr(transformers, f"{name}Config")(**sizes | more)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def gpt2(dropout: float = 0.0) -> nn.Module:
    transformers = transformers_or_skip()
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **tokens, **drops)
    )
    return model


def bert(dropout: float = 0.0) -> nn.Module:
    transformers = transformers_or_skip()
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    model: nn.Module = transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=VOCAB, intermediate_size=48, **sizes, **drops)
    )
    return model


def transformers_or_skip() -> Any:
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install hpczero[test]"
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "mlp": (Mlp, {"blocks.*.1": "column", "blocks.*.3": "row"}),
    "llama 1": (lambda: llama(1, tie_word_embeddings=True), LLAMA),
    "llama 2": (lambda: llama(2, attention_bias=True, mlp_bias=True), LLAMA),
    "llama 4": (lambda: llama(4), LLAMA),
    "gpt2": (gpt2, GPT2),
    "bert": (bert, BERT),
    "qwen3": (lambda: llama(2, "Qwen3"), {**LLAMA, "*.[qk]_norm": "replicated"}),
}


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind().train()


def spec_of(tensor: int, stage: int, sequence: bool = False, **train: Any) -> dict[str, Any]:
    return {
        "train": {"precision": "fp32", "steps": STEPS, **train},
        "optimizer": {"lr": 1e-2, "eps": 1e-6},
        "schedule": {"warmup_steps": 2},
        "zero": {"stage": stage},
        "parallel": {"tensor": tensor, "sequence_parallel": sequence},
    }


def loss_of(module: Any, step: int, part: slice = slice(None)) -> torch.Tensor:
    """The mean loss of these samples of the step's batch."""
    generator = torch.Generator().manual_seed(step)
    inner = getattr(module, "module", module)
    if isinstance(inner, Mlp):
        x = torch.randn(SAMPLES, 16, generator=generator)
        loss: torch.Tensor = module(
            x[part], torch.randint(5, (SAMPLES,), generator=generator)[part]
        )
        return loss
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=generator)[part]
    found: torch.Tensor = module(input_ids=tokens, labels=tokens).loss
    return found


def alone(kind: Callable[[], nn.Module]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of PyTorch itself, on one rank."""
    module, spec = made(kind), Spec.model_validate(spec_of(1, 0))
    groups = [
        {"params": [own for own in module.parameters() if own.dim() > 1], "weight_decay": 0.1},
        {"params": [own for own in module.parameters() if own.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        loss = loss_of(module, step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def trained(
    world: World, module: nn.Module, plan: Plan, spec: dict[str, Any], steps: int = STEPS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, over all data ranks, and weights (on rank 0) of the module cut by the plan."""
    losses = []
    with hpczero.initialize(module, spec, world, tensor_plan=plan) as engine:
        width = SAMPLES // engine.size
        for step in range(steps):
            part = slice(engine.rank * width, (engine.rank + 1) * width)
            loss = loss_of(engine, step, part)
            engine.backward(loss / engine.size)
            engine.step()
            mean = engine.engine.axis.group.stack(loss.detach().double()).mean()
            losses.append(mean.item())
        return losses, engine.full_state_dict()


def assert_same(
    expected: tuple[list[float], dict[str, torch.Tensor]],
    found: tuple[list[float], dict[str, torch.Tensor]],
    rank: int,
) -> None:
    assert found[0] == pytest.approx(expected[0][: len(found[0])], rel=1e-5)
    if rank:
        assert not found[1]
        return
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        if name.endswith("self.key.bias"):
            continue  # its gradient is zero but for rounding: softmax forgets what all keys share
        assert (tensor - found[1][name]).float().norm() <= 1e-4 * tensor.float().norm(), name
