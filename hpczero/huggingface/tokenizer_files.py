"""A tokenizer as the files of a model's folder (pure)."""

import json
from typing import Any

from hpczero.data.tokenizer import JSON, SETTINGS, ByteTokenizer, Tokenizer


def tokenizer_files(tokenizer: Tokenizer, seq_len: int) -> dict[str, bytes]:
    """Return the tokenizer's own files, and the settings that say which class of
    `transformers` reads them, if it has none.
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
    return files


def byte_tokenizer() -> dict[str, Any]:
    """Return the `tokenizer.json` whose ids 0 .. 255 are bytes, and 256 the end of a document."""
    by_byte = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    end = {
        "id": ByteTokenizer.end_of_document,
        "content": ByteTokenizer.end,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    model = {
        "type": "BPE",
        "vocab": {sign: byte for byte, sign in enumerate(signs_of_bytes())},
        "merges": [],
    }
    return {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": model,
    }


def signs_of_bytes() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies (Radford 2019).

    Printable ones stand for themselves, the others are moved to where no byte is.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(moved)) for byte in range(256)]


def as_json(values: Any) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"
