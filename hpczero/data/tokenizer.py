"""Tokenizers: bytes, any `tokenizer.json`, any SentencePiece model.

A tokenizer of one's own is the content of its files, which token files keep: whoever has the tokens
can turn them into text again. Text never becomes a special token: what reads "</s>" in it is
encoded as the letters that it is.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import xxhash

from hpczero import env
from hpczero.errors import InputError
from hpczero.safe_files import read_small
from hpczero.text import join_words, printable

JSON, SETTINGS, SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
OF_T5 = "spiece.model"  # SENTENCEPIECE's name in folders of T5
FILES = (JSON, SENTENCEPIECE, SETTINGS)
MOST_BYTES = 128 << 20  # of a tokenizer's file
# Names under which published tokenizers have the token that ends a document.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|end|>", "[SEP]")
_MOST_IDS = 1 << 24  # each is counted, and has a row in the model's embedding
_SHOWN = 12
_SPACES = ("\u2581", "\u0120", "\u010a")  # a space or newline, as vocabularies write it

Tokens = np.ndarray[Any, np.dtype[Any]]


class Tokenizer(Protocol):
    """Encodes texts, each by itself."""

    name: str  # in token files: of its kind, and a digest of its files
    vocabulary: int  # ids are 0 .. vocabulary - 1
    end_of_document: int
    end: str  # the token that ends documents, as it is written
    files: Mapping[str, bytes]  # what it is made of again

    def encode(self, texts: Sequence[str]) -> list[Tokens]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, as `<s>`; None if there is no such token."""

    def bytes_of_ids(self) -> Tokens | None:
        """Return how many bytes of text each id stands for; None where that is not known.

        -1: what an unknown word was. A space that a tokenizer puts before a text counts.
        """

    def continues(self) -> Tokens | None:
        """Return True for each id that continues the word before it.

        None if the vocabulary does not tell.
        """


