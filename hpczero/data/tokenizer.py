"""How text becomes tokens. Today: bytes. Others have their place in `tokenizer` below."""

from typing import Protocol

import numpy as np

from hpczero.errors import InputError


class Tokenizer(Protocol):
    """Encodes text piece by piece: a long document comes in several, each ending with a line, and no token spans two of them."""

    name: str
    vocabulary: int  # ids are 0 .. vocabulary - 1
    end_of_document: int

    def encode(self, text: str) -> np.ndarray: ...


class ByteTokenizer:
    """Ids 0–255 are the bytes of the text in UTF-8, 256 ends a document."""

    name = "byte"
    vocabulary = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


_TOKENIZERS = {"byte": ByteTokenizer}


def tokenizer(name: str) -> Tokenizer:
    if name not in _TOKENIZERS:
        raise InputError(f"there is no tokenizer '{name}'; there is: {', '.join(_TOKENIZERS)}")
    return _TOKENIZERS[name]()


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned integer (little-endian) that holds every id."""
    for code in ("<u1", "<u2", "<u4"):
        if vocabulary <= 2 ** (8 * np.dtype(code).itemsize):
            return np.dtype(code)
    raise InputError(f"a vocabulary of {vocabulary} ids is more than a token file holds (2**32)")
