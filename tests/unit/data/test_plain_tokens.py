"""Tokens that others wrote are read where they lie: the same windows as in a token file."""

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpczero.cli import main
from hpczero.data.dataset import open_source
from hpczero.data.plain_tokens import open_plain_tokens
from hpczero.data.supply import count_tokens
from hpczero.errors import InputError
from hpczero.spec.schema import Data, Model, Spec, Train
from tests.support.plain_tokens import documents, write_datatrove, write_megatron
from tests.support.token_files import alone

TEXTS = documents()
TOKENS = [token for text in TEXTS for token in text]
ENDS = np.cumsum([len(text) for text in TEXTS])
SEQ = 32


def spec_of(path: Path, vocab: int = 257, **more: object) -> Spec:
    data = Data(source=str(path), validation_fraction=0.2, **more)
    return Spec(model=Model(seq_len=SEQ, vocab=vocab), data=data, train=Train(eval_batches=1))


def write_numpy(path: Path, dtype: str) -> Path:
    np.save(path, np.array(TOKENS, dtype))
    return path


WRITTEN: dict[str, Callable[[Path], Path]] = {
    "Megatron": lambda folder: write_megatron(folder / "text", TEXTS),
    "Megatron, its index": lambda folder: write_megatron(folder / "text", TEXTS).with_suffix(
        ".idx"
    ),
    "Megatron, its name": lambda folder: write_megatron(folder / "text", TEXTS).with_suffix(""),
    "Megatron, sentences": lambda folder: write_megatron(folder / "text", TEXTS, sentences=3),
    "Megatron, 32 bits": lambda folder: write_megatron(folder / "text", TEXTS, "<i4"),
    "Megatron, 64 bits": lambda folder: write_megatron(folder / "text", TEXTS, "<i8"),
    "datatrove": lambda folder: write_datatrove(folder / "text", [TEXTS]),
    "datatrove, files": lambda folder: write_datatrove(
        folder / "text", [TEXTS[:3], [], TEXTS[3:90], TEXTS[90:]]
    ),
    "datatrove, 32 bits": lambda folder: write_datatrove(folder / "text", [TEXTS], 4),
    "datatrove, no facts": lambda folder: write_datatrove(folder / "text", [TEXTS], 4, False),
    "numpy": lambda folder: write_numpy(folder / "text.npy", "<u2"),
    "numpy, signed": lambda folder: write_numpy(folder / "text.npy", "<i4"),
    "numpy, the other order": lambda folder: write_numpy(folder / "text.npy", ">u4"),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_windows_are_the_text(written: str, tmp_path: Path) -> None:
    path = WRITTEN[written](tmp_path)
    spec = spec_of(path)
    source = open_source(spec, alone)
    boundary = len(TOKENS) - round(0.2 * len(TOKENS))
    if written.partition(",")[0] != "numpy":
        boundary = int(ENDS[np.searchsorted(ENDS, boundary, side="right")])
    parts = {"train": TOKENS[:boundary], "validation": TOKENS[boundary:]}
    row = np.empty(SEQ + 1, np.int64)
    for split, tokens in parts.items():
        assert source.windows(split) == (len(tokens) - 1) // SEQ > 4
        for window in range(source.windows(split)):
            assert source.fill(split, window, row) is None
            assert row.tolist() == tokens[window * SEQ : window * SEQ + SEQ + 1]
    assert source.describe()["tokens"] == {name: len(part) for name, part in parts.items()}
    supply = count_tokens(spec, must_be_here=True)
    assert (supply.train, supply.validation) == tuple(map(len, parts.values()))
    counts = np.bincount(TOKENS)
    shares = counts[counts > 0] / len(TOKENS)
    assert source.unigram_entropy("train") == pytest.approx(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("written", ["Megatron", "Megatron, sentences", "datatrove, files"])
def test_documents_are_masked(written: str, tmp_path: Path) -> None:
    source = open_source(spec_of(WRITTEN[written](tmp_path), documents="masked"), alone)
    row = np.empty(SEQ + 1, np.int64)
    silent = 0
    for window in range(source.windows("train")):
        cut = source.fill("train", window, row)
        assert cut is not None
        assert [row[at] for at in cut.silent] == [256] * len(cut.silent)
        assert list(cut.begins) == [at + 1 for at in cut.silent if at + 1 < SEQ]
        silent += len(cut.silent)
    assert source.targets("train") == source.windows("train") * SEQ - silent


def test_reads_run_over_the_ends_of_many_files(tmp_path: Path) -> None:
    """More files than are kept open; each read is compared, in an order of its own."""
    path = write_datatrove(tmp_path / "text", [[text] for text in TEXTS])
    tokens = open_plain_tokens(path, 0.0).splits["train"]
    draws = np.random.default_rng(2)
    for _ in range(3000):
        start, stop = sorted(draws.integers(0, len(TOKENS) + 1, 2).tolist())
        stop = min(stop, start + 500)
        assert tokens.read(start, stop).tolist() == TOKENS[start:stop]


def test_the_fingerprint_tells_texts_apart(tmp_path: Path) -> None:
    found = [
        open_plain_tokens(write_megatron(tmp_path / name, texts), 0.1).fingerprint
        for name, texts in {"a": TEXTS, "b": TEXTS, "c": TEXTS[::-1]}.items()
    ]
    assert found[0] == found[1] != found[2]


def cut(path: Path, by: int) -> Path:
    os.truncate(path, path.stat().st_size - by)
    return path


def changed(path: Path, at: int, content: bytes) -> Path:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(content)] = content
    path.write_bytes(whole)
    return path


def pair(folder: Path) -> Path:
    return write_megatron(folder / "text", TEXTS)


def index(folder: Path) -> Path:
    return pair(folder).with_suffix(".idx")


def folder_of(folder: Path, name: str) -> Path:
    return write_datatrove(folder / "text", [TEXTS]) / f"00000_unshuffled.ds{name}"


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "points past its .bin": (
        lambda folder: cut(pair(folder), 2),
        "the .* tokens of .*text.idx are",
    ),
    "a torn index": (lambda folder: cut(index(folder), 1), "it was cut short"),
    "no index": (lambda folder: changed(index(folder), 0, b"x"), "is no index of Megatron-LM"),
    "another version": (lambda folder: changed(index(folder), 9, b"\2"), "has version 2"),
    "numbers that are no tokens": (lambda folder: changed(index(folder), 17, b"\6"), "of kind 6"),
    "far too many": (
        lambda folder: changed(index(folder), 18, struct.pack("<Q", 2**60)),
        "1,152,921,504,606,846,976 sequences",
    ),
    "a gap": (
        lambda folder: changed(index(folder), 34, struct.pack("<i", 7)),
        "sequence 0 ends at byte 14",
    ),
    "documents that do not grow": (
        lambda folder: changed(index(folder), 34 + 12 * 400 + 8, struct.pack("<q", 2**40)),
        "its index is damaged",
    ),
    "no .bin": (lambda folder: pair(folder).rename(folder / "x").with_name("text.idx"), "No such"),
    "a torn file": (lambda folder: cut(folder_of(folder, ""), 2), "and its index says"),
    "a torn index of datatrove": (lambda folder: cut(folder_of(folder, ".index"), 1), "64-bit"),
    "a folder of something": (lambda folder: folder, r"has no \*.ds"),
    "a torn array": (lambda folder: cut(write_numpy(folder / "a.npy", "<u2"), 2), "cut short"),
    "no array": (lambda folder: changed(write_numpy(folder / "a.npy", "<u2"), 1, b"x"), "no array"),
    "an array of floats": (lambda folder: write_numpy(folder / "a.npy", "<f4"), "holds float32"),
    "a header that is no Python": (
        lambda folder: changed(write_numpy(folder / "a.npy", "<u2"), 10, b"{'descr': (((((("),
        "no array",
    ),
    "an array of a negative length": (
        lambda folder: changed(
            write_numpy(folder / "a.npy", "<u2"),
            10,
            b"{'descr': '<u2', 'fortran_order': False, 'shape': (-5,), }   ",
        ),
        "tokens are whole numbers",
    ),
    "empty files": (lambda folder: write_datatrove(folder / "text", [[], []]), "has no tokens"),
    "no sequences": (lambda folder: write_megatron(folder / "text", []), "has no tokens"),
    "an empty array": (
        lambda folder: np.save(folder / "a.npy", np.zeros(0, "<u2")) or folder / "a.npy",
        "has no tokens, as files of numpy",
    ),
    "one document that ends nowhere": (
        lambda folder: changed(folder_of(folder, ".index"), 8 * 320, struct.pack("<q", 10**9)),
        "its index is damaged",
    ),
}


