"""T5: the record is the module's, what each stream sees, its loss and its initial values."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpczero.model import build, families
from hpczero.model.attention_layouts import EFFECT
from hpczero.model.batch import MicroBatch
from hpczero.model.modules import Dropout
from hpczero.spec.attention import Attention
from hpczero.spec.schema import Model
from tests.support.real_models import real

SMALL: dict[str, Any] = {
    "family": "t5",
    "layers": 5,
    "hidden": 16,
    "heads": 2,
    "vocab": 23,
    "seq_len": 33,
    "masked_fraction": 0.3,
    "span_length": 2.0,
}
CASES = [
    Model(**SMALL),
    Model(**SMALL, tied_embeddings=False, encoder_layers=1, feed_forward="relu"),
    Model(**SMALL, head_dim=5, ffn=11, encoder_layers=4, feed_forward="gated-silu"),
]
every_model = pytest.mark.parametrize("model", CASES, ids=range(len(CASES)))
ENCODER, DECODER = CASES[0].streams(33)


def batch_of(model: Model, samples: int = 3) -> MicroBatch:
    random = torch.Generator().manual_seed(3)
    tokens, targets = (
        torch.randint(0, model.vocab, (samples, length), generator=random)
        for length in (model.seq_len, DECODER)
    )
    return MicroBatch(tokens, targets, torch.arange(samples, dtype=torch.int64), 0, seed=1)


def streams(module: Any, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
    """Return both streams as the last block hands them on."""
    x = batch.tokens
    for layer in module.layers()[:-1]:
        x = layer(x, batch)
    return x.split([ENCODER, DECODER], 1)


def changed(batch: MicroBatch, position: int) -> MicroBatch:
    tokens = batch.tokens.clone()
    tokens[:, position] = (tokens[:, position] + 1) % SMALL["vocab"]
    return replace(batch, tokens=tokens)


@every_model
def test_the_record_has_the_modules_parameters(model: Model) -> None:
    described = [
        (parameter.name, parameter.shape)
        for layer in families.layers(model)
        for parameter in layer.parameters
    ]
    module = build.on_meta(model)
    assert [(name, tuple(one.shape)) for name, one in module.named_parameters()] == described
    assert len(module.layers()) == len(families.layers(model))


@every_model
def test_the_encoder_looks_both_ways_and_not_at_the_decoder(model: Model) -> None:
    module, batch = real(model), batch_of(model)
    before, _ = streams(module, batch)
    later, _ = streams(module, changed(batch, ENCODER - 1))
    assert not torch.equal(before[:, 0], later[:, 0])
    unchanged, _ = streams(module, changed(batch, ENCODER))
    assert torch.equal(before, unchanged)


@every_model
def test_the_decoder_looks_at_the_encoder_and_back(model: Model) -> None:
    module, batch = real(model), batch_of(model)
    _, before = streams(module, batch)
    for position in range(ENCODER):
        _, after = streams(module, changed(batch, position))
        assert all(not torch.equal(before[:, at], after[:, at]) for at in range(DECODER))
    for position in range(DECODER):
        _, after = streams(module, changed(batch, ENCODER + position))
        assert torch.equal(before[:, :position], after[:, :position])
        assert all(not torch.equal(before[:, at], after[:, at]) for at in range(position, DECODER))


@every_model
def test_the_loss_is_of_what_the_decoder_predicts(model: Model) -> None:
    module, batch = real(model), batch_of(model)
    _, decoder = streams(module, batch)
    normed = decoder * (decoder.square().mean(-1, keepdim=True) + model.norm_eps).rsqrt()
    scale = model.hidden**-0.5 if model.tied_embeddings else 1.0
    scores = (normed * scale) @ module.head.logits.weight.T
    losses = functional.cross_entropy(scores.transpose(1, 2), batch.targets, reduction="none")
    assert module(batch).item() == pytest.approx(losses.sum().item(), rel=1e-6)
    of_samples = module(replace(batch, by_sample=True))
    assert of_samples.tolist() == pytest.approx(losses.sum(1).tolist(), rel=1e-6)


@every_model
def test_without_samples_there_is_a_loss_of_0_with_gradients(model: Model) -> None:
    module, batch = real(model), batch_of(model, 0)
    loss = module(batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all(not one.grad.any() for one in module.parameters())


def in_blocks(kernels: str = "auto", **keys: Any) -> Model:
    """98 positions of the encoder and 52 of the decoder, 13 blocks and 7."""
    long = SMALL | {"seq_len": 150, "heads": 4, "kernels": kernels}
    return Model(**long, attention=Attention(block=8, **keys))


def outcome(model: Model) -> list[torch.Tensor]:
    """Return the losses of samples and the gradients of all parameters."""
    module = real(model)
    targets = torch.arange(52, dtype=torch.int64).expand(3, -1) % model.vocab
    losses = module(replace(batch_of(model), targets=targets, by_sample=True))
    return [losses, *torch.autograd.grad(losses.sum(), list(module.parameters()))]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, right in zip(found, expected, strict=True):
        assert (one - right).abs().max() <= 1e-5 * max(1.0, right.abs().max())


@pytest.mark.parametrize("heads", ["alike", "different"])
@pytest.mark.parametrize("kind", [kind for kind in EFFECT if kind != "dense"])
def test_each_kind_is_the_masked_dense_formula(kind: str, heads: str) -> None:
    keys = {"kind": kind, "heads": heads, "window": 2, "groups": (1, 3), "random": 2}
    found, expected = (outcome(in_blocks(kernels, **keys)) for kernels in ("auto", "torch"))
    assert_near(found, expected)
    assert not torch.allclose(found[0], outcome(in_blocks())[0], rtol=1e-4)


def test_blocks_that_hide_nothing_are_dense_attention() -> None:
    assert_near(outcome(in_blocks(kind="local", window=30)), outcome(in_blocks()))


def test_layers_of_the_decoder_come_after_those_of_the_encoder() -> None:
    """With windows of one block, what changes in the encoder stays in its block."""
    model = in_blocks(kind=("local", "local", "dense", "local", "dense"), window=1)
    module, batch = real(model), batch_of(model, 1)
    other = changed(batch, 20)
    cores = [block.attention.core for block in (*module.encoder, *module.decoder)]
    assert [core.rule is None for core in cores] == [False, False, True, False, True]
    assert [core.causal for core in cores] == [False, False, True, True, True]
    x, y = (module.layers()[0](one.tokens, one) for one in (batch, other))
    for block in module.encoder:
        x, y = block(x, batch), block(y, other)
    moved = (x != y).any(-1)[0].nonzero().flatten().tolist()
    assert moved == [*range(16, 24)]


def test_every_dropout_has_a_site_of_its_own() -> None:
    module: nn.Module = build.on_meta(CASES[0])
    sites = [part.site for part in module.modules() if isinstance(part, Dropout)]
    assert len(sites) == len(set(sites)) == 2 + 2 * 2 + 3 * 3


def test_initial_deviations_are_as_published() -> None:
    model = Model(**(SMALL | {"hidden": 96, "vocab": 257, "head_dim": 24, "heads": 8}))
    wide, inner = 4 * 96, 8 * 24
    expected = {
        "lookup.tokens": 1.0,
        "query.weight": (96 * 24) ** -0.5,
        **dict.fromkeys(("key.weight", "value.weight", "memory.weight", "up.weight"), 96**-0.5),
        "output.weight": inner**-0.5,
        "down.weight": wide**-0.5,
    }
    for name, parameter in real(model).named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1.0).all(), name
        elif name.startswith("positions."):
            assert parameter.std().item() == pytest.approx(96**-0.5, rel=0.15), name
        else:
            (std,) = (std for end, std in expected.items() if name.endswith(end))
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
