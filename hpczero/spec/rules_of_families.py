"""Keys of [model] that are each allowed, but not together, or not in this family (pure)."""

from collections.abc import Iterator
from itertools import chain

from hpczero.model.shapes import head_dim, keys_without_effect
from hpczero.spec.data import SPECIAL_TOKENS
from hpczero.spec.keys import Contradiction
from hpczero.spec.model import KEYS_OF, Model
from hpczero.spec.schema import Spec
from hpczero.spec.spans import lengths_of
from hpczero.text import format_count, join_words, toml_repr

_LEAST_TEXT = 4  # tokens: fewer cannot be cut into two sentences, or masked in part


def unused_by_llama(model: Model) -> list[str]:
    default = type(model)()
    return [
        f"model.{key} = {toml_repr(getattr(model, key))} has no effect with "
        f"model.rope_scaling = {toml_repr(model.rope_scaling)} and model.window = {model.window}"
        for key in sorted(keys_without_effect(model))
        if getattr(model, key) != getattr(default, key)
    ]


def _keys_of_others(spec: Spec) -> Iterator[Contradiction]:
    """Keys of one family mean nothing to another; a factory may read them."""
    model = spec.model
    if model.family not in KEYS_OF:
        return
    default = type(model)()
    for name in dict.fromkeys(chain(*KEYS_OF.values())):
        families = [family for family, keys in KEYS_OF.items() if name in keys]
        if model.family not in families and getattr(model, name) != getattr(default, name):
            yield Contradiction(
                (f"model.{name}", "model.family"),
                f"model.{name} = {toml_repr(getattr(model, name))} is for "
                f"model.family = {join_words([toml_repr(one) for one in families], 'or')}, and it "
                f"is {toml_repr(model.family)}: leave it out, or take that family",
            )


def _masked(spec: Spec) -> Iterator[Contradiction]:
    """Keys of masked samples, and keys that models with such samples do not take."""
    model, data = spec.model, spec.data
    of_families = (("whole_words", ["bert"]), ("special_ids", list(SPECIAL_TOKENS)))
    for name, families in of_families:
        value = getattr(data, name)
        if value and model.family not in families:
            yield Contradiction(
                (f"data.{name}", "model.family"),
                f"data.{name} = {toml_repr(value)} is for "
                f"model.family = {join_words([toml_repr(one) for one in families], 'or')}, and it "
                f"is {toml_repr(model.family)}: leave it out",
            )
    if not model.masks:
        return
    refused = (
        ("data.documents", data.documents, "packed", "its samples are made of packed text"),
        ("schedule.seq_len", spec.schedule.seq_len, (), "train in phases, one run after the other"),
        ("memory.loss_chunk", spec.memory.loss_chunk, 0, "it has logits of its targets alone"),
    )
    for name, value, needed, why in refused:
        if value != needed:
            yield Contradiction(
                (name, "model.family"),
                f"{name} = {toml_repr(value)} is not for model.family = {toml_repr(model.family)} "
                f"({why}): set it to {toml_repr(needed)}",
            )


def _special_tokens(spec: Spec) -> Iterator[Contradiction]:
    """Ids that are not distinct, below 0 or beyond the vocabulary."""
    model, ids = spec.model, spec.data.special_ids
    if not model.masks:
        return
    said = f"data.special_ids = {toml_repr(ids)}"
    names = list(SPECIAL_TOKENS[model.family])
    if ids and len(set(ids)) != 3:
        yield Contradiction(
            ("data.special_ids",),
            f"{said} must be three numbers, the ids of {join_words(names)}, or []",
        )
        return
    highest = 3
    if model.family == "t5":
        spans = model.spans(model.seq_len).spans
        highest, names = spans + 2, [*names[:2], format_count(spans, "sentinel")]
        if ids and (ids[2] < spans - 1 or any(0 <= ids[2] - one < spans for one in ids[:2])):
            yield Contradiction(
                ("data.special_ids", "model.seq_len", "model.span_length"),
                f"{said} gives the sentinels of the {spans} spans of model.seq_len = "
                f"{model.seq_len} the ids from {ids[2]} down to {ids[2] - spans + 1}: they must be "
                "0 or more, and not those of <pad> and </s>",
            )
    if max(ids, default=highest) >= model.vocab:
        yield Contradiction(
            ("model.vocab", "data.special_ids") if ids else ("model.vocab",),
            f"model.vocab = {model.vocab} has no room for {join_words([*names, 'a token'])}: set "
            f"it to {max(ids, default=highest) + 1} or more" + (f" ({said})" if ids else ""),
        )


