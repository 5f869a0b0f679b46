"""A mistake in a corpus is one message with its file and line, and nothing is half-built."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpczero.cli import main
from hpczero.data.build import build_token_file
from hpczero.data.corpus import find
from hpczero.data.encode import Effort
from hpczero.data.journal import Recipe
from hpczero.data.token_file import open_token_file
from tests.support.token_files import Heard

zstd = pytest.importorskip("backports.zstd", reason="Zstandard needs backports.zstd")
pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")
parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")

GOOD = b"".join(json.dumps({"text": f"record {n}\n" * 9}).encode() + b"\n" for n in range(600))


def build(folder: Path, *words: str) -> int:
    texts = [str(path) for path in sorted(folder.iterdir()) if path.suffix != ".h5"]
    return main(["data", "build", "-o", str(folder / "made.h5"), *words, *texts])


def parquet_file(path: Path, values: list[bytes | None]) -> None:
    texts = pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())
    parquet.write_table(pa.table({"text": texts}), path)


def lead_out(path: Path) -> None:
    """Write four texts, of which the file says that the last one is much longer."""
    table = pa.table({"text": ["abcdefgh"] * 4})
    with pa.ipc.new_stream(str(path), table.schema) as file:
        file.write_table(table)
    content = path.read_bytes()
    offsets = np.arange(0, 40, 8, dtype="<i4").tobytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:-4] + np.array(4000, "<i4").tobytes()))


WRONG: dict[str, tuple[str, Callable[[Path], object], int, str]] = {
    "a torn frame": (
        "a.jsonl.zst",
        lambda path: path.write_bytes(zstd.compress(GOOD)[:-9]),
        1,
        "a.jsonl.zst cannot be read past byte ",
    ),
    "a torn second frame": (
        "a.jsonl.zst",
        lambda path: path.write_bytes(zstd.compress(GOOD) + zstd.compress(GOOD)[:-9]),
        1,
        f"a.jsonl.zst cannot be read past byte {len(GOOD):,} of its text, line 600",
    ),
    "no frame": (
        "a.jsonl.zst",
        lambda path: path.write_bytes(b"not compressed"),
        1,
        "a.jsonl.zst cannot be read past byte 0 of its text: ",
    ),
    "a torn archive": (
        "a.jsonl.gz",
        lambda path: path.write_bytes(gzip.compress(GOOD)[:-9]),
        1,
        "a.jsonl.gz cannot be read past byte ",
    ),
    "invalid UTF-8": (
        "a.jsonl",
        lambda path: path.write_bytes(GOOD + b'{"text": "caf\xe9"}\n'),
        2,
        "a.jsonl:601: the line is not UTF-8 (byte 14 is 0xe9)",
    ),
    "a long line": (
        "a.jsonl.zst",
        lambda path: path.write_bytes(
            zstd.compress(GOOD + b'{"text": "' + b"x" * 200_000_000 + b'"}\n' + GOOD)
        ),
        2,
        "a.jsonl.zst:601: the line has 200,000,013 bytes, and a record at most 67,108,864",
    ),
    "a missing field": (
        "a.jsonl",
        lambda path: path.write_bytes(GOOD + b'\n{"content": "x"}\n'),
        2,
        'a.jsonl:602: every line must be an object with a string "text"',
    ),
    "a null": (
        "a.parquet",
        lambda path: parquet_file(path, [b"some text"] * 700 + [None]),
        2,
        "a.parquet:701: the value is null",
    ),
    "bytes in a table": (
        "a.parquet",
        lambda path: parquet_file(path, [b"some text"] * 300 + [b"caf\xe9"]),
        2,
        "a.parquet:301: the value is not UTF-8 (byte 4 is 0xe9)",
    ),
    "another column": (
        "a.parquet",
        lambda path: parquet.write_table(pa.table({"content": ["x"], "id": [1]}), path),
        2,
        'a.parquet has no column "text": it has content, id',
    ),
    "a column of numbers": (
        "a.parquet",
        lambda path: parquet.write_table(pa.table({"text": [1, 2]}), path),
        2,
        'a.parquet: its column "text" is int64, no text',
    ),
    "a torn table": (
        "a.parquet",
        lambda path: (
            parquet_file(path, [b"some text"] * 300),
            path.write_bytes(path.read_bytes()[:-30]),
        ),
        1,
        "a.parquet cannot be read past row 0: ",
    ),
    "offsets that lead out of the file": (
        "a.arrow",
        lambda path: lead_out(path),
        1,
        "a.arrow cannot be read past row 0: ",
    ),
    "no table": ("a.arrow", lambda path: path.write_bytes(b"text\n" * 99), 1, "past row 0: "),
}


@pytest.mark.parametrize("workers", ["1", ""])
@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_one_message_and_nothing_is_left(
    wrong: str, workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, write, code, says = WRONG[wrong]
    if workers and wrong not in ("invalid UTF-8", "a torn frame"):
        pytest.skip("two of them also by processes")
    write(tmp_path / name)
    assert build(tmp_path, *(["--workers", workers] if workers else [])) == code
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert says in said[0]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_so_many_bad_records_are_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [b"{}", b'{"text": "caf\xe9"}', b"nothing"]
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n".join(bad) + b"\n" + GOOD)
    (tmp_path / "b.jsonl").write_bytes(b"".join(b"%d: no\n" % number for number in range(7)))
    (tmp_path / "c.jsonl.zst").write_bytes(b"")
    assert build(tmp_path, "--max-bad", "9") == 2
    told = capsys.readouterr()
    assert "b.jsonl:7: the line is not JSON" in told.err
    assert "9 were left out before it (--max-bad 10 leaves it out, too)" in told.err
    assert build(tmp_path, "--max-bad", "10") == 0
    told = capsys.readouterr()
    for line in (
        "a.jsonl:602: the line is not UTF-8 (byte 14 is 0xe9)",
        "WARN bad records that were left out: 10 (",
        f"without any text: 2 files ({tmp_path}/b.jsonl, {tmp_path}/c.jsonl.zst)",
    ):
        assert line in told.out
    assert told.out.count("WARN left out: ") == 5
    made = open_token_file(tmp_path / "made.h5")
    assert sum(split.documents for split in made.splits.values()) == 1200


def three_bad(folder: Path) -> Path:
    text = folder / "a.jsonl"
    text.write_bytes(GOOD + b"{}\nno\n{}\n" + GOOD)
    return text


def test_what_was_left_out_of_an_output_is_not_up_to_date_for_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_bad(tmp_path)
    assert build(tmp_path, "--max-bad", "3") == 0
    assert open_token_file(tmp_path / "made.h5").bad_records == 3
    for most, code, words in (
        ("2", 2, "3 bad records were left out of it, while --max-bad is 2: --max-bad 3 takes it"),
        ("0", 2, "--max-bad is 0"),
        ("3", 0, "is up to date"),
        ("9", 0, "is up to date"),
    ):
        capsys.readouterr()
        assert build(tmp_path, "--max-bad", most) == code
        told = capsys.readouterr()
        assert words in told.out + told.err
        assert len((told.out + told.err).splitlines()) == 1


def test_a_build_goes_on_only_with_as_many_bad_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = three_bad(tmp_path)
    work, output = tmp_path / "made.h5.partial", tmp_path / "made.h5"

    def stop() -> None:
        raise KeyboardInterrupt

    effort = Effort(commit_every=1, most_bad=3)
    with pytest.raises(KeyboardInterrupt):
        build_token_file(find([str(text)]), output, Recipe(), work, Heard(900, stop), effort)
    words = ["data", "build", "-o", str(output), str(text), "--max-bad"]
    assert main([*words, "2"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "left out 3 bad records so far" in told.err
    assert "a.jsonl:601: " in told.err
    assert "--max-bad is 2: --max-bad 3 goes on with it" in told.err
    assert main([*words, "3"]) == 0
    assert "resuming after 0 of 1 files, 899 records" in capsys.readouterr().out
    assert open_token_file(output).bad_records == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--max-bad", "-1"], "--max-bad is -1"), (["--workers", "0"], "--workers is 0")],
)
def test_impossible_numbers_are_refused(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    assert build(tmp_path, *words) == 2
    assert says in capsys.readouterr().err
