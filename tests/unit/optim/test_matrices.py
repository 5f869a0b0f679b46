"""Muon's matrices: which there are, what their products cost, and how they are divided."""

from itertools import chain
from math import prod

import pytest

torch = pytest.importorskip("torch", reason="the products are torch's")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from hpczero.model import families  # noqa: E402
from hpczero.model.shapes import ZEROS, Parameter  # noqa: E402
from hpczero.optim.matrices import is_matrix, operations, owners, stack_shape  # noqa: E402
from hpczero.parallel.layout import unit_layout  # noqa: E402
from hpczero.parallel.zero.matrix_places import Ranks, places  # noqa: E402
from hpczero.parallel.zero.muon_update import orthogonalised  # noqa: E402
from hpczero.spec.optimizer import Optimizer  # noqa: E402
from hpczero.spec.schema import Model  # noqa: E402

MUON = Optimizer(name="muon")
GPT = Model(layers=12, hidden=768, heads=12, vocab=50257, seq_len=1024)
LLAMA = Model(family="llama", layers=16, hidden=512, heads=8, kv_heads=4, vocab=32000)
T5 = Model(family="t5", layers=4, vocab=359)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6), (3, 7, 4), (1, 9)])
def test_the_products_are_those_that_are_counted(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.randn(shape, dtype=torch.float32))
    assert counter.get_total_flops() == operations(Parameter("w", shape, ZEROS))


@pytest.mark.parametrize("shape", [(64, 64), (32, 200), (200, 32), (3, 48, 48)])
def test_singular_values_come_near_1(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(shape, generator=generator, dtype=torch.float32) * 1e-3
    values = torch.linalg.svdvals(orthogonalised(given))
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert 0.6 < values.mean() < 1.1
    zeros = torch.zeros(shape, dtype=torch.float32)
    assert torch.equal(orthogonalised(zeros), zeros)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("ranks", [(2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (1, 4)])
def test_ranks_have_about_as_much_to_do(model: Model, ranks: tuple[int, int]) -> None:
    data, tensor = ranks
    units = [unit_layout(layer, data, tensor) for layer in families.layers(model)]
    found = places(units, MUON, Ranks(data, data, tensor, True))
    loads = [0] * (data * tensor)
    for place in chain(*found):
        loads[place.data * tensor + place.tensor] += operations(place.slot.parameter)
    mean = sum(loads) / len(loads)
    assert max(loads) <= 1.1 * mean
    assert min(loads) >= 0.9 * mean
    everything = sum(operations(place.slot.parameter) for of_unit in found for place in of_unit)
    assert sum(loads) == everything


@pytest.mark.parametrize("model", [GPT, LLAMA, T5], ids=["gpt", "llama", "t5"])
def test_blocks_have_matrices_and_embeddings_and_the_head_have_none(model: Model) -> None:
    for layer in families.layers(model.model_copy(update={"tied_embeddings": False})):
        for parameter in layer.parameters:
            is_bias = parameter.name.endswith(".bias")  # of a fused map: a row for each section
            wanted = layer.is_block and len(parameter.shape) > 1 and not is_bias
            assert is_matrix(parameter, MUON) == wanted, parameter


def test_a_fused_map_is_a_matrix_for_each_section() -> None:
    assert stack_shape(Parameter("qkv", (3, 8, 4), ZEROS, split=1)) == (3, 8, 4)
    assert stack_shape(Parameter("qkv", (24, 4), ZEROS, split=0, sections=3)) == (3, 8, 4)
    beside = Parameter("qkv", (4, 24), ZEROS, split=1, sections=3)
    assert stack_shape(beside) == (3, 4, 8)
    assert prod(stack_shape(Parameter("w", (8, 4), ZEROS))) == 32


def test_names_of_other_matrices_are_the_spec_s() -> None:
    skipping = Optimizer(name="muon", not_muon=("*.gate",))
    assert not is_matrix(Parameter("a.gate", (4, 4), ZEROS), skipping)
    assert is_matrix(Parameter("embedding.lookup", (4, 4), ZEROS), skipping)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("features.0.weight", (16, 8, 3)),  # a convolution over a line
        ("features.0.weight", (16, 8, 3, 3)),
        ("cls_token", (1, 1, 64)),
        ("experts.up", (4, 8, 8)),
        ("attention.qkv.bias", (3, 8)),
        ("bias", (3, 8)),
        ("shared.weight", (32, 8)),  # the embedding of Hugging Face's T5
        ("model.shared.weight", (32, 8)),
    ],
)
def test_what_modules_of_users_have_beside_matrices_is_none(
    name: str, shape: tuple[int, ...]
) -> None:
    assert not is_matrix(Parameter(name, shape, ZEROS), MUON)


def test_biases_are_no_matrices_whatever_not_muon_says() -> None:
    for layer in families.layers(GPT):
        for parameter in layer.parameters:
            if parameter.name.endswith(".bias"):
                assert not is_matrix(parameter, Optimizer(name="muon", not_muon=("head.*",)))


def test_owners_take_the_largest_first() -> None:
    assert owners([1, 5, 4, 2], 2) == [0, 0, 1, 1]
    assert owners([], 3) == []