class ByteTokenizer:
    """Ids 0–255 are the bytes of the text in UTF-8; 256 ends a document."""

    name = "byte"
    vocabulary = 257
    end_of_document = 256
    end = "<|endoftext|>"
    files: Mapping[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = (text.encode("utf-8", errors="replace") for text in texts)
        return [np.frombuffer(content, dtype=np.uint8) for content in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def token_to_id(self, token: str) -> int | None:
        return None

    def bytes_of_ids(self) -> Tokens | None:
        return np.array([1] * 256 + [0])

    def continues(self) -> Tokens | None:
        """Letters and digits, and bytes of other scripts, go on with a word."""
        return np.array([byte > 127 or bytes([byte]).isalnum() for byte in range(256)] + [False])


class JsonTokenizer:
    """A `tokenizer.json`, by the package `tokenizers`."""

    def __init__(
        self, files: Mapping[str, bytes], end_of_document: str | int | None = None
    ) -> None:
        package = library("tokenizers")
        self.files = files
        try:
            self._made = package.Tokenizer.from_buffer(files[JSON])
        except Exception as error:  # the package raises nothing narrower
            raise InputError(f"{JSON} cannot be read: {printable(str(error), 200)}") from error
        self._made.no_truncation()
        self._made.no_padding()
        self._made.encode_special_tokens = True
        ids = self._made.get_vocab(with_added_tokens=True)
        if not ids:
            raise InputError(f"{JSON} has no tokens")
        self.vocabulary = max(ids.values()) + 1
        if self.vocabulary > _MOST_IDS:
            raise InputError(f"{JSON} has the id {self.vocabulary - 1:,}: more than {_MOST_IDS:,}")
        special = [token.content for token in self._made.get_added_tokens_decoder().values()]
        self.end = _end(end_of_document, files, ids, special)
        self.end_of_document = int(ids[self.end])
        self.name = f"{JSON} {_digest(files, self.end)}"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        found = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._made.decode(list(tokens), skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        number: int | None = self._made.token_to_id(token)
        return number

    def bytes_of_ids(self) -> Tokens | None:
        """Known of byte-level vocabularies and of those that have spaces as U+2581."""
        by_byte = "ByteLevel" in _decoders(self.files[JSON])
        if not by_byte and not _decoders(self.files[JSON]) & {"ByteFallback", "Metaspace"}:
            return None
        added = self._made.get_added_tokens_decoder()
        sizes = np.zeros(self.vocabulary, np.int64)
        for token, number in self._made.get_vocab(with_added_tokens=True).items():
            if number in added:
                sizes[number] = 0 if added[number].special else len(token.encode())
            else:
                # of a byte-level token each character stands for a byte
                sizes[number] = len(token) if by_byte else _size_of_piece(token)
        unknown = self._made.token_to_id(_unknown(self.files[JSON]))
        if unknown is not None:
            sizes[unknown] = -1
        return sizes

    def continues(self) -> Tokens | None:
        """Known of WordPiece, and of vocabularies in which a word begins with its space."""
        decoders = _decoders(self.files[JSON])
        ids = self._made.get_vocab(with_added_tokens=True)
        added = self._made.get_added_tokens_decoder()
        begins = _SPACES if decoders & {"ByteLevel", "Metaspace", "ByteFallback"} else ()
        if not begins and "WordPiece" not in decoders:
            return None
        model = json.loads(self.files[JSON]).get("model") or {}
        inside = str(model.get("continuing_subword_prefix") or "##")
        found = np.zeros(self.vocabulary, np.bool_)
        for token, number in ids.items():
            goes_on = not token.startswith(begins) if begins else token.startswith(inside)
            found[number] = goes_on and number not in added
        return found


class SentencePieceTokenizer:
    """A model of SentencePiece."""

    def __init__(
        self, files: Mapping[str, bytes], end_of_document: str | int | None = None
    ) -> None:
        package = library("sentencepiece")
        self.files = files
        try:
            self._made = package.SentencePieceProcessor(model_proto=files[SENTENCEPIECE])
        except RuntimeError as error:
            raise InputError(
                "the tokenizer's *.model is no model of SentencePiece; "
                f"if it belongs to tiktoken, take the {JSON} beside it"
            ) from error
        self.vocabulary = int(self._made.get_piece_size())
        if not self.vocabulary:
            raise InputError("the tokenizer's *.model has no pieces")
        pieces = {self._made.id_to_piece(at): at for at in range(self.vocabulary)}
        own = self._made.eos_id()
        said = own if end_of_document is None and own >= 0 else end_of_document
        self.end = _end(said, files, pieces, [])
        self.end_of_document = int(pieces[self.end])
        self.name = f"{SENTENCEPIECE} {_digest(files, self.end)}"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        threads = env.encoding_threads()
        found = self._made.encode(list(texts), out_type=int, num_threads=threads)
        return [np.array(one, dtype=np.uint32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._made.decode(list(tokens)))

    def token_to_id(self, token: str) -> int | None:
        number = int(self._made.piece_to_id(token))
        return number if self._made.id_to_piece(number) == token else None

    def bytes_of_ids(self) -> Tokens | None:
        made = self._made
        sizes = [
            0 if made.is_control(at) or made.is_unused(at) else _size_of_piece(made.id_to_piece(at))
            for at in range(self.vocabulary)
        ]
        sizes[made.unk_id()] = -1
        return np.array(sizes, np.int64)

    def continues(self) -> Tokens | None:
        made = self._made
        return np.array(
            [
                not (made.is_control(at) or made.id_to_piece(at).startswith(_SPACES))
                for at in range(self.vocabulary)
            ]
        )


def tokenizer(source: str, end_of_document: str | int | None = None) -> Tokenizer:
    """Return "byte", or the tokenizer in a file or folder."""
    if source == ByteTokenizer.name:
        return ByteTokenizer()
    return from_files(_read(Path(source)), end_of_document)


def from_files(files: Mapping[str, bytes], end_of_document: str | int | None = None) -> Tokenizer:
    if JSON in files:
        return JsonTokenizer(files, end_of_document)
    if SENTENCEPIECE in files:
        return SentencePieceTokenizer(files, end_of_document)
    return ByteTokenizer()


def _read(path: Path) -> dict[str, bytes]:
    name = printable(str(path))
    if path.is_dir():
        places = {OF_T5: SENTENCEPIECE} | {file: file for file in FILES}
        found = {file: path / place for place, file in places.items() if (path / place).is_file()}
        if JSON in found:
            found.pop(SENTENCEPIECE, None)
        elif SENTENCEPIECE not in found:
            raise InputError(f"{name} has neither {JSON} nor {SENTENCEPIECE} nor {OF_T5}")
        elif all((path / file).is_file() for file in (SENTENCEPIECE, OF_T5)):
            raise InputError(f"{name} has both {SENTENCEPIECE} and {OF_T5}: name one of the files")
        return {file: read_small(place, MOST_BYTES) for file, place in found.items()}
    if path.suffix not in (".json", ".model"):
        raise InputError(
            f"there is no tokenizer '{name}'; there is: byte, a {JSON}, a SentencePiece *.model, "
            "and a folder with one of them"
        )
    return {JSON if path.suffix == ".json" else SENTENCEPIECE: read_small(path, MOST_BYTES)}


def _end(
    wanted: str | int | None,
    files: Mapping[str, bytes],
    ids: Mapping[str, int],
    special: Sequence[str],
) -> str:
    """Return the token that ends documents: the one wanted, by its text or its number, that of the
    settings, or one by its name.
    """
    if isinstance(wanted, int):
        wanted = next((name for name, number in ids.items() if number == wanted), str(wanted))
    wanted = wanted or _of_settings(files)
    if wanted is not None:
        if wanted not in ids:
            raise InputError(
                f"the tokenizer has no token {printable(wanted, 60)} to end documents with"
            )
        return wanted
    for name in _ENDS:
        if name in ids:
            return name
    listed = [printable(name, 40) for name in special[:_SHOWN]]
    raise InputError(
        "nothing says which token ends a document: name one with --end-of-document"
        + (f", such as {join_words(listed)}" if listed else "")
    )


def _decoders(content: bytes) -> set[str]:
    """Return the kinds of steps by which a tokenizer.json turns tokens into text."""
    decoder = json.loads(content).get("decoder") or {}
    return {str(step.get("type")) for step in [decoder, *decoder.get("decoders", [])]}


def _unknown(content: bytes) -> str:
    """Return the token that stands for what a tokenizer.json has no token for; "": none."""
    model = json.loads(content).get("model") or {}
    token, number = model.get("unk_token"), model.get("unk_id")
    if isinstance(number, int) and 0 <= number < len(model.get("vocab", [])):
        token = model["vocab"][number][0]  # of Unigram
    return str(token or "")


def _size_of_piece(piece: str) -> int:
    """Return the bytes of a piece that has spaces as U+2581, or is <0x0A> for a byte."""
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return 1 if is_byte else len(piece.replace("\u2581", " ").encode())


def _of_settings(files: Mapping[str, bytes]) -> str | None:
    try:
        value = json.loads(files[SETTINGS])["eos_token"]
        value = value["content"] if isinstance(value, dict) else value
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _digest(files: Mapping[str, bytes], end: str) -> str:
    digest = xxhash.xxh3_64(end.encode())
    for name, content in sorted(files.items()):
        if name == SETTINGS:  # of which only the end of a document matters, and that is in it
            continue
        digest.update(b"%s\0%d\0" % (name.encode(), len(content)))
        digest.update(content)
    return str(digest.hexdigest())


def library(name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"this tokenizer needs the package {name}, which is not installed: "
            f"{env.install('text')}"
        ) from error
