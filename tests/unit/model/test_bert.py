"""BERT: the record is the module's, its loss is of masked places and labels, it looks both ways."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpczero.model import build, families
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Model
from tests.support.real_models import real

SMALL: dict[str, Any] = {
    "family": "bert",
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "vocab": 13,
    "seq_len": 9,
}
CASES = [
    Model(**SMALL),
    Model(**SMALL, norm_order="pre"),
    Model(**SMALL, sentences="next", tied_embeddings=False),
    Model(**SMALL, sentences="order", norm_order="pre", head_dim=5, ffn=11),
]
every_model = pytest.mark.parametrize("model", CASES, ids=range(len(CASES)))


def batch_of(model: Model, samples: int = 3) -> MicroBatch:
    random = torch.Generator().manual_seed(3)
    shape = samples, model.seq_len
    text = torch.randint(0, model.vocab, shape, generator=random)
    places = torch.tensor([[1, 4], [2, 7], [3, 0]])[:samples]
    return MicroBatch(
        text,
        torch.randint(0, model.vocab, places.shape, generator=random),
        torch.arange(samples),
        0,
        seed=1,
        weights=torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])[:samples],
        target_positions=places,
        segments=(torch.arange(model.seq_len) > 4).long().expand(shape),
        labels=None if model.sentences == "none" else torch.tensor([0, 1, 1])[:samples],
    )


@every_model
def test_the_record_has_the_modules_parameters(model: Model) -> None:
    described = {
        parameter.name: parameter.shape
        for layer in families.layers(model)
        for parameter in layer.parameters
    }
    module = build.on_meta(model)
    assert {name: tuple(one.shape) for name, one in module.named_parameters()} == described
    assert len(module.layers()) == len(families.layers(model))


@every_model
def test_the_loss_is_of_masked_places_and_each_samples_label(model: Model) -> None:
    """Held against logits that the head gives for all positions."""
    module, batch = real(model), batch_of(model)
    x = batch.tokens
    for layer in module.layers()[:-1]:
        x = layer(x, batch)
    scores = module.head.scores(module.head.norm(x))
    expected = torch.zeros(3, dtype=torch.float64)
    for sample, place, weight in ((0, 1, 0), (0, 4, 1), (1, 2, 0), (1, 7, 1), (2, 3, 0)):
        target = batch.targets[sample, weight]
        expected[sample] += functional.cross_entropy(scores[sample, place], target)
    if batch.labels is not None:
        first = module.head.label_scores(module.head.norm(x)[:, 0])
        counts = torch.tensor([2.0, 2.0, 1.0])
        expected += functional.cross_entropy(first, batch.labels, reduction="none") * counts
    assert module(batch).item() == pytest.approx(expected.sum().item(), rel=1e-6)
    of_samples = module(replace(batch, by_sample=True))
    assert of_samples.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


@every_model
def test_it_looks_both_ways(model: Model) -> None:
    module, batch = real(model), batch_of(model, 1)
    changed = batch.tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.vocab
    one, other = (
        module.blocks[0](module.embedding(tokens, batch), batch)[0, 0]
        for tokens in (batch.tokens, changed)
    )
    assert not torch.equal(one, other)


@every_model
def test_segments_and_positions_count(model: Model) -> None:
    module, batch = real(model), batch_of(model)
    assert batch.segments is not None
    swapped = replace(batch, segments=1 - batch.segments)
    assert module(batch).item() != module(swapped).item()
    x = module.embedding.lookup(batch.tokens, None, batch.segments)
    again = (
        module.embedding.lookup.tokens[batch.tokens]
        + module.embedding.lookup.positions
        + module.embedding.lookup.segments[batch.segments]
    )
    assert torch.equal(x, again)


def test_initial_deviations_are_as_published() -> None:
    model = Model(**(SMALL | {"hidden": 64, "vocab": 257, "seq_len": 64}), sentences="next")
    for name, parameter in real(model).named_parameters():
        if parameter.dim() > 1 and not name.endswith((".qkv.bias", "sentences.weight")):
            small = name.endswith("segments")  # of 128 numbers
            assert parameter.std().item() == pytest.approx(0.02, rel=0.3 if small else 0.05), name
