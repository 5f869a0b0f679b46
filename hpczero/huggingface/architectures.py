"""Architectures of Hugging Face as data: the keys of `config.json` beside those of [model] (pure).

An architecture copies most keys, has some of [model] always at one value, demands a value of keys
that hpczero has no equal of, and converts the others (`conversions.py`). What it cannot say of a
model shows when the model is written and read again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from hpczero.errors import InputError
from hpczero.huggingface.config import Config
from hpczero.huggingface.conversions import (
    ACTIVATION,
    ALL_LAYERS,
    ALTERNATING,
    ATTENTION_BIAS,
    FROM_A_LAYER_ON,
    GEMMA_SCALES,
    HEAD_DIM,
    PARTLY_ROTARY,
    ROTARY,
    ROTARY_AND_LOCAL,
    Conversion,
)
from hpczero.huggingface.t5_conversions import FEED_FORWARD, HEAD, SAMPLE, STACKS
from hpczero.model.attention_layouts import rules_of
from hpczero.model.shapes import ffn, head_dim, keys_without_effect, kv_heads
from hpczero.spec.schema import Model
from hpczero.text import join_words, printable, toml_repr

_NONE_IS_0 = ("attention_cap", "logit_cap", "ffn")  # keys of [model] for which null says 0


@dataclass(frozen=True)
class Architecture:
    name: str
    model_type: str
    copied: Mapping[str, str]  # key of config.json -> key of [model] that has its value
    defaults: Mapping[str, Any]  # of keys of config.json that may be missing
    always: Mapping[str, Any]  # keys of [model]
    demanded: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json, if there
    converted: Sequence[Conversion] = ()
    weights: str = "llama"  # the table of names in `tensor_names.py`
    heads_divide: bool = False  # transformers refuses a hidden size that heads do not divide

    def to_model(self, config: Config) -> Model:
        """InputError: the configuration says something that no model of hpczero has."""
        found = {
            key: config.take(name, default=self.defaults.get(name))
            for name, key in self.copied.items()
        }
        for name, value in self.demanded.items():
            config.demand(name, value)
        for conversion in self.converted:
            found |= conversion.read(config, found, self.defaults)
        config.refuse_others()
        absent = {key: 0 for key, value in found.items() if value is None and key in _NONE_IS_0}
        return config.model_of(found | absent | dict(self.always))

    def to_config(self, model: Model) -> dict[str, Any]:
        """Return what says of the model all that the architecture can say."""
        resolved = _resolved(model) | {"seq_len": model.seq_len}
        config: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        for name, key in self.copied.items():
            config[name] = None if key in _NONE_IS_0 and not resolved[key] else resolved[key]
        for conversion in self.converted:
            config |= conversion.write(model)
        return config

    def loses(self, model: Model) -> list[str]:
        """Return the keys of the model that the architecture cannot have at their values."""
        width = head_dim(model)
        is_rotated = model.family == "llama" and int(width * model.rope_fraction) == width
        if is_rotated and width % 2:
            return ["head_dim"]  # transformers rotates whole heads by halves
        if self.heads_divide and model.hidden % model.heads:
            return ["heads"]
        try:
            read = self.to_model(Config(self.to_config(model), self.name))
        except (InputError, ArithmeticError):
            return ["family"]
        return differing(model, read)


def differing(one: Model, other: Model) -> list[str]:
    """Return the keys that make the models compute different things.

    Without learned positions, seq_len does not; nor does how a run makes samples of text.
    """
    wanted, found = _resolved(one), _resolved(other)
    return [key for key in wanted if not _same(wanted[key], found.get(key))]


def _resolved(model: Model) -> dict[str, Any]:
    """Return what the model computes with: no key that means nothing, no 0 that means another."""
    found = model.model_dump(exclude={"dropout", "kernels", "attention"})
    rules = rules_of(model)
    found["attention.kind"] = rules if any(rules) else None
    found |= {"kv_heads": kv_heads(model), "head_dim": head_dim(model), "ffn": ffn(model)}
    found["query_scale"] = model.query_scale or head_dim(model) ** -0.5
    if model.window_pattern > model.layers:
        found["window_pattern"] = 0
    for key in keys_without_effect(model):
        found[key] = None
    found["encoder_layers"] = model.encoder_blocks
    if model.family in ("llama", "t5"):
        del found["seq_len"]
    found["sentences"] = "none" if model.sentences == "none" else "next"  # the same head
    del found["masked_fraction"], found["span_length"]  # of its training alone
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-12 * abs(one)
    return bool(one == other)


# ------------------------------------------------------------------------------- the table

_LLAMA = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
_CAP = {"final_logit_softcapping": "logit_cap"}
_DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_IS_LLAMA = {"family": "llama"}
_BERT = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "seq_len",
    "layer_norm_eps": "norm_eps",
}


def _bert(name: str, model_type: str, sentences: str, order: str) -> "Architecture":
    return Architecture(
        name,
        model_type,
        _BERT,
        {"layer_norm_eps": 1e-12},
        {"family": "bert", "sentences": sentences, "norm_order": order, "tied_embeddings": True},
        {
            "tie_word_embeddings": True,  # else transformers has two biases of the logits
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            "position_embedding_type": "absolute",
            "add_cross_attention": False,
            "is_decoder": False,  # else attention is causal
        },
        weights=model_type,
        heads_divide=True,
    )


_T5 = {
    "vocab_size": "vocab",
    "d_model": "hidden",
    "d_kv": "head_dim",
    "d_ff": "ffn",
    "num_heads": "heads",
    "relative_attention_num_buckets": "position_buckets",
    "relative_attention_max_distance": "position_reach",
    "layer_norm_epsilon": "norm_eps",
}
_T5_DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "n_positions": 512,
}
_IS_GEMMA = _IS_LLAMA | {"norm_offset": True, "post_norms": True}

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "LlamaForCausalLM",
            "llama",
            _LLAMA | {"mlp_bias": "ffn_bias"},
            _DEFAULTS | {"mlp_bias": False},
            _IS_LLAMA,
            {"pretraining_tp": 1},
            (HEAD_DIM, ACTIVATION, ATTENTION_BIAS, ROTARY),
            heads_divide=True,
        ),
        Architecture(
            "MistralForCausalLM",
            "mistral",
            _LLAMA,
            _DEFAULTS | {"sliding_window": 4096, "num_key_value_heads": 8},
            _IS_LLAMA,
            converted=(HEAD_DIM, ACTIVATION, ROTARY, ALL_LAYERS),
        ),
        Architecture(
            "Qwen2ForCausalLM",
            "qwen2",
            _LLAMA,
            _DEFAULTS
            | {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
            _IS_LLAMA | {"qkv_bias": True},
            {"use_mrope": False},
            (HEAD_DIM, ACTIVATION, ROTARY, FROM_A_LAYER_ON),
        ),
        Architecture(
            "Qwen3ForCausalLM",
            "qwen3",
            _LLAMA,
            _DEFAULTS
            | {"num_key_value_heads": 32, "head_dim": 128}
            | {"sliding_window": 4096, "max_window_layers": 28},
            _IS_LLAMA | {"qk_norm": True},
            converted=(HEAD_DIM, ACTIVATION, ATTENTION_BIAS, ROTARY, FROM_A_LAYER_ON),
        ),
        Architecture(
            "Gemma2ForCausalLM",
            "gemma2",
            _LLAMA | _CAP | {"attn_logit_softcapping": "attention_cap"},
            _DEFAULTS
            | {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256}
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
            _IS_GEMMA,
            {"use_bidirectional_attention": False},
            (HEAD_DIM, ACTIVATION, ATTENTION_BIAS, GEMMA_SCALES, ROTARY, ALTERNATING),
            "gemma",
            heads_divide=True,
        ),
        Architecture(
            "Gemma3ForCausalLM",
            "gemma3_text",
            _LLAMA | _CAP,
            _DEFAULTS
            | {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256}
            | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6}
            | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            _IS_GEMMA | {"qk_norm": True},
            # transformers reads this cap, and does not use it
            {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
            (HEAD_DIM, ACTIVATION, ATTENTION_BIAS, GEMMA_SCALES, ROTARY_AND_LOCAL, ALTERNATING),
            "gemma",
            heads_divide=True,
        ),
        Architecture(
            "Phi3ForCausalLM",
            "phi3",
            _LLAMA,
            _DEFAULTS | {"rms_norm_eps": 1e-5},
            _IS_LLAMA,
            converted=(HEAD_DIM, ACTIVATION, PARTLY_ROTARY, ALL_LAYERS),
            weights="phi3",
        ),
        Architecture(
            "GPT2LMHeadModel",
            "gpt2",
            {
                "vocab_size": "vocab",
                "n_embd": "hidden",
                "n_inner": "ffn",
                "n_layer": "layers",
                "n_head": "heads",
                "n_positions": "seq_len",
                "layer_norm_epsilon": "norm_eps",
                "tie_word_embeddings": "tied_embeddings",
            },
            {"tie_word_embeddings": True, "n_inner": 0, "layer_norm_epsilon": 1e-5},
            {"family": "gpt"},
            {
                "activation_function": "gelu_new",
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            },
            weights="gpt2",
        ),
        _bert("BertForPreTraining", "bert", "next", "post"),
        _bert("BertForMaskedLM", "bert", "none", "post"),
        _bert("MegatronBertForPreTraining", "megatron-bert", "next", "pre"),
        _bert("MegatronBertForMaskedLM", "megatron-bert", "none", "pre"),
        Architecture(
            "T5ForConditionalGeneration",
            "t5",
            _T5,
            _T5_DEFAULTS,
            {"family": "t5"},
            {"is_encoder_decoder": True},
            (STACKS, FEED_FORWARD, HEAD, SAMPLE),
            weights="t5",
        ),
    )
}


def architecture_of(config: Config) -> Architecture:
    named = config.architecture()
    if named not in ARCHITECTURES:
        raise InputError(
            f"{config.source}: architectures = {printable(named, 100)}; hpczero has "
            f"{join_words(list(ARCHITECTURES))}"
        )
    return ARCHITECTURES[named]


def architecture_for(model: Model, wanted: str | None) -> Architecture:
    """Return the first architecture that can say all of the model, or the one that is wanted."""
    losses = {
        name: architecture.loses(model)
        for name, architecture in ARCHITECTURES.items()
        if wanted in (None, name)
    }
    for name, lost in losses.items():
        if not lost:
            return ARCHITECTURES[name]
    nearest = min(losses, key=lambda name: ("family" in losses[name], len(losses[name])))
    keys = [f"model.{key} = {toml_repr(attrgetter(key)(model))}" for key in losses[nearest]]
    among = f"{nearest} cannot have {join_words(keys)}"
    if "attention.kind" in losses[nearest]:
        among += ", whose blocks are none of transformers' (docs/long-sequences.md)"
    if wanted is None:
        among = f"no architecture of Hugging Face that hpczero knows is this model: {among}"
    raise InputError(f"{among}; without --hf the weights are written under hpczero's names")
