"""Text as users have it: compressed, under another field's name, and wrong in the first line."""

import gzip
import json
from pathlib import Path

import pytest

from hpczero.cli import main
from hpczero.data.build import build_token_file
from hpczero.data.corpus import Place, find
from hpczero.data.dataset import SilentListener
from hpczero.data.encode import Effort
from hpczero.data.journal import Recipe
from hpczero.data.records import records
from hpczero.data.token_file import open_token_file

DOCUMENTS = [f"record {number}\n" * (number % 40) for number in range(300)] + [
    "long line äöü\n" * 60_000
]


def lines(field: str) -> bytes:
    return "".join(
        json.dumps({field: text, "id": number}) + "\n" for number, text in enumerate(DOCUMENTS)
    ).encode()


def built(folder: Path, *words: str) -> str:
    """The fingerprint of what was built."""
    assert main(["data", "build", "-o", str(folder / "made.h5"), *words]) == 0
    found = open_token_file(folder / "made.h5").fingerprint
    (folder / "made.h5").unlink()
    return found


@pytest.mark.parametrize("size", [0, 1000, 256 * 1024, 256 * 1024 + 1, 700_000])
def test_compressed_text_makes_the_same_tokens(size: int, tmp_path: Path) -> None:
    text = (b"many a line of text, \xc3\xa4\xc3\xb6\n" * (1 + size // 26))[:size]
    (tmp_path / "first.txt").write_bytes(b"so that there is something\n" * 40)
    (tmp_path / "text.md").write_bytes(text)
    (tmp_path / "text.md.gz").write_bytes(gzip.compress(text))
    plain, compressed = (
        [str(tmp_path / "first.txt"), str(tmp_path / name)] for name in ("text.md", "text.md.gz")
    )
    assert built(tmp_path, *plain) == built(tmp_path, *compressed)


def test_compressed_lines_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_bytes(lines("text"))
    (tmp_path / "others.JSONL.GZ").write_bytes(gzip.compress(lines("content")))
    assert built(tmp_path, str(tmp_path / "plain.jsonl")) == built(
        tmp_path, str(tmp_path / "others.JSONL.GZ"), "--field", "content"
    )


def test_a_build_that_was_interrupted_inside_goes_on(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl.gz").write_bytes(gzip.compress(lines("content")))
    (tmp_path / "text" / "b.md.gz").write_bytes(gzip.compress(b"line\n" * 200_000))
    found, recipe = find([str(tmp_path / "text")]), Recipe(field="content")

    class Interrupts(SilentListener):
        def advanced(self, done: int, total: int) -> None:
            if (tmp_path / "work" / "journal.json").exists():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_token_file(
            found,
            tmp_path / "made.h5",
            recipe,
            tmp_path / "work",
            Interrupts(),
            Effort(commit_every=100_000),
        )
    said: list[str] = []

    class Hears(SilentListener):
        def said(self, line: str) -> None:
            said.append(line)

    effort = Effort(commit_every=100_000)
    made = build_token_file(found, tmp_path / "made.h5", recipe, tmp_path / "work", Hears(), effort)
    whole = build_token_file(
        found, tmp_path / "whole.h5", recipe, tmp_path / "work", SilentListener()
    )
    assert said[0].startswith("resuming after ")
    assert made.fingerprint == whole.fingerprint


def test_the_field_is_part_of_what_was_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = json.dumps({"text": "one", "content": "two"}) + "\n"
    (tmp_path / "a.jsonl").write_text(both * 300)
    words = ["data", "build", "-o", str(tmp_path / "made.h5"), str(tmp_path / "a.jsonl")]
    assert main([*words, "--field", "content"]) == 0
    assert main([*words, "--field", "content"]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert main(words) == 2
    assert "made from other text or with other parameters" in capsys.readouterr().err


def test_a_refused_build_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("content"))
    assert main(["data", "build", "-o", str(tmp_path / "made.h5"), str(tmp_path / "a.jsonl")]) == 2
    assert (
        'a.jsonl:1: every line must be an object with a string "text"; this one has the keys '
        "content, id"
    ) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    "damage",
    [
        b"no gzip at all",
        gzip.compress(b"cut short\n" * 1000)[:-20],
        gzip.compress(b"x" * 99)[:30] + b"\xff" * 30,
    ],
)
def test_a_damaged_archive_is_one_error(
    damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt.gz").write_bytes(damage)
    assert main(["data", "build", "-o", str(tmp_path / "made.h5"), str(tmp_path / "a.txt.gz")]) == 1
    assert "a.txt.gz cannot be read past byte 0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt.gz"]


def test_tables_and_frames_make_the_same_tokens_as_lines(tmp_path: Path) -> None:
    """Each kind of file, also when it is cut into parts that a reader has to join."""
    pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")
    zstd = pytest.importorskip("backports.zstd", reason="Zstandard needs backports.zstd")
    (tmp_path / "a.jsonl").write_bytes(lines("text"))
    expected = built(tmp_path, str(tmp_path / "a.jsonl"))
    content = lines("text")
    frames = [content[at : at + 700_001] for at in range(0, len(content), 700_001)]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(map(zstd.compress, frames)))
    table = pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=70)
    kinds = {
        "large": pa.large_string(),
        "view": pa.string_view(),
        "words": pa.dictionary(pa.int32(), pa.string()),
    }
    for name, kind in kinds.items():
        again = table.set_column(1, "text", table["text"].cast(kind))
        with pa.ipc.new_file(str(tmp_path / f"{name}-file.arrow"), again.schema) as file:
            file.write_table(again, max_chunksize=70)
        with pa.ipc.new_stream(str(tmp_path / f"{name}-stream.arrow"), again.schema) as file:
            file.write_table(again, max_chunksize=70)
    for path in sorted(tmp_path.iterdir()):
        assert built(tmp_path, str(path)) == expected, path


def test_progress_of_tables_goes_from_the_first_row_to_the_last(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")
    texts = [f"{number} " * 2000 for number in range(2000)]
    table = pa.table({"text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    with pa.ipc.new_stream(str(tmp_path / "b.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=100)
    for name in ("a.parquet", "b.arrow"):
        [given] = find([str(tmp_path / name)]).inputs
        read = [record.read for record in records(given, Place(), "text")]
        assert len(read) == 2000
        assert read == sorted(read)
        assert read[0] < given.size / 3
        assert read[-1] >= 0.99 * given.size
        assert len(set(read)) >= 4


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_tokenizer_is_not_trained_on_a_part_of_a_record_that_is_too_long(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")
    pytest.importorskip("tokenizers", reason="a tokenizer is trained by tokenizers")
    for module in ("tables", "records"):
        monkeypatch.setattr(f"hpczero.data.{module}.MOST_BYTES", 1000)
    texts = ["short", "x" * 2000]
    if name == "a.parquet":
        parquet.write_table(pa.table({"text": texts}), tmp_path / name)
    else:
        written = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / name).write_text(written)
    words = ["data", "tokenizer", "train", "-o", str(tmp_path / "t.json"), "--vocabulary", "300"]
    assert main([*words, str(tmp_path / name)]) == 2
    assert f"{name}:2: the {'value' if name == 'a.parquet' else 'line'} has 2," in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "t.json").exists()
