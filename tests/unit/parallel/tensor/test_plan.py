"""The plan of a family fits what its parameters are said to be cut along, and names modules that
exist.
"""

import pytest

from hpczero.model import build
from hpczero.model.families import FAMILIES, family, layers
from hpczero.model.shapes import matches, role_of
from hpczero.parallel.parallelize import ROLES
from hpczero.parallel.tensor.attention_inputs import HeadsOfRank, core_of_rank
from hpczero.parallel.tensor.linear import ColumnLinear, ColumnOfWhole, RowLinear
from hpczero.parallel.tensor.streams import SplitOfRows
from hpczero.parallel.tensor.vocabulary import VocabularyCrossEntropy, VocabularyLookup
from hpczero.spec.schema import Model

RELATIVE = {
    "kv_heads": 2,
    **dict.fromkeys(("post_norms", "qk_norm", "qkv_bias", "output_bias", "ffn_bias"), True),
}
MODELS = {
    f"{name}-{'tied' if tied else 'apart'}": Model(family=name, tied_embeddings=tied)
    for name in FAMILIES
    for tied in (True, False)
} | {"relative": Model(family="llama", **RELATIVE)}
# modules of a head that computes on picked positions, which are whole: alike on every rank
ALIKE = {f"head.{name}" for name in ("transform", "transform_norm", "norm", "pooler", "sentences")}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def planned(model: Model) -> dict[str, object]:
    plans = {**family(model).tensor_plan, **family(model).sequence_plan}
    names = [name for name, _ in build.on_meta(model).named_modules()]
    return {
        name: ROLES[role]
        for pattern, role in plans.items()
        for name in names
        if matches(name, pattern)
    }


@every_model
def test_every_entry_names_modules(model):
    tensor, sequence = family(model).tensor_plan, family(model).sequence_plan
    names = [name for name, _ in build.on_meta(model).named_modules()]
    assert not tensor.keys() & sequence.keys()
    for pattern in (*tensor, *sequence):
        assert any(matches(name, pattern) for name in names), pattern


@every_model
def test_what_needs_rows_says_its_stream(model):
    """In a model of several streams, whose rows do not lie together."""
    streams, names = family(model).stream_of, [name for name, _ in modules_of(model)]
    for pattern in streams:
        assert any(matches(name, pattern) for name in names), pattern
    of_several = len(model.streams(model.seq_len)) > 1
    for name, entry in planned(model).items():
        if entry not in (VocabularyLookup, VocabularyCrossEntropy, SplitOfRows, core_of_rank):
            assert (role_of(streams, name) is not None) == of_several, name
    assert set(streams.values()) == ({0, 1} if of_several else set())


def modules_of(model: Model):
    return build.on_meta(model).named_modules()


@every_model
def test_every_kind_of_layer_has_its_sums(model):
    assert {layer.kind for layer in layers(model)} == family(model).tensor_sums.keys()
    assert len(family(model).operations(model, model.seq_len)) == len(layers(model))


@every_model
def test_parameters_are_cut_as_the_plan_uses_them(model):
    """Columns: each dimension of the outputs but the stacked ones; rows: the inputs. What no entry
    uses is not cut; what every rank holds whole is used on own rows only by modules that sum its
    gradient.
    """
    entries = planned(model)
    for parameter in [one for layer in layers(model) for one in layer.parameters]:
        module, _, name = parameter.name.rpartition(".")
        dims, entry = len(parameter.shape), entries.get(module)
        if entry in (ColumnLinear, ColumnOfWhole):
            assert parameter.split == (dims - 2 if name == "weight" else dims - 1), parameter.name
        elif entry is RowLinear:
            assert parameter.split == (dims - 1 if name == "weight" else None), parameter.name
        elif entries.get(module.rpartition(".")[0]) is HeadsOfRank:
            assert parameter.split == 0, parameter.name
            assert parameter.grain > 1, parameter.name
        elif entry is VocabularyLookup:
            assert parameter.split == (0 if name == "tokens" else None), parameter.name
            assert parameter.grain == 1
        elif module == "positions":  # biases of the heads
            assert (parameter.split, parameter.grain) == (1, 1)
        else:
            assert entry is not None or module in ALIKE, f"{module} is not in the plan"
            assert parameter.split is None, parameter.name