def test_a_single_file_of_datatrove_is_read(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "text", [TEXTS])
    whole = open_source(spec_of(tmp_path / "text"), alone)
    one = open_source(spec_of(tmp_path / "text" / "00000_unshuffled.ds"), alone)
    assert one.describe()["tokens"] == whole.describe()["tokens"]


@pytest.mark.parametrize("is_one", [False, True])
def test_empty_files_of_datatrove_are_said_by_every_command(
    is_one: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_datatrove(tmp_path / "text", [[]])
    before = sorted(tmp_path.rglob("*"))
    if is_one:
        path /= "00000_unshuffled.ds"
    assert main(["data", "show", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"hpczero: {path} has no tokens, as files of datatrove: copy or make it again"
    ]
    with pytest.raises(InputError, match="has no tokens"):
        count_tokens(spec_of(path))
    assert sorted(tmp_path.rglob("*")) == before


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    path = write_datatrove(tmp_path / "text", [[text] for text in TEXTS[:60]])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (110, before[1]))
    try:
        tokens = open_plain_tokens(path, 0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert sum(len(split) for split in tokens.splits.values()) == sum(map(len, TEXTS[:60]))


def test_a_token_that_also_stands_inside_of_documents_ends_none(tmp_path: Path) -> None:
    """Texts that end with a new line, as many do, and have others."""
    texts = [[1, 2, 10, 3, number % 7, 10] for number in range(400)]
    path = write_megatron(tmp_path / "text", texts)
    assert open_plain_tokens(path, 0.1).end_of_document is None
    with pytest.raises(InputError, match='"masked" needs documents that end with one token'):
        open_source(spec_of(path, documents="masked"), alone)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_one_message(wrong: str, tmp_path: Path) -> None:
    write, says = WRONG[wrong]
    path = write(tmp_path)
    path = path.parent if ".ds" in path.name else path
    with pytest.raises(InputError, match=says) as raised:
        open_source(spec_of(path), alone)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("written", "change", "says"),
    [
        ("Megatron", {"vocab": 200}, "model.vocab = 200 is too small"),
        ("Megatron", {"documents": "padded"}, 'set it to "packed", or "masked"'),
        ("numpy", {"documents": "masked"}, "are not known"),
    ],
)
def test_what_a_model_cannot_be_trained_on_is_refused(
    written: str, change: dict[str, object], says: str, tmp_path: Path
) -> None:
    spec = spec_of(WRITTEN[written](tmp_path), **change)
    with pytest.raises(InputError, match=says):
        open_source(spec, alone)
    with pytest.raises(InputError, match=says):
        count_tokens(spec)


@pytest.mark.parametrize("token", [-5, 300])
def test_a_token_that_opening_did_not_see_ends_the_run(tmp_path: Path, token: int) -> None:
    """The file changes after it was opened, as one might that is copied meanwhile."""
    path = write_megatron(tmp_path / "text", TEXTS, "<i4")
    source = open_source(spec_of(path), alone)
    changed(path, 4 * (3 * SEQ + 2), struct.pack("<i", token))
    out = np.empty(SEQ + 1, np.int64)
    source.fill("train", 2, out)
    with pytest.raises(InputError, match=f"window 3 of train holds token {token}, and model.vocab"):
        source.fill("train", 3, out)
