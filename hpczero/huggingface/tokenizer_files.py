"""A tokenizer as the files of a model's folder (pure)."""

import json
from typing import Any

from hpczero.data.masking import SPECIAL, SpecialIds
from hpczero.data.tokenizer import JSON, SETTINGS, ByteTokenizer, Tokenizer


def tokenizer_files(tokenizer: Tokenizer, seq_len: int, masks: bool = False) -> dict[str, bytes]:
    """Return the tokenizer's own files, and the settings that say which class of
    `transformers` reads them, if it has none.

    `masks`: with the special tokens of a model of masked tokens.
    """
    files = dict(tokenizer.files) or {JSON: as_json(byte_tokenizer())}
    if SETTINGS not in files:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast" if JSON in files else "LlamaTokenizer",
            "eos_token": tokenizer.end,
            "model_max_length": seq_len,
            "clean_up_tokenization_spaces": False,
        }
        if JSON not in files:
            settings |= {"legacy": False, "add_bos_token": False, "add_eos_token": False}
        files[SETTINGS] = as_json(settings)
    return _with_marks(files, tokenizer) if masks and JSON in files else files


def _with_marks(files: dict[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Add what a tokenizer lacks of [CLS], [SEP], [MASK], and say where they stand in a text."""
    content, settings = json.loads(files[JSON]), _table(files[SETTINGS])
    ids = dict(zip(SPECIAL, SpecialIds.of(tokenizer), strict=True))
    for name, number in ids.items():
        if tokenizer.token_to_id(name) != number:
            content.setdefault("added_tokens", []).append(_special(name, number))
    content["post_processor"] = _template(ids)
    settings |= dict(zip(("cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return files | {JSON: as_json(content), SETTINGS: as_json(settings)}


def _table(content: bytes) -> dict[str, Any]:
    """Return a stranger's settings; what is no table says nothing."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _template(ids: dict[str, int]) -> dict[str, Any]:
    """Return the step of a tokenizer.json that puts [CLS] and [SEP] around texts."""
    first, last, _ = SPECIAL

    def mark(name: str, segment: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": segment}}

    def text(name: str, segment: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": segment}}

    single = [mark(first, 0), text("A", 0), mark(last, 0)]
    tokens = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (first, last)}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), mark(last, 1)],
        "special_tokens": tokens,
    }


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
        "added_tokens": [_special(ByteTokenizer.end, ByteTokenizer.end_of_document)],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": model,
    }


def _special(name: str, number: int) -> dict[str, Any]:
    never = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **never, "special": True}


def signs_of_bytes() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies (Radford 2019).

    Printable ones stand for themselves, the others are moved to where no byte is.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(moved)) for byte in range(256)]


def as_json(values: Any) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"
