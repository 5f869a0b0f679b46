"""Token files held against what was written, and files that ask for more than they have."""

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpczero.cli import main
from hpczero.data import dataset, raw_files
from hpczero.data.build import build_token_file
from hpczero.data.corpus import find
from hpczero.data.dataset import FileSource
from hpczero.data.journal import Recipe
from hpczero.data.token_file import open_token_file
from hpczero.errors import InputError
from tests.support.checkpoints import memory_at_most

SEQ_LEN = 64


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"text {number}\n" * 2000)
    found = find([str(folder)])
    build_token_file(
        found,
        folder / "a.h5",
        Recipe(validation_fraction=0.2),
        folder / "work",
        dataset.SilentListener(),
    )
    return folder / "a.h5"


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "tokens.h5"))


def changed(path: Path, split: str, token: int) -> None:
    """Another byte of the text, in the place of one."""
    with h5py.File(path, "r+") as file:
        file[f"{split}/tokens"][token] = file[f"{split}/tokens"][token] % 255 + 1


def read(source: FileSource, split: str, window: int) -> np.ndarray:
    out = np.empty(SEQ_LEN + 1, np.int64)
    source.fill(split, window, out)
    return out


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_run_finds_a_changed_token_where_it_reads_it(path: Path, split: str) -> None:
    windows = FileSource(open_token_file(path), SEQ_LEN).windows(split)
    last = windows - 1
    good = read(FileSource(open_token_file(path), SEQ_LEN), split, last)
    changed(path, split, 0)
    source = FileSource(open_token_file(path), SEQ_LEN)
    assert np.array_equal(read(source, split, last), good)
    says = (
        rf"tokens.h5 is damaged: {split} tokens 0 to 32,767, bytes \d+ to \d+, are not as written"
    )
    with pytest.raises(InputError, match=says):
        read(source, split, 0)


def test_a_window_over_two_blocks_is_good_only_if_both_are(path: Path) -> None:
    """Whichever of them was read before."""
    border = raw_files.BLOCK // open_token_file(path).splits["train"].tokens.itemsize
    window = border // SEQ_LEN - 1  # its last token is the first of the second block
    for damaged, read_before in ((border, window - 1), (0, window + 1)):
        copy = Path(shutil.copy(path, path.with_name(f"{damaged}.h5")))
        changed(copy, "train", damaged)
        source = FileSource(open_token_file(copy), SEQ_LEN)
        read(source, "train", read_before)
        with pytest.raises(InputError, match="is damaged"):
            read(source, "train", window)


def test_a_block_is_looked_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    real = raw_files.checksum
    monkeypatch.setattr(
        raw_files, "checksum", lambda block: looked.append(len(block)) or real(block)
    )
    source = FileSource(open_token_file(path), SEQ_LEN)
    for _ in range(2):
        for window in range(source.windows("train")):
            read(source, "train", window)
    size = open_token_file(path).splits["train"].tokens.nbytes
    assert len(looked) == raw_files.blocks_of(size)
    assert sum(looked) == size


def test_every_window_is_the_text_whatever_was_read_before(path: Path) -> None:
    file = open_token_file(path)
    source, tokens = FileSource(file, SEQ_LEN), np.asarray(file.splits["train"].tokens)
    random = np.random.default_rng(3)
    for window in random.permutation(source.windows("train")):
        expected = tokens[window * SEQ_LEN : (window + 1) * SEQ_LEN + 1]
        assert np.array_equal(read(source, "train", int(window)), expected)


def test_a_file_without_checksums_is_read_and_its_fingerprint_tells(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(path, "r+") as file:
        del file["train/checksums"], file["validation/checksums"]
    assert main(["data", "verify", str(path)]) == 0
    assert "no checksums of blocks" in capsys.readouterr().out
    changed(path, "train", 5)
    read(FileSource(open_token_file(path), SEQ_LEN), "train", 0)
    assert main(["data", "verify", str(path)]) == 1
    assert "the tokens have the fingerprint" in capsys.readouterr().out


def test_verify_names_all_that_is_damaged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(path)]) == 0
    assert "good, " in capsys.readouterr().out
    for split, token in (("train", 100), ("train", 70_000), ("validation", 3)):
        changed(path, split, token)
    assert main(["data", "verify", "--json", str(path)]) == 1
    damages = json.loads(capsys.readouterr().out)["damages"]
    for part in ("train tokens 0 to", "train tokens 65,536 to", "validation tokens 0 to"):
        assert any(damage.startswith(part) for damage in damages), part
    assert main(["data", "verify", str(path)]) == 1
    assert capsys.readouterr().out.count("\n") == len(damages) + 1


def test_verify_looks_at_documents_and_counts(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(path, "r+") as file:
        file["train/documents"][1] += 1
        file["validation/counts"][65] += 1
        file["validation/counts"][101] -= 1
    assert main(["data", "verify", str(path)]) == 1
    said = capsys.readouterr().out
    assert "/train/documents do not end with token 256" in said
    assert "/validation/counts are not those of its tokens" in said


def test_an_end_of_a_document_that_is_left_out_is_found(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two documents would be one, with the token of an end in its middle."""
    with h5py.File(path, "r+") as file:
        documents = file["train/documents"][:]
        del file["train/documents"]
        file["train/documents"] = np.delete(documents, 1)
    assert main(["data", "verify", str(path)]) == 1
    assert "/train/documents do not end with token 256" in capsys.readouterr().out


def test_documents_that_begin_where_64_bits_end_are_found(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(path, "r+") as file:
        file["train/documents"][1:3] = [(1 << 63) - 1, -2]  # they go up, modulo 2**64
    assert main(["data", "verify", str(path)]) == 1
    assert "/train/documents do not end with token" in capsys.readouterr().out


def test_show_says_the_fingerprint_and_whether_there_are_checksums(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", "--json", str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fingerprint"] == open_token_file(path).fingerprint
    assert facts["block_checksums"] is True


def test_a_text_of_gigabytes_in_a_small_file_takes_no_memory(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(b"fingerprint\0") + 16 + 4  # the size in the attribute's datatype
    assert int.from_bytes(content[place : place + 4], "little") == 32
    content[place : place + 4] = (6 * 10**9 % 2**32 + 2**31).to_bytes(4, "little")
    path.write_bytes(content)
    with (
        memory_at_most(20 << 20),
        pytest.raises(InputError, match="attribute fingerprint is missing"),
    ):
        open_token_file(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(InputError, match=r"pipe\.h5 cannot be read: it is no plain file"):
        open_token_file(tmp_path / "pipe.h5")
