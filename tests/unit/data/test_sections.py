"""How the files of a corpus are read and cut: sections that follow each other from any place."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpczero.data.corpus import Input, Place
from hpczero.data.encoders import texts_of
from hpczero.data.records import records
from hpczero.data.sections import LONG_DOCUMENT


@dataclass(frozen=True)
class Section:
    text: str
    ends_document: bool
    after: Place  # its record
    damaged: bool = False


def as_input(path: Path) -> Input:
    status = path.stat()
    return Input(path, path.name, status.st_size, status.st_mtime_ns)


def read(path: Path, start: Place | None = None) -> list[Section]:
    found = []
    for record in records(as_input(path), start or Place(), "text"):
        texts, damaged = texts_of(record, "text")
        for number, text in enumerate(texts, start=1):
            ends = record.ends_document and number == len(texts)
            found.append(Section(text, ends, record.after, damaged))
    return found


def test_a_file_up_to_the_limit_is_one_section(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "\ufeffx\r\n" * (LONG_DOCUMENT // 6), encoding="utf-8", newline=""
    )
    [section] = read(tmp_path / "a.txt")
    assert section.ends_document
    assert section.text.startswith(
        "x\r\n\ufeffx"
    )  # the mark goes at the beginning only, line ends stay
    (tmp_path / "empty.txt").touch()
    assert read(tmp_path / "empty.txt") == []


def test_a_long_file_is_cut_at_line_ends_and_can_be_resumed_at_each(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = "".join(f"line {number} äöü\n" * (1 + number % 3) for number in range(20_000))
    path.write_text(text, encoding="utf-8")
    whole = read(path)
    assert "".join(section.text for section in whole) == text
    assert len(whole) == -(-path.stat().st_size // (64 * 1024))
    assert all(section.text.endswith("\n") for section in whole)
    assert [section.ends_document for section in whole] == [False] * (len(whole) - 1) + [True]
    for number, section in enumerate(whole):
        assert read(path, section.after) == whole[number + 1 :]
    assert whole[-1].after.position == path.stat().st_size


@pytest.mark.parametrize("offset", range(4))
def test_a_line_without_end_is_cut_between_characters(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "line.txt"
    text = "x" * offset + "𝔘" * 400_000
    path.write_text(text, encoding="utf-8")
    cut = read(path)
    assert len(cut) > 4
    assert "".join(section.text for section in cut) == text
    assert not any(section.damaged for section in cut)
    assert read(path, cut[1].after) == cut[2:]


def test_bytes_that_are_not_text_are_replaced_and_marked(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert read(tmp_path / "latin.txt") == [Section("caf\ufffd\n", True, Place(5), damaged=True)]
    (tmp_path / "noise.txt").write_bytes(b"\x80" * 2_000_000)
    assert sum(len(section.text) for section in read(tmp_path / "noise.txt")) == 2_000_000


def test_lines_of_jsonl_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = "word\n" * 100_000
    lines = [
        '{"text": "eins", "id": 1}',
        "",
        "   ",
        json.dumps({"text": long}),
        '{"text": ""}',
        '{"text": "z\\ud800"}',
    ]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    found = read(path)
    documents, current = [], ""
    for section in found:
        current += section.text
        if section.ends_document:
            documents.append(current)
            current = ""
    assert documents == ["eins", long, "z?"]
    assert [section.after.number for section in found] == [1] + [4] * (len(found) - 2) + [6]
    assert read(path, found[0].after) == found[1:]
    assert found[-1].damaged


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"content": "x"}', 'string "text"; this one has the keys content'),
        ('{"text": 3}', 'string "text"'),
        ("{}", r"the keys \(none\)"),
        ("[1]", "is a list"),
        ("{'text': 1}", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_it_is_said_what_is_wrong_with_a_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=says):
        read(path)
