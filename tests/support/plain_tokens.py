"""Tokens as others write them: pairs of Megatron-LM, folders of datatrove, arrays of numpy."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

KINDS = {"u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}  # of Megatron-LM


def documents(count: int = 400, largest: int = 255, end: int = 256) -> list[list[int]]:
    """Return documents of many lengths, each followed by a token of its own."""
    draws = np.random.default_rng(1)
    lengths = draws.integers(1, 90, count)
    return [[*draws.integers(0, largest + 1, length).tolist(), end] for length in lengths]


def write_megatron(
    prefix: Path, texts: Sequence[Sequence[int]], dtype: str = "<u2", sentences: int = 1
) -> Path:
    """Write NAME.bin and NAME.idx; each document is of so many sequences, or fewer."""
    content, lengths, first = b"", list[int](), [0]
    for text in texts:
        content += np.array(text, dtype).tobytes()
        parts = np.array_split(np.array(text), min(sentences, len(text)))
        lengths += [len(part) for part in parts]
        first.append(len(lengths))
    width = np.dtype(dtype).itemsize
    pointers = [width * sum(lengths[:at]) for at in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, KINDS[dtype], len(lengths), len(first))
    index = np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    prefix.with_suffix(".bin").write_bytes(content)
    prefix.with_suffix(".idx").write_bytes(head + index + np.array(first, "<i8").tobytes())
    return prefix.with_suffix(".bin")


def write_datatrove(
    folder: Path, files: Sequence[Sequence[Sequence[int]]], width: int = 2, facts: bool = True
) -> Path:
    """Write a file of tokens for each list of documents."""
    folder.mkdir()
    for number, texts in enumerate(files):
        tokens = [token for text in texts for token in text]
        name = folder / f"{number:05}_unshuffled.ds"
        name.write_bytes(np.array(tokens, f"<u{width}").tobytes())
        ends = np.cumsum([len(text) for text in texts])
        name.with_name(name.name + ".index").write_bytes(ends.astype("<u8").tobytes())
        if facts:
            said = f"a/tokenizer|{width}\n{len(tokens)}\n1 K tokens"
            name.with_name(name.name + ".metadata").write_text(said)
    return folder
