"""The builder: every text once and in order, the same bytes for the same text, and its reports."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hpczero.data import encode
from hpczero.data.build import build_token_file, is_up_to_date
from hpczero.data.corpus import Input, Place, Record, find
from hpczero.data.journal import Recipe
from hpczero.data.token_file import open_token_file
from hpczero.errors import HpczeroError, InputError
from tests.support.token_files import Heard, documents, make


def test_the_text_is_in_it_once_in_order(text: Path, tmp_path: Path) -> None:
    made = make(text, tmp_path / "a.h5", fraction=0.0)
    expected = [(text / f"{number:02}.txt").read_bytes() for number in range(12)]
    expected.append("caf\ufffd ".encode() * 100)
    expected += [
        f"record {number}\n".encode() * (number % 40) for number in range(200) if number % 40
    ] + [b"long\n" * 100_000]
    expected.append((text / "long.md").read_bytes())
    assert documents(made, "train") == expected
    assert made.splits["train"].documents == len(expected)
    assert len(made.splits["validation"].tokens) == made.splits["validation"].documents == 0
    assert made.splits["train"].counts[256] == len(expected)
    assert np.array_equal(
        made.splits["train"].counts, np.bincount(made.splits["train"].tokens, minlength=257)
    )
    assert not (tmp_path / "a.h5.partial").exists()


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.5, 0.95])
def test_validation_follows_its_share(text: Path, tmp_path: Path, fraction: float) -> None:
    made = make(text, tmp_path / "a.h5", fraction=fraction, commit_every=2**30)
    train, validation = len(made.splits["train"].tokens), len(made.splits["validation"].tokens)
    half_of_the_longest_piece = 140 * 1024 / 2
    assert abs(validation - fraction * (train + validation)) <= half_of_the_longest_piece
    pieces = b"".join(documents(made, "train") + documents(made, "validation"))
    assert len(pieces) == sum(
        map(
            len,
            documents(make(text, tmp_path / "all.h5", fraction=0.0, commit_every=2**30), "train"),
        )
    )


def test_one_long_file_has_a_part_in_both_splits(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {number}\n" for number in range(200_000)))
    made = build_token_file(
        find([str(tmp_path / "one.txt")]), tmp_path / "a.h5", Recipe(), tmp_path / "work", Heard()
    )
    assert 0.03 < len(made.splits["validation"].tokens) / len(made.splits["train"].tokens) < 0.08
    assert all(
        document.endswith(b"\n") for split in made.splits for document in documents(made, split)
    )


def test_same_text_elsewhere_and_later_gives_the_same_bytes(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "a.h5", commit_every=10_000)
    shutil.copytree(text, tmp_path / "other" / "place", copy_function=shutil.copyfile)
    make(tmp_path / "other" / "place", tmp_path / "b.h5", commit_every=2**30)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert (
        make(text, tmp_path / "c.h5", fraction=0.2).fingerprint
        != open_token_file(tmp_path / "a.h5").fingerprint
    )


def while_it_reads(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Carry out the action when the first file is opened."""
    actions = [action]
    real = encode.records

    def opened(source: Input, start: Place, field: str) -> Iterator[Record]:
        if actions:
            actions.pop()()
        return real(source, start, field)

    monkeypatch.setattr(encode, "records", opened)


def test_a_file_that_changes_while_it_is_read_is_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow() -> None:
        with open(text / "long.md", "a") as file:
            file.write("more\n")

    while_it_reads(monkeypatch, grow)
    with pytest.raises(HpczeroError, match=r"long\.md changed while"):
        make(text, tmp_path / "a.h5")


def test_a_second_builder_is_refused(text: Path, tmp_path: Path) -> None:
    errors = []

    def second() -> None:
        with pytest.raises(InputError, match="another process is building") as raised:
            make(text, tmp_path / "a.h5")
        errors.append(raised)

    make(text, tmp_path / "a.h5", Heard(5, second))
    assert len(errors) == 1


def test_a_file_system_without_locks_is_said(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    heard = Heard()
    make(text, tmp_path / "a.h5", heard)
    assert "cannot be locked (Function not implemented)" in heard.lines[0]


def test_up_to_date_means_same_recipe_same_names_and_sizes_and_none_newer(
    text: Path, tmp_path: Path
) -> None:
    made = make(text, tmp_path / "a.h5")
    assert is_up_to_date(made, find([str(text)]), Recipe(validation_fraction=0.1))
    assert not is_up_to_date(made, find([str(text)]), Recipe(validation_fraction=0.2))
    assert not is_up_to_date(made, find([str(text / "01.txt")]), Recipe(validation_fraction=0.1))
    later = made.path.stat().st_mtime_ns + 10**9
    os.utime(text / "01.txt", ns=(later, later))
    assert not is_up_to_date(made, find([str(text)]), Recipe(validation_fraction=0.1))


def test_what_could_not_be_read_is_counted_and_named(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text / "broken.txt").symlink_to(text / "nothing")
    gone = text / "gone.txt"
    gone.write_text("gone")
    (text / "x.bin").touch()
    while_it_reads(monkeypatch, gone.unlink)
    heard = Heard()
    make(text, tmp_path / "a.h5", heard)
    assert "left out, being of other kinds: 1 files" in heard.lines
    assert any(
        "cannot be read: 2 (" in line and "gone.txt (No such file" in line and "broken.txt" in line
        for line in heard.lines
    )
    assert any(
        "not UTF-8" in line and "1 files" in line and "damaged.txt" in line for line in heard.lines
    )
