"""`config.json` to [model] and back; what cannot be said is refused with the key in the way."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.cli import main
from hpczero.errors import InputError
from hpczero.huggingface.architectures import (
    ARCHITECTURES,
    architecture_for,
    architecture_of,
    differing,
)
from hpczero.huggingface.config import Config
from hpczero.huggingface.tensor_names import views
from hpczero.model.families import layers
from hpczero.spec.attention import Attention
from hpczero.spec.schema import Model
from tests.support.json_values import json_values

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 16,
}


def model_of(**keys: Any) -> Model:
    config = Config({**LLAMA, **keys}, "config.json")
    return architecture_of(config).to_model(config)


def of(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture]}


REFUSED = {
    "unknown key": ({"mup_scale": 3}, "mup_scale = 3"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "another architecture": (of("MambaForCausalLM"), "MambaForCausalLM"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
    "longrope": (
        of("Phi3ForCausalLM") | {"rope_scaling": {"type": "longrope", "long_factor": [1]}},
        "longrope",
    ),
    "unknown key of scaling": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 0.7}},
        "mscale = 0.7",
    ),
    "windows from a layer on": (
        of("Qwen2ForCausalLM")
        | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "layer_types",
    ),
    "partial rotary": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
    "a cap that nobody uses": (
        of("Gemma3ForCausalLM") | {"attn_logit_softcapping": 30.0},
        "attn_logit_softcapping = 30.0",
    ),
    "another gate": ({"hidden_act": "relu"}, 'hidden_act = "relu"'),
    "GPT-2 that is not": (
        {"architectures": ["GPT2LMHeadModel"], "activation_function": "relu"},
        'activation_function = "relu"',
    ),
    "text for a number": ({"hidden_size": "12"}, "model.hidden"),
    "nothing for a number": ({"hidden_size": None}, "hidden"),
    "true for a number": ({"num_hidden_layers": True}, "model.layers"),
    "a list for a table": ({"rope_scaling": [1]}, "rope_scaling"),
    "a number for a list": (of("Qwen3ForCausalLM") | {"layer_types": 3}, "layer_types"),
    "lists in a list": (of("Qwen3ForCausalLM") | {"layer_types": [[], 1, {}, None]}, "layer_types"),
    "huge": ({"num_hidden_layers": 10**30}, "model.layers"),
    "a width beyond numbers": (
        of("Gemma2ForCausalLM") | {"query_pre_attn_scalar": 10**400},
        "query_pre_attn_scalar",
    ),
    "a width without end": (
        of("Gemma2ForCausalLM") | {"query_pre_attn_scalar": float("inf")},
        "query_pre_attn_scalar",
    ),
    "a hidden size beyond numbers": (
        of("Gemma2ForCausalLM") | {"hidden_size": 10**400},
        "model.hidden",
    ),
    "two scalings": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        "rope_scaling",
    ),
    "an unknown key beside both": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"rope_type": "default", "mscale": 0.7},
        },
        "mscale = 0.7",
    ),
    "scaled and partly rotated": (
        of("Phi3ForCausalLM") | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "linear",
    ),
    "an unknown key that says 0": ({"logits_scaling": 0}, "logits_scaling = 0"),
    "text for true": (of("Qwen2ForCausalLM") | {"use_sliding_window": "yes"}, "use_sliding"),
    "text for layers": (of("Qwen2ForCausalLM") | {"max_window_layers": "a"}, "max_window_layers"),
}


@pytest.mark.parametrize(("keys", "said"), REFUSED.values(), ids=REFUSED)
def test_what_no_model_of_hpczero_has_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        model_of(**keys)
    assert said in str(caught.value)
    assert "config.json" in str(caught.value)


def test_keys_that_change_nothing_are_allowed() -> None:
    assert model_of(use_cache=True, mup_scale=None, something=False) == model_of()


@given(
    st.sampled_from(list(ARCHITECTURES)),
    st.sampled_from(
        [
            *LLAMA,
            *("head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "n_embd"),
            *("layer_types", "sliding_window", "sliding_window_pattern", "max_window_layers"),
            *("query_pre_attn_scalar", "hidden_act", "tie_word_embeddings", "rope_theta"),
            *("attention_bias", "rms_norm_eps", "partial_rotary_factor", "use_sliding_window"),
        ]
    ),
    json_values,
)
def test_any_value_is_a_model_or_one_message(architecture: str, key: str, value: Any) -> None:
    keys = {**of(architecture), "n_embd": 12, "n_head": 3, "n_layer": 4, "n_positions": 16}
    config = Config({**LLAMA, **keys, key: value}, "config.json")
    said = ""
    try:
        architecture_of(config).to_model(config)
    except InputError as error:
        said = str(error)
    assert not said or "config.json" in said


LIKELY = st.builds(
    Model,
    family=st.sampled_from(["gpt", "llama"]),
    layers=st.integers(1, 7),
    heads=st.just(6),
    kv_heads=st.sampled_from([0, 1, 2]),
    head_dim=st.sampled_from([0, 10]),
    ffn=st.sampled_from([0, 9]),
    tied_embeddings=st.booleans(),
    activation=st.sampled_from(["silu", "gelu", "gelu_exact"]),
    qk_norm=st.booleans(),
    qkv_bias=st.booleans(),
    output_bias=st.booleans(),
    ffn_bias=st.booleans(),
    rope_fraction=st.sampled_from([1.0, 0.5]),
    rope_scaling=st.sampled_from(["none", "linear", "llama3", "yarn"]),
    rope_factor=st.just(2.0),
    rope_original=st.just(32),
    rope_attention=st.sampled_from([0.0, 1.1]),
    window=st.sampled_from([0, 5]),
    window_pattern=st.sampled_from([0, 2, 6]),
    logit_cap=st.sampled_from([0.0, 3.0]),
)


LIKELY_T5 = st.builds(
    Model,
    family=st.just("t5"),
    layers=st.integers(2, 7),
    encoder_layers=st.integers(0, 1),
    heads=st.just(6),
    head_dim=st.sampled_from([0, 10]),
    ffn=st.sampled_from([0, 9]),
    tied_embeddings=st.booleans(),
    feed_forward=st.sampled_from(["relu", "gated-gelu", "gated-silu"]),
    position_buckets=st.sampled_from([4, 32]),
    position_reach=st.sampled_from([9, 128]),
    seq_len=st.integers(1, 200),
    masked_fraction=st.sampled_from([0.15, 0.5]),
    span_length=st.sampled_from([3.0, 1.0]),
)


@given(LIKELY | LIKELY_T5)
def test_a_model_is_written_so_that_it_is_read_again_or_refused(model: Model) -> None:
    possible = [
        architecture for architecture in ARCHITECTURES.values() if not architecture.loses(model)
    ]
    if not possible:
        with pytest.raises(InputError, match=r"model\."):
            architecture_for(model, None)
        return
    architecture = architecture_for(model, None)
    assert architecture is possible[0]
    config = Config(json.loads(json.dumps(architecture.to_config(model))), "config.json")
    assert architecture_of(config) is architecture
    read = architecture.to_model(config)
    assert not differing(model, read)
    shapes = {p.name: p.shape for layer in layers(model) for p in layer.parameters}
    assert shapes == {p.name: p.shape for layer in layers(read) for p in layer.parameters}
    covered: dict[str, int] = {}
    for view in views(architecture, model):
        for part in view.parts:
            covered[part.parameter] = covered.get(part.parameter, 0) + part.stop - part.start
    assert covered == {name: _size(shape) for name, shape in shapes.items()}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def test_a_model_that_no_architecture_is_says_which_key_is_in_the_way() -> None:
    with pytest.raises(InputError, match=r"LlamaForCausalLM cannot have model\.attention_cap = 5"):
        architecture_for(Model(family="llama", attention_cap=5.0), None)
    for keys in ({"query_scale": 1.5}, {"query_scale": 1e-200}):
        with pytest.raises(InputError, match=r"cannot have model\.query_scale"):
            architecture_for(Model(family="llama", **keys), None)
    partly = Model(family="llama", rope_fraction=0.5, rope_scaling="linear", rope_factor=2.0)
    with pytest.raises(InputError, match=r"Phi3ForCausalLM cannot have model\.rope_scaling"):
        architecture_for(partly, "Phi3ForCausalLM")
    with pytest.raises(InputError, match=r"no architecture of Hugging Face"):
        architecture_for(partly, None)
    odd = Model(family="llama", hidden=15, heads=3, qk_norm=True)
    with pytest.raises(InputError, match=r"cannot have model\.head_dim"):
        architecture_for(odd, None)
    with pytest.raises(InputError, match=r"Phi3ForCausalLM cannot have model\.qkv_bias = true"):
        architecture_for(Model(family="llama", qkv_bias=True), "Phi3ForCausalLM")
    for kind in (("dense", "local"), "bigbird"):
        blocks = Model(family="llama", attention=Attention(kind=kind))
        with pytest.raises(InputError, match=r"have model\.attention\.kind = .*none of trans"):
            architecture_for(blocks, None)
    assert architecture_for(Model(family="llama", attention=Attention(window=9)), None)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "[1]", "a table was expected"),
        ("config.json", "{", "no JSON"),
        ("config.json", "[" * 100_000, "no JSON"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../b.safetensors"}}', "outside"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "/etc/passwd"}}', "outside"),
        ("model.safetensors.index.json", '{"weight_map": {"a": ".."}}', "outside"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "no index"),
        ("model.safetensors.index.json", "{}", "no index"),
        ("other", "", "neither model.safetensors nor"),
    ],
)
def test_folders_of_strangers(
    name: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / name).write_text(content)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'name = "x"\n[model]\nfamily = "llama"\nvocab = 11\nhidden = 12\nffn = 20\nlayers = 4\n'
        "heads = 3\nnorm_eps = 1e-6\ntied_embeddings = false\n"
    )
    command = ["ckpt", "import", "--hf", str(folder), "--spec", str(spec)]
    assert main([*command, "-o", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_spec_of_another_model_is_refused_with_the_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "spec.toml").write_text('name = "x"\n[model]\nfamily = "llama"\nhead_dim = 4\n')
    command = ["ckpt", "import", "--hf", str(tmp_path), "--spec", str(tmp_path / "spec.toml")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "model.hidden = 12 (the spec has 256)" in said
    assert " more; `hpczero" in said
    assert "init --from-hf" in said
