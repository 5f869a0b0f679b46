"""Token files that cannot be trusted are refused: damaged, truncated, or of another kind."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpczero.data.dataset import open_source
from hpczero.errors import InputError
from tests.support.token_files import alone, spec_of


def replaced(name: str, **options: Any) -> Callable[[h5py.File], None]:
    """Return a change that puts another dataset in the place of this one."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


def linked(name: str, link: object) -> Callable[[h5py.File], None]:
    """Return a change that puts a link in the place of a dataset or group."""

    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return change


def external(file: h5py.File) -> None:
    length = len(file["train/tokens"])
    del file["train/tokens"]
    file.create_dataset(
        "train/tokens", (length,), "<u2", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
    )


def virtual(file: h5py.File) -> None:
    length = len(file["train/tokens"])
    del file["train/tokens"]
    layout = h5py.VirtualLayout((length,), "<u2")
    layout[:] = h5py.VirtualSource("/tmp/elsewhere.h5", "tokens", (length,))
    file.create_virtual_dataset("train/tokens", layout)


def wrong_counts(file: h5py.File) -> None:
    file["train/counts"][65] += 1


def negative_counts(file: h5py.File) -> None:
    file["train/counts"][0:2] = [-(2**62), 2**62]


DAMAGE: dict[str, Callable[[h5py.File], object]] = {
    "attribute format = 'hpczero-tokens'": lambda file: file.attrs.__delitem__("format"),
    "version 2 .* reads version 1": lambda file: file.attrs.__setitem__("version", 2),
    "version None": lambda file: file.attrs.__setitem__("version", [1, 1]),
    "attribute vocabulary is missing or of another type": lambda file: file.attrs.__setitem__(
        "vocabulary", "many"
    ),
    "a vocabulary of -1 ids": lambda file: file.attrs.__setitem__("vocabulary", -1),
    "/train/tokens has type uint16 .* not uint32": lambda file: file.attrs.__setitem__(
        "vocabulary", 10**6
    ),
    "a vocabulary of 1099511627776 ids": lambda file: file.attrs.__setitem__("vocabulary", 2**40),
    "/validation is missing": lambda file: file.__delitem__("validation"),
    "/train/tokens is missing": lambda file: file["train"].__delitem__("tokens"),
    "/train/tokens is not stored as one piece.*": replaced(
        "train/tokens", data=np.zeros(100, "<u2"), chunks=(10,)
    ),
    "/train/tokens is not stored as one piece inside": external,
    "/train/tokens is not stored as one": virtual,
    "/ is missing, or not a group of this file: its links are not hpczero's": linked(
        "train", h5py.ExternalLink("/tmp/other.h5", "train")
    ),
    "/train is a link that leads on": linked("train", h5py.SoftLink("/validation")),
    "/train/tokens is a link that leads on": linked(
        "train/tokens", h5py.SoftLink("/validation/tokens")
    ),
    "/train/tokens has type float32": replaced("train/tokens", data=np.zeros(100, "f4")),
    "/train/tokens has type >u2": replaced("train/tokens", data=np.zeros(100, ">u2")),
    r"shape \(10, 10\)": replaced("train/tokens", data=np.zeros((10, 10), "<u2")),
    r"/train/tokens has 1000000000000000 values and would end at byte": replaced(
        "train/tokens", shape=(10**15,), dtype="<u2"
    ),
    "/train/documents does not run from 0 to the": replaced(
        "train/documents", data=np.array([0, 7])
    ),
    "/train/documents does not run from 0": replaced("train/documents", data=np.array([], "<i8")),
    "/validation/counts does not add up": replaced("validation/counts", data=np.zeros(3, "<i8")),
    "/train/counts does not add up": wrong_counts,
    "/train/counts does not add up to": negative_counts,
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_foreign_or_damaged_file_is_refused(path: Path, says: str) -> None:
    with h5py.File(path, "r+") as file:
        DAMAGE[says](file)
    with pytest.raises(InputError, match=says) as raised:
        open_source(spec_of(path), alone)
    assert str(path) in str(raised.value)


def test_missing_files_and_other_kinds_of_files_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("not HDF5")
    (tmp_path / "empty.h5").touch()
    expected = {
        "no.h5": "No such file",
        ".": r"has no \*\.ds",
        "text.h5": "not HDF5, 8 bytes",
        "empty.h5": "not HDF5, 0 bytes",
    }
    for name, says in expected.items():
        with pytest.raises(InputError, match=says):
            open_source(spec_of(tmp_path / name), alone)


def test_a_truncated_file_is_refused_wherever_it_ends(path: Path) -> None:
    content = path.read_bytes()
    for length in [
        1,
        7,
        8,
        9,
        100,
        511,
        2048,
        *range(3000, len(content), len(content) // 20),
        len(content) - 1,
    ]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"truncated or damaged|not a token file"):
            open_source(spec_of(path), alone)


def test_flipped_bytes_in_the_head_never_raise_anything_else(path: Path) -> None:
    content = path.read_bytes()
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        changed = bytearray(content)
        for position in random.integers(0, 4096, size=4):
            changed[position] = random.integers(0, 256)
        path.write_bytes(changed)
        try:
            open_source(spec_of(path), alone)
        except InputError:
            refused += 1
    assert refused > 20


def test_a_token_that_the_counts_deny_is_found_when_it_is_read(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["train/tokens"][40] = 60_000
        del file["train/checksums"]  # as older versions wrote them
    source, out = open_source(spec_of(path), alone), np.empty(33, np.int64)
    source.fill("train", 0, out)
    with pytest.raises(
        InputError, match="window 1 of train holds token 60000, the counts say 256 at most"
    ):
        source.fill("train", 1, out)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(path: Path) -> None:
    source, out = open_source(spec_of(path), alone), np.empty(33, np.int64)
    source.fill("train", 0, out)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 8)
    source.fill("train", 0, out)
    with pytest.raises(
        InputError, match=r"tokens\.h5 was cut short while it was in use: it ends before byte \d+"
    ):
        source.fill("train", source.windows("train") - 1, out)


def test_a_dataset_that_says_more_than_it_has_stored_is_refused(path: Path) -> None:
    """Or what lies behind it in the file would pass for its values."""
    with h5py.File(path) as file:
        tokens = file["train/tokens"]
        place, size = tokens.id.get_offset(), tokens.nbytes
    content = path.read_bytes()
    layout = struct.pack("<QQ", place, size)
    assert content.count(layout) == 1
    path.write_bytes(content.replace(layout, struct.pack("<QQ", place, size - 2)))
    with pytest.raises(InputError, match="it lies in"):
        open_source(spec_of(path), alone)
