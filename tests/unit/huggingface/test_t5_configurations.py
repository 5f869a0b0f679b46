"""`config.json` of T5 to [model] and back; what cannot be said is refused."""

from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hpczero.errors import InputError
from hpczero.huggingface.architectures import ARCHITECTURES, architecture_for, differing
from hpczero.huggingface.config import Config
from hpczero.model.families import layers
from hpczero.spec.attention import Attention
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Model, Spec
from tests.support.json_values import json_values

T5 = ARCHITECTURES["T5ForConditionalGeneration"]
# as they were published
_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_kv": 64,
    "d_ff": 2048,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6,
    "model_type": "t5",
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
T5_SMALL = {
    **_T5,
    "d_model": 512,
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "task_specific_params": {"summarization": {"max_length": 200, "prefix": "summarize: "}},
}
T5_11_BASE = {
    **_T5,
    "d_model": 768,
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "tie_word_embeddings": False,
}


def model_of(published: dict[str, Any], **keys: Any) -> Model:
    return T5.to_model(Config({**published, **keys}, "config.json"))


_SIZES = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")

REFUSED_OF_T5: dict[str, tuple[dict[str, Any], str]] = {
    "no decoder": ({"is_encoder_decoder": False}, "is_encoder_decoder = false"),
    "no block": ({"num_layers": 0}, "num_layers = 0"),
    "text for blocks": ({"num_decoder_layers": "6"}, 'num_decoder_layers = "6"'),
    "true for blocks": ({"num_decoder_layers": True}, "num_decoder_layers = true"),
    "too many blocks": ({"num_layers": 10**30}, "model."),
    "another function": ({"feed_forward_proj": "gelu"}, 'feed_forward_proj = "gelu"'),
    "another gate": ({"feed_forward_proj": "gated-relu"}, 'feed_forward_proj = "gated-relu"'),
    "a word for a gate": ({"feed_forward_proj": "my-relu"}, 'feed_forward_proj = "my-relu"'),
    "the exact GELU": (
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
        'dense_act_fn = "gelu"',
    ),
    "two words for a gate": ({"is_gated_act": True}, "is_gated_act = true"),
    "a list for a function": ({"dense_act_fn": [1]}, "dense_act_fn = [1]"),
    "a scale of a head of its own": (
        {"tie_word_embeddings": False, "scale_decoder_outputs": True},
        "scale_decoder_outputs = true",
    ),
    "text for a scale": ({"scale_decoder_outputs": "no"}, 'scale_decoder_outputs = "no"'),
    "0 for a tied head": (
        {"tie_word_embeddings": 0, "scale_decoder_outputs": True},
        "tie_word_embeddings = 0",
    ),
    "true for positions": ({"n_positions": True}, "n_positions = true"),
    "endless samples": ({"n_positions": 10**400}, "n_positions"),
    "no sample": ({"n_positions": 0}, "n_positions = 0"),
    "unknown key": ({"router_z_loss_coef": 0.1}, "router_z_loss_coef = 0.1"),
}


@pytest.mark.parametrize(("keys", "said"), REFUSED_OF_T5.values(), ids=REFUSED_OF_T5)
def test_what_no_t5_of_hpczero_has_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=r"config\.json") as caught:
        model_of(T5_SMALL, **keys)
    assert said in str(caught.value)


# what transformers 5 writes of the same: heads are tied, whether they are or not
_OF_5 = {"tie_word_embeddings": True, "relative_attention_max_distance": 128, "use_cache": True}
_SMALL_OF_5 = {"dense_act_fn": "relu", "is_gated_act": False, "scale_decoder_outputs": True}
_BASE_OF_5 = {"dense_act_fn": "gelu_new", "is_gated_act": True, "scale_decoder_outputs": False}


@pytest.mark.parametrize(
    ("published", "of_5", "parameters", "keys"),
    [
        (
            T5_SMALL,
            _SMALL_OF_5,
            60_506_624,
            {"layers": 12, "hidden": 512, "heads": 8, "feed_forward": "relu"},
        ),
        (
            T5_11_BASE,
            _BASE_OF_5,
            247_577_856,
            {"layers": 24, "hidden": 768, "heads": 12, "tied_embeddings": False},
        ),
    ],
    ids=["t5-small", "t5-v1_1-base"],
)
def test_published_t5(
    published: dict[str, Any], of_5: dict[str, Any], parameters: int, keys: dict[str, Any]
) -> None:
    model = model_of(published)
    expected = {"ffn": 2048, "head_dim": 64, "vocab": 32128, "norm_eps": 1e-6, "seq_len": 626}
    assert model == Model(family="t5", encoder_layers=model.layers // 2, **expected, **keys)
    assert sum(layer.size for layer in layers(model)) == parameters
    assert model_of(published, **_OF_5, **of_5) == model
    written = T5.to_config(model)
    assert {key: value for key, value in written.items() if key in published} == {
        key: value for key, value in published.items() if key in written
    }
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    assert ids.items() <= written.items()
    assert written["n_positions"] == 512


def test_samples_of_t5_are_no_other_model() -> None:
    model = model_of(T5_SMALL)
    phase = model.model_copy(update={"seq_len": 58, "masked_fraction": 0.3, "span_length": 5.0})
    assert not differing(model, phase)
    assert not differing(model, model.model_copy(update={"encoder_layers": 0}))
    assert differing(model, model.model_copy(update={"encoder_layers": 5})) == ["encoder_layers"]
    assert architecture_for(phase, None).name == "T5ForConditionalGeneration"
    lengths = [model_of(T5_SMALL, n_positions=most).seq_len for most in (1, 46, 47, 1024)]
    assert lengths == [6, 58, 59, 1024 + 229]


def test_keys_that_are_missing_are_those_of_transformers() -> None:
    defaults = transformers.T5Config().to_dict()
    nothing = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
    sizes = {name: defaults[name] for name in _SIZES}
    assert T5.to_model(Config(nothing, "config.json")) == model_of({**nothing, **sizes})
    assert model_of({**nothing, "d_model": 64}).ffn == 2048


@pytest.mark.parametrize(("vocab", "spans"), [(384, 381), (4, 1), (32128, 455)])
def test_a_sample_has_no_more_spans_than_the_vocabulary_sentinels(vocab: int, spans: int) -> None:
    model = model_of(T5_SMALL, vocab_size=vocab, n_positions=8192)
    assert model.spans(model.seq_len).spans == spans
    assert not contradictions(Spec(model=model))
    assert not contradictions(Spec(model=model_of(T5.to_config(model))))


KEYS = [
    *("num_layers", "num_decoder_layers", "n_positions", "feed_forward_proj", "d_kv", "d_model"),
    *("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "is_encoder_decoder", "num_heads"),
    *("tie_word_embeddings", "relative_attention_max_distance", "layer_norm_epsilon"),
]


@given(st.sampled_from(KEYS), json_values)
def test_any_value_is_a_model_or_one_message(key: str, value: Any) -> None:
    said = "config.json"
    try:
        model_of(T5_SMALL, **{key: value})
    except InputError as error:
        said = str(error)
    assert "config.json" in said


def test_blocks_are_refused() -> None:
    model = Model(family="t5", attention=Attention(kind=("dense", "local")))
    with pytest.raises(InputError, match=r"cannot have model\.attention\.kind = "):
        architecture_for(model, None)
