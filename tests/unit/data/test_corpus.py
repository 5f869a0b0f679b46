"""Which files of a corpus are found."""

import os
from pathlib import Path

import pytest

from hpczero.data.corpus import find
from hpczero.errors import InputError


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
