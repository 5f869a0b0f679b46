"""The torch model equals the plain description of it, and its values depend on the job only."""

import pytest
import torch

from hpczero.model import build, families
from hpczero.model.batch import MicroBatch
from hpczero.model.modules import Dropout
from hpczero.spec.schema import Model

CASES = [
    Model(),
    Model(
        layers=1, hidden=10, heads=3, vocab=5, seq_len=7, tied_embeddings=False
    ),  # heads that do not divide the width
    Model(layers=3, hidden=8, heads=2, head_dim=5, ffn=11, vocab=13, seq_len=4),
]


def real(model: Model, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    module = build.on_meta(model)
    parameters = {}
    for layer in families.layers(model):
        for parameter in layer.parameters:
            values = torch.empty(parameter.shape, dtype=dtype)
            build.initial_values(parameter, seed, 0, values)
            parameters[parameter.name] = torch.nn.Parameter(values)
    build.install_parameters(module, parameters)
    return module


def batch_of(model: Model, samples: int, step: int = 0) -> MicroBatch:
    text = torch.randint(
        0, model.vocab, (samples, model.seq_len + 1), generator=torch.Generator().manual_seed(3)
    )
    return MicroBatch(text[:, :-1], text[:, 1:], torch.arange(samples), step, seed=1)


@pytest.mark.parametrize("model", CASES)
def test_torch_model_equals_shapes(model):
    described = {
        parameter.name: parameter.shape
        for layer in families.layers(model)
        for parameter in layer.parameters
    }
    module = build.on_meta(model)
    assert {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    } == described
    assert all(parameter.is_meta for parameter in module.parameters())
    assert len(module.layers()) == len(families.layers(model))
    assert sum(parameter.numel() for parameter in module.parameters()) == families.parameter_count(
        model
    )


@pytest.mark.parametrize("model", CASES)
def test_splits_name_a_dimension(model):
    for layer in families.layers(model):
        for parameter in layer.parameters:
            assert parameter.split is None or 0 <= parameter.split < len(parameter.shape)


@pytest.mark.parametrize("model", CASES)
def test_it_computes_a_loss_near_uniform(model):
    batch = batch_of(model, 4)
    loss = real(model)(batch) / batch.token_count
    assert abs(loss.item() - torch.log(torch.tensor(float(model.vocab))).item()) < 0.5


def test_tied_embeddings_are_one_parameter():
    module = real(Model(tied_embeddings=True))
    assert module.head.logits.weight is module.embedding.lookup.tokens
    assert real(Model(tied_embeddings=False)).head.logits.weight is not None


def test_it_is_causal():
    model = Model(layers=2, hidden=16, heads=2, seq_len=8, vocab=11)
    module = real(model)
    batch = batch_of(model, 1)
    changed = batch.tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    outputs = []
    for tokens in (batch.tokens, changed):
        x = tokens
        for layer in module.layers()[:-1]:
            x = layer(x, batch)
        outputs.append(x)
    assert torch.equal(outputs[0][:, :5], outputs[1][:, :5])
    assert not torch.equal(outputs[0][:, 5:], outputs[1][:, 5:])


def test_initial_values_do_not_depend_on_the_slice():
    parameter = next(iter(families.layers(Model())[0].parameters))
    whole, part = torch.empty(parameter.size), torch.empty(1001)
    build.initial_values(parameter, 5, 0, whole)
    build.initial_values(parameter, 5, 777, part)
    assert torch.equal(whole[777:1778], part)
    other_seed = torch.empty(parameter.size)
    build.initial_values(parameter, 6, 0, other_seed)
    assert not torch.equal(whole, other_seed)
    half = torch.empty(parameter.size, dtype=torch.bfloat16)
    build.initial_values(parameter, 5, 0, half)
    assert torch.equal(half, whole.bfloat16())


def test_dropout_follows_the_sample_not_its_place_in_the_batch():
    """Two samples at once, or one after the other: the same losses; another step: others; none
    in evaluation.
    """
    model = Model(layers=2, hidden=16, heads=2, seq_len=8, vocab=11, dropout=0.5)
    module = real(model, dtype=torch.float64)
    both = batch_of(model, 2)
    apart = [
        MicroBatch(both.tokens[i : i + 1], both.targets[i : i + 1], both.samples[i : i + 1], 0, 1)
        for i in range(2)
    ]
    together = module(both).item()
    assert together == pytest.approx(sum(module(one).item() for one in apart), rel=1e-6)
    assert module(batch_of(model, 2, step=1)).item() != pytest.approx(together, rel=1e-6)
    module.eval()
    assert module(batch_of(model, 2, step=1)).item() == module(both).item()


def test_no_two_dropouts_drop_the_same():
    module = build.on_meta(Model(layers=3, dropout=0.1))
    sites = [part.site for part in module.modules() if isinstance(part, Dropout)]
    assert len(sites) == len(set(sites)) == 7  # the embedding's, and two of each block


def test_initial_deviations_are_gpt2s():
    """0.02, and less by the square root of 2 x layers where a block writes into the stream."""
    model = Model(layers=8, hidden=64, heads=4, vocab=257, seq_len=64)
    for name, parameter in real(model).named_parameters():
        if name.endswith((".bias", "norm.weight")):
            continue
        writes = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        expected = 0.02 / 4 if writes else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_weights_decay_and_neither_biases_nor_norms_do() -> None:
    """But the bias of query, key and value, which is a matrix of three rows."""
    named = {one.name: one for layer in families.layers(Model()) for one in layer.parameters}
    decaying = {name for name, parameter in named.items() if parameter.decays}
    weights = {name for name in named if name.endswith(".weight") and "norm" not in name}
    tables = {name for name in named if name.startswith("embedding.")}
    biases = {name for name in named if name.endswith("qkv.bias")}
    assert len(weights) == 4 * Model().layers
    assert decaying == weights | tables | biases


def test_a_parameter_with_two_names_in_one_module_is_replaced_under_both() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(3, 3)
    module.also = module.weight
    new = torch.nn.Parameter(torch.ones(3, 3))
    build.install_parameters(module, {"weight": new, "bias": torch.nn.Parameter(torch.ones(3))})
    assert module.weight is new
    assert module.also is new
