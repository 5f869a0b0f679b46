"""Small models of `transformers`, the oracle of what is imported and exported."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from hpczero.model.batch import MicroBatch

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LONGEST = 64
_SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
}
_STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
_BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
_T5 = "T5ForConditionalGeneration"
_T5_11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

# name -> model_type or class, what its configuration has besides the sizes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {}),
    "Llama 3": ("llama", {"rope_parameters": {"rope_theta": 5e5, **_STRETCHED}}),
    "Mistral": ("mistral", {"sliding_window": 7, "head_dim": 10}),
    "Qwen 2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen 3": ("qwen3", {"head_dim": 10}),
    "Gemma 2": ("gemma2", {"head_dim": 10, "sliding_window": 7}),
    "Gemma 3": ("gemma3_text", {"head_dim": 10, "sliding_window": 7, "num_hidden_layers": 7}),
    "Phi-3": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "GPT-2": ("gpt2", {}),
    # keys where no named model has them
    "heads that hidden is no multiple of": (
        "mistral",
        {"hidden_size": 42, "num_attention_heads": 4, "head_dim": 8, "sliding_window": None},
    ),
    "yarn in layers without a window": (
        "gemma3_text",
        {
            "sliding_window": 5,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e4, **_YARN},
                "sliding_attention": _LOCAL,
            },
        },
    ),
    "yarn with a low base": (
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 1.5,
                **_YARN,
                "original_max_position_embeddings": 100_000,
                "factor": 40.0,
            }
        },
    ),
    "biases, tied, yarn": ("llama", {**_BIASES, "rope_parameters": {"rope_theta": 1e4, **_YARN}}),
    "old keys, exact GELU": ("llama", {"hidden_act": "gelu", "rope_scaling": _LINEAR}),
    "as many heads of keys": ("mistral", {"num_key_value_heads": 6, "head_dim": 6}),
    "one head of keys, two heads": (
        "llama",
        {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 26, "hidden_size": 34},
    ),
    "windows of every second layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
        },
    ),
    "windows of all layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "low caps": (
        "gemma2",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0, "head_dim": 12},
    ),
    "cap, stretched, apart": (
        "gemma3_text",
        {
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
        },
    ),
    "partial rotary, windows": (
        "phi3",
        {
            "sliding_window": 6,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
    ),
    "GPT-2, wide, apart": (
        "gpt2",
        {"n_inner": 70, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
    "BERT": ("BertForPreTraining", {}),
    "BERT, masked tokens": ("BertForMaskedLM", {"layer_norm_eps": 1e-3}),
    "Megatron's BERT": ("MegatronBertForPreTraining", {}),
    "Megatron's BERT, masked tokens": ("MegatronBertForMaskedLM", {"num_hidden_layers": 1}),
    "T5 1.0": (_T5, {}),
    "T5 1.1": (_T5, _T5_11),
    "T5, a gate by SiLU, one decoder, few distances": (
        _T5,
        {
            "feed_forward_proj": "gated-silu",
            "num_decoder_layers": 1,
            "d_kv": 5,
            "relative_attention_num_buckets": 6,
            "relative_attention_max_distance": 7,
            "n_positions": 46,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "T5, ReLU, apart, one encoder": (
        _T5,
        {"num_layers": 1, "num_decoder_layers": 3, "d_kv": 10, "tie_word_embeddings": False},
    ),
}
_T5_SIZES = {
    "vocab_size": 131,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 100,
    "num_layers": 3,
    "num_heads": 6,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 20,
    "initializer_factor": 0.5,  # its attention has no scale, and would be sharp
    "decoder_start_token_id": 0,
}
_GPT2_SIZES = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": LONGEST}


_NO_PADDING = {"pad_token_id": None}  # a lookup's gradient leaves it out
_MASKED = 5  # targets of a sample
_STREAMS = 46, 12  # tokens of T5's encoder and decoder in a sample


def random_model(name: str) -> Any:
    """Return a model in fp32 whose every weight is random, norms and biases too."""
    kind, keys = MODELS[name]
    if kind == _T5:
        model = _random_t5(keys)
    elif hasattr(transformers, kind):
        made = getattr(transformers, kind)
        sizes = {key: size for key, size in _SIZES.items() if key != "num_key_value_heads"}
        model = made(made.config_class(**(sizes | _NO_PADDING | keys)))
        model.set_attn_implementation("eager")
    else:
        sizes = _GPT2_SIZES if kind == "gpt2" else _SIZES
        config = transformers.AutoConfig.for_model(kind, **(sizes | keys))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(0.1 * noise)
    return model.eval()


def _random_t5(keys: dict[str, Any]) -> Any:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**(_T5_SIZES | keys), attn_implementation="eager")
    )
    if not keys.get("tie_word_embeddings", True):  # it is always tied when it is made
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
    return model


@functools.cache
def tokens() -> torch.Tensor:
    return torch.randint(0, 131, (3, 30), generator=torch.Generator().manual_seed(1))


def batch_of(theirs: Any) -> MicroBatch:
    """Return the tokens with targets: the next ones, those of masked places, or a decoder's."""
    text, samples = tokens(), torch.arange(3)
    if theirs.config.is_encoder_decoder:
        return _two_streams(theirs, samples)
    if not _masks(theirs):
        return MicroBatch(text[:, :-1], text[:, 1:], samples, 0, seed=1)
    generator = torch.Generator().manual_seed(2)
    places = torch.rand(text.shape, generator=generator).argsort(1)[:, :_MASKED]
    return MicroBatch(
        text.scatter(1, places, 7),
        text.gather(1, places),
        samples,
        0,
        seed=1,
        weights=torch.ones(places.shape),
        target_positions=places,
        segments=(torch.arange(text.shape[1]) > 11).long().expand(text.shape),
        labels=torch.tensor([0, 1, 1]) if hasattr(theirs.cls, "seq_relationship") else None,
    )


def _two_streams(theirs: Any, samples: torch.Tensor) -> MicroBatch:
    """Return tokens of encoder and decoder; those of the decoder are what they make of targets."""
    generator = torch.Generator().manual_seed(4)
    encoder, targets = (
        torch.randint(2, 131, (3, length), dtype=torch.int64, generator=generator)
        for length in _STREAMS
    )
    decoder = theirs.prepare_decoder_input_ids_from_labels(targets)
    return MicroBatch(torch.cat([encoder, decoder], 1), targets, samples, 0, seed=1)


def outcome(theirs: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return their mean loss, and the logits [samples, targets, vocab]."""
    if theirs.config.is_encoder_decoder:
        encoder, decoder = batch.tokens.split(_STREAMS, 1)
        found = theirs(encoder, decoder_input_ids=decoder, labels=batch.targets)
        return found.loss, found.logits
    if batch.target_positions is None:
        text = tokens()
        found = theirs(text, labels=text)
        return found.loss, found.logits[:, :-1]
    labels = torch.full_like(batch.tokens, -100).scatter(1, batch.target_positions, batch.targets)
    given = {} if batch.labels is None else {"next_sentence_label": batch.labels}
    found = theirs(batch.tokens, token_type_ids=batch.segments, labels=labels, **given)
    logits = found.logits if batch.labels is None else found.prediction_logits
    places = batch.target_positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
    return found.loss, logits.gather(1, places)


def _masks(theirs: Any) -> bool:
    return hasattr(theirs, "cls")


def loaded(folder: Path) -> Any:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    auto = getattr(transformers, name)
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
