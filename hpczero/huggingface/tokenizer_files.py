"""A tokenizer as the files of a model's folder (pure)."""

import json
from typing import Any

from hpczero.data.special_ids import knows, sentinels_of, special_ids
from hpczero.data.tokenizer import (
    JSON,
    OF_T5,
    SENTENCEPIECE,
    SETTINGS,
    ByteTokenizer,
    Tokenizer,
)
from hpczero.spec.model import Model

# family -> what stands around a text, and after it around a second one; `:` is their segment
_TEMPLATES = {
    "bert": ("[CLS]:0 $A:0 [SEP]:0", "$B:1 [SEP]:1"),
    "t5": ("$A:0 </s>:0", "$B:0 </s>:0"),
}
_ROLES = {
    "bert": {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    "t5": {"pad_token": "<pad>", "eos_token": "</s>"},
}
# no tokens of samples: roles only of tokenizers that have them
_ROLES_IF_KNOWN = {"bert": {"pad_token": "[PAD]", "unk_token": "[UNK]"}}


def tokenizer_files(tokenizer: Tokenizer, model: Model) -> dict[str, bytes]:
    """Return the tokenizer's own files, and the settings that say which class of
    `transformers` reads them, if it has none.

    Those of a model with masked samples have its special tokens; a SentencePiece model has them
    itself, but for the sentinels of T5.
    """
    files = dict(tokenizer.files) or {JSON: as_json(byte_tokenizer())}
    if SETTINGS not in files:
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast" if JSON in files else "LlamaTokenizer",
            "eos_token": tokenizer.end,
            "model_max_length": model.streams(model.seq_len)[0],
            "clean_up_tokenization_spaces": False,
        }
        if JSON not in files:
            settings |= {"legacy": False, "add_bos_token": False, "add_eos_token": False}
        files[SETTINGS] = as_json(settings)
    if not model.masks:
        return files
    if JSON in files:
        return _with_marks(files, tokenizer, model)
    settings = _with_roles(_table(files[SETTINGS]), tokenizer, model)
    if model.family == "t5":
        # the class that ends texts with </s>; with extra_ids it would add sentinels of its own
        settings |= {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
        settings |= _sentinels(tokenizer, model)
        files[OF_T5] = files.pop(SENTENCEPIECE)
    return files | {SETTINGS: as_json(settings)}


def _sentinels(tokenizer: Tokenizer, model: Model) -> dict[str, Any]:
    """Name T5's sentinels, with the ids of those that a SentencePiece model lacks."""
    if own := sentinels_of(tokenizer):
        return {"extra_special_tokens": own}
    _, _, *new = special_ids(model, tokenizer).items()
    return {
        "extra_special_tokens": [name for name, _ in reversed(new)],
        "added_tokens_decoder": {str(number): _special(name) for name, number in new},
    }


def _with_marks(files: dict[str, bytes], tokenizer: Tokenizer, model: Model) -> dict[str, bytes]:
    """Add the special tokens that a tokenizer lacks, and say where they stand in a text."""
    content, settings = json.loads(files[JSON]), _table(files[SETTINGS])
    ids = special_ids(model, tokenizer)
    new = [name for name in ids if not knows(tokenizer, name)]
    content.setdefault("added_tokens", []).extend(_added(name, ids[name]) for name in new)
    content["post_processor"] = _template(model.family, ids)
    settings = _with_roles(settings, tokenizer, model)
    if without_role := [name for name in new if name not in _ROLES[model.family].values()]:
        # the key of older settings, which newer versions read too, unless they have their own
        key = "extra_special_tokens"
        if not isinstance(settings.get(key), list):
            key = "additional_special_tokens"
        others = settings.get(key)
        settings[key] = [*(others if isinstance(others, list) else []), *without_role]
    return files | {JSON: as_json(content), SETTINGS: as_json(settings)}


def _with_roles(settings: dict[str, Any], tokenizer: Tokenizer, model: Model) -> dict[str, Any]:
    """Name the tokens of samples, and those for padding and unknown text where nothing does."""
    more = {
        role: name
        for role, name in _ROLES_IF_KNOWN.get(model.family, {}).items()
        if not settings.get(role) and knows(tokenizer, name)
    }
    return settings | more | _ROLES[model.family]


def _table(content: bytes) -> dict[str, Any]:
    """Return a stranger's settings; what is no table says nothing."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _template(family: str, ids: dict[str, int]) -> dict[str, Any]:
    """Return the step of a tokenizer.json that puts special tokens around texts."""
    single, second = ([_piece(one) for one in part.split()] for part in _TEMPLATES[family])
    used = [name for name in ids if f"{name}:" in _TEMPLATES[family][0]]
    tokens = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in used}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": tokens,
    }


def _piece(word: str) -> dict[str, Any]:
    name, _, segment = word.rpartition(":")
    kind = "Sequence" if name.startswith("$") else "SpecialToken"
    return {kind: {"id": name.removeprefix("$"), "type_id": int(segment)}}


def byte_tokenizer() -> dict[str, Any]:
    """Return the `tokenizer.json` whose ids 0 .. 255 are bytes, and 256 the end of a document."""
    by_byte = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = {
        "type": "BPE",
        "vocab": {sign: byte for byte, sign in enumerate(signs_of_bytes())},
        "merges": [],
    }
    return {
        "version": "1.0",
        "added_tokens": [_added(ByteTokenizer.end, ByteTokenizer.end_of_document)],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": model,
    }


def _added(name: str, number: int) -> dict[str, Any]:
    return {"id": number, **_special(name)}


def _special(name: str) -> dict[str, Any]:
    never = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": name, **never, "special": True}


def signs_of_bytes() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies (Radford 2019).

    Printable ones stand for themselves, the others are moved to where no byte is.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(moved)) for byte in range(256)]


def as_json(values: Any) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"
