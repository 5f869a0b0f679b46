"""Which files are found, and how they are cut."""

import json
import os
from pathlib import Path

import pytest

from hpczero.data.corpus import LONG_DOCUMENT, Input, Section, find, sections
from hpczero.errors import InputError


def as_input(path: Path) -> Input:
    status = path.stat()
    return Input(path, path.name, status.st_size, status.st_mtime_ns)


def read(path: Path, start: int = 0) -> list[Section]:
    with open(path, "rb") as file:
        return list(sections(as_input(path), file, start))


def names(*paths: Path | str, **options: frozenset[str]) -> list[str]:
    return [source.name for source in find([str(path) for path in paths], **options).inputs]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b.txt",
        "a.MD",
        "c.bin",
        ".hidden.txt",
        "sub/z.py",
        "sub/.git/x.py",
        "tests/t.py",
        "a/deep/er/y.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    return tmp_path


def test_folders_are_read_sorted_without_hidden_and_foreign_files(tree: Path) -> None:
    assert names(tree) == ["a.MD", "b.txt", "a/deep/er/y.jsonl", "sub/z.py", "tests/t.py"]
    assert find([str(tree)]).others == 1
    assert names(tree, leave_out=frozenset({"tests", "er"})) == ["a.MD", "b.txt", "sub/z.py"]


def test_files_and_globs_keep_the_order_given_and_nothing_is_read_twice(tree: Path) -> None:
    assert names(tree / "b.txt", tree / "a.MD") == ["b.txt", "a.MD"]
    assert names(tree / "b.txt", tree / "b.txt", tree / "*.txt", tree / "sub", tree / "sub") == [
        "b.txt",
        "z.py",
    ]
    assert names(tree / "**" / "*.py") == ["z.py", "t.py"]
    (tree / "[1].txt").write_text("x")  # a name that is also a pattern
    assert names(tree / "[1].txt") == ["[1].txt"]


def test_links_are_followed_once_and_circles_end(tree: Path) -> None:
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "same.txt").symlink_to(tree / "b.txt")
    (tree / "sub" / "broken.txt").symlink_to(tree / "nothing")
    found = find([str(tree)])
    assert [source.name for source in found.inputs] == [
        "a.MD",
        "b.txt",
        "a/deep/er/y.jsonl",
        "sub/z.py",
        "tests/t.py",
    ]
    assert found.unreadable == [tree / "sub" / "broken.txt"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("missing.txt", "no such file"),
        ("*.rst", "nothing matches"),
        ("c.bin", r"\.txt \.md \.py \.jsonl"),
        ("empty", "1 files of other kinds"),
    ],
)
def test_nothing_to_read_is_an_error(tree: Path, given: str, says: str) -> None:
    (tree / "empty").mkdir()
    (tree / "empty" / "x.bin").touch()
    with pytest.raises(InputError, match=says):
        find([str(tree / given)])


def test_something_that_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("a")
    found = find([str(tmp_path)])
    assert ([source.name for source in found.inputs], found.others) == (["a.txt"], 1)


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
        assert section.resume is not None
        assert read(path, section.resume) == whole[number + 1 :]
    assert whole[-1].resume == path.stat().st_size


@pytest.mark.parametrize("offset", range(4))
def test_a_line_without_end_is_cut_between_characters(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "line.txt"
    text = "x" * offset + "𝔘" * 400_000
    path.write_text(text, encoding="utf-8")
    cut = read(path)
    assert len(cut) > 4
    assert "".join(section.text for section in cut) == text
    assert not any(section.damaged for section in cut)
    assert read(path, cut[1].resume or 0) == cut[2:]


def test_bytes_that_are_not_text_are_replaced_and_marked(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert read(tmp_path / "latin.txt") == [Section("caf\ufffd\n", True, 5, damaged=True)]
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
    assert [section.resume is not None for section in found] == [
        section.ends_document for section in found
    ]
    assert read(path, found[0].resume or 0) == found[1:]
    assert found[-1].damaged


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"content": "x"}', 'string "text"; this one has the keys content'),
        ('{"text": 3}', 'string "text"'),
        ("{}", r"the keys \(none\)"),
        ("[1]", "is a list"),
        ("{'text': 1}", "not JSON"),
        ("[" * 100_000, "a.jsonl:3: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(InputError, match=says) as raised:
        read(path)
    assert f"{path}:3: " in str(raised.value)
    with pytest.raises(InputError, match=r"a\.jsonl:3: "):
        read(path, len('{"text": "good"}\n'))