def _bert(spec: Spec) -> Iterator[Contradiction]:
    if spec.model.family == "bert" and spec.text_len < _LEAST_TEXT:
        length = "data.seq_len" if spec.data.seq_len else "model.seq_len"
        least = _LEAST_TEXT + spec.seq_len - spec.text_len
        yield Contradiction(
            (length, "model.family"),
            f"{length} = {spec.seq_len} leaves {spec.text_len} tokens of text between [CLS] and "
            f"[SEP]: take {least} or more",
        )


def _t5(spec: Spec) -> Iterator[Contradiction]:
    model = spec.model
    if model.family != "t5":
        return
    for name, length in (("model.seq_len", model.seq_len), ("data.seq_len", spec.data.seq_len)):
        if length and model.spans(length).sample != length:
            yield _no_sample(model, name, length)
    if not 1 <= model.encoder_blocks < model.layers:
        yield Contradiction(
            ("model.encoder_layers", "model.layers"),
            f"model.layers = {model.layers} with model.encoder_layers = {model.encoder_layers} "
            "must leave a block or more to the encoder, and to the decoder: "
            + ("fewer in the encoder, or more of all" if model.layers > 1 else "take 2 or more"),
        )
    exact = model.position_buckets // 2  # of the decoder, which looks in one direction
    if model.position_buckets % 2 or model.position_reach <= exact:
        yield Contradiction(
            ("model.position_buckets", "model.position_reach"),
            f"model.position_buckets = {model.position_buckets} must be even, and half of them, "
            f"one for each of the nearest distances, fewer than model.position_reach = "
            f"{model.position_reach}",
        )


def _no_sample(model: Model, name: str, length: int) -> Contradiction:
    below = model.spans(length)
    above = lengths_of(below.text + 1, model.masked_fraction, model.span_length)
    nearest = [below, above] if below.sample < length else [below]
    listed = [f"{one.sample} ({one.encoder} + {one.decoder})" for one in nearest]
    return Contradiction(
        (name, "model.masked_fraction", "model.span_length"),
        f"{name} = {length} is no sum of the tokens of encoder and decoder that a sample has with "
        f"model.masked_fraction = {model.masked_fraction} and model.span_length = "
        f"{model.span_length}: take {join_words(listed, 'or')}",
    )


def _llama(spec: Spec) -> Iterator[Contradiction]:
    model = spec.model
    if model.family != "llama":
        return
    if model.kv_heads and model.heads % model.kv_heads:
        yield Contradiction(
            ("model.kv_heads", "model.heads"),
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}: each "
            "head of keys serves as many queries: take a divisor, or 0 for as many as heads",
        )
    width = int(head_dim(model) * model.rope_fraction)
    if width < 2:
        yield Contradiction(
            ("model.rope_fraction", "model.head_dim", "model.hidden", "model.heads"),
            f"{width} of the {head_dim(model)} elements of a head would be rotated by its position "
            f"(model.rope_fraction = {model.rope_fraction}), and there is no pair of them: wider "
            "heads, or a larger share",
        )
    if model.window_pattern and not model.window:
        yield Contradiction(
            ("model.window", "model.window_pattern"),
            f"model.window_pattern = {model.window_pattern} says which layers have no window, and "
            "model.window = 0 gives none to any: set it, or leave the pattern out",
        )
    if model.window and model.window_pattern == 1:
        yield Contradiction(
            ("model.window_pattern", "model.window"),
            f"model.window_pattern = 1 leaves no layer the window of {model.window} keys: set both "
            "to 0, or a pattern of 2 or more",
        )
    yield from _stretched(model)


def _stretched(model: Model) -> Iterator[Contradiction]:
    stretched = model.rope_scaling in ("llama3", "yarn")
    if stretched and not model.rope_original:
        yield Contradiction(
            ("model.rope_original", "model.rope_scaling"),
            f'model.rope_scaling = "{model.rope_scaling}" needs model.rope_original: the tokens '
            "in a sequence of the model before it was stretched",
        )
    if model.rope_scaling == "llama3" and model.rope_high <= model.rope_low:
        yield Contradiction(
            ("model.rope_high", "model.rope_low"),
            f"model.rope_high = {model.rope_high} is not more than model.rope_low = "
            f"{model.rope_low}: frequencies in between are stretched in part",
        )
    if model.rope_scaling == "yarn" and model.rope_fast <= model.rope_slow:
        yield Contradiction(
            ("model.rope_fast", "model.rope_slow"),
            f"model.rope_fast = {model.rope_fast} is not more than model.rope_slow = "
            f"{model.rope_slow}: frequencies in between are stretched in part",
        )


RULES = (_keys_of_others, _masked, _special_tokens, _bert, _t5, _llama)
