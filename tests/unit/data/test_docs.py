"""The page about the format holds: a reader written from it alone reads the file."""

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

from hpczero.data.build import build_token_file
from hpczero.data.corpus import find
from hpczero.data.dataset import SilentListener
from hpczero.data.journal import Recipe


def read_as_the_page_says(path: Path) -> tuple[dict[str, Any], list[str], str]:
    """Return the file's attributes, its documents and the fingerprint of its tokens."""
    found, digest = [], xxhash.xxh3_128()
    with h5py.File(path) as file:
        facts = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in file.attrs.items()
        }
        for split in ("train", "validation"):
            dataset = file[split]["tokens"]
            assert dataset.id.get_offset() % 4096 == 0
            tokens = np.memmap(path, dataset.dtype, "r", dataset.id.get_offset(), dataset.shape)
            digest.update(tokens.tobytes())
            offsets, counts = file[split]["documents"][:], file[split]["counts"][:]
            for begin, end in itertools.pairwise(offsets):
                assert tokens[end - 1] == facts["end_of_document"]
                found.append(bytes(tokens[begin : end - 1].astype(np.uint8)).decode("utf-8"))
            assert np.array_equal(counts, np.bincount(tokens, minlength=facts["vocabulary"]))
            assert (dataset.dtype, offsets.dtype, counts.dtype) == ("<u2", "<i8", "<i8")
    return facts, found, digest.hexdigest()


def test_a_reader_written_from_the_page_reads_the_file(tmp_path: Path) -> None:
    texts = [f"Text number {number}: äöü\n" * number for number in range(1, 60)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text, encoding="utf-8")
    build_token_file(
        find([str(tmp_path)]),
        tmp_path / "a.h5",
        Recipe(validation_fraction=0.25),
        tmp_path / "work",
        SilentListener(),
    )
    facts, found, fingerprint = read_as_the_page_says(tmp_path / "a.h5")
    assert sorted(found) == sorted(texts)
    inputs = "".join(
        f"{number:02}.txt\0{len(text.encode())}\0" for number, text in enumerate(texts)
    )
    assert facts == {
        "format": "hpczero-tokens",
        "version": 1,
        "tokenizer": "byte",
        "vocabulary": 257,
        "end_of_document": 256,
        "validation_fraction": 0.25,
        "builder": 1,
        "inputs": xxhash.xxh3_128(inputs.encode()).hexdigest(),
        "fingerprint": fingerprint,
    }
