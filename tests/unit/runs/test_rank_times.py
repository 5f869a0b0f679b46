"""Seconds of ranks: what is written is read again, and what is damaged is left out."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from hpczero.runs import rank_times
from hpczero.runs.rank_times import FIELDS, head, next_file, read, row
from tests.support.run_files import write_rank_times

ONES = [1.0] * len(FIELDS)


def of_ranks(ranks: int, begin: float) -> list[dict[str, float]]:
    return [
        {name: begin + rank + at / 8 for at, name in enumerate(FIELDS)} for rank in range(ranks)
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_rank_times(tmp_path, 3, (1, 10, of_ranks(3, 0.5)), (11, 14, of_ranks(3, 7)))
    (job,) = read(tmp_path)
    assert job.ranks == 3
    assert (job.first.tolist(), job.last.tolist()) == ([1, 11], [10, 14])
    assert job.steps.tolist() == [10, 4]
    for at, name in enumerate(FIELDS):
        expected = [[0.5 + at / 8 + rank for rank in range(3)], [7 + at / 8 + r for r in range(3)]]
        assert job.of_field[name].tolist() == expected
        assert job.a_step(name)[1].tolist() == [value / 4 for value in expected[1]]


def test_jobs_with_other_ranks_and_steps_that_were_done_again(tmp_path: Path) -> None:
    """The second job begins behind step 15, the third, which also ends early, behind step 25."""
    rows = [(1, 10), (11, 20), (21, 30)]
    write_rank_times(tmp_path, 4, *((*steps, of_ranks(4, 1)) for steps in rows))
    rows = [(16, 20), (21, 30), (31, 32)]
    write_rank_times(tmp_path, 2, *((*steps, of_ranks(2, 2)) for steps in rows))
    write_rank_times(tmp_path, 1, (26, 30, of_ranks(1, 3)))
    found = [(job.ranks, job.first.tolist(), job.last.tolist()) for job in read(tmp_path)]
    # a row that only some of counts is left out: which part of its seconds that was, it cannot tell
    assert found == [(4, [1], [10]), (2, [16], [20]), (1, [26], [30])]


def test_a_job_of_which_nothing_counts_is_left_out(tmp_path: Path) -> None:
    write_rank_times(tmp_path, 2, (5, 6, of_ranks(2, 1)))
    write_rank_times(tmp_path, 2)
    write_rank_times(tmp_path, 2, (1, 2, of_ranks(2, 1)))
    assert [job.first.tolist() for job in read(tmp_path)] == [[1]]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_row_that_is_half_written_does_not_count(tmp_path: Path, cut: int) -> None:
    path = write_rank_times(tmp_path, 1, (1, 1, of_ranks(1, 1)), (2, 2, of_ranks(1, 1)))
    path.write_bytes(path.read_bytes()[:-cut])
    (job,) = read(tmp_path)
    assert job.last.tolist() == [1]


def heads() -> dict[str, bytes]:
    def made(
        magic: bytes = b"HPCZRANK", version: int = 1, ranks: int = 1, fields: int = len(FIELDS)
    ) -> bytes:
        return struct.pack("<8sIIII40x", magic, version, ranks, fields, 0)

    return {
        "another file": made(magic=b"\x7fELF\0\0\0\0"),
        "another version": made(version=2),
        "no ranks": made(ranks=0),
        "too many ranks": made(ranks=0xFFFFFFFF),
        "other fields": made(fields=len(FIELDS) + 1),
        "no fields": made(fields=0),
        "nothing": b"",
        "half a head": made()[:20],
    }


@pytest.mark.parametrize("name", heads())
def test_a_file_with_another_head_is_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "rank_times").mkdir()
    content = heads()[name] + row(1, 1, [[1.0] * len(FIELDS)]) * 20
    (tmp_path / "rank_times" / "0001.bin").write_bytes(content if len(heads()[name]) == 64 else b"")
    write_rank_times(tmp_path, 1, (1, 1, of_ranks(1, 1)))
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize(
    "bad",
    [
        bytes(len(row(1, 1, [ONES]))),  # a hole, as a disk without power leaves it
        row(3, 2, [ONES]),
        row(-5, 7, [ONES]),
        row(2, 2, [[float("nan"), *ONES[1:]]]),
        row(2, 2, [[*ONES[1:], float("inf")]]),
    ],
)
def test_a_row_that_cannot_be_is_left_out(tmp_path: Path, bad: bytes) -> None:
    path = write_rank_times(tmp_path, 1, (1, 1, of_ranks(1, 1)))
    path.write_bytes(path.read_bytes() + bad + row(3, 3, [[2.0, *ONES[1:]]]))
    (job,) = read(tmp_path)
    assert job.first.tolist() == [1, 3]


def test_seconds_are_never_negative(tmp_path: Path) -> None:
    write_rank_times(tmp_path, 1, (1, 1, [{"compute": -1.0, "wait": 2.0}]))
    (job,) = read(tmp_path)
    assert (job.of_field["compute"].item(), job.of_field["wait"].item()) == (0, 2)


def test_of_huge_files_the_newest_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_times, "_MOST_BYTES", 20 * len(row(1, 1, [ONES])))
    for job in range(2):
        steps = range(1 + 15 * job, 16 + 15 * job)
        write_rank_times(tmp_path, 1, *((step, step, of_ranks(1, 1)) for step in steps))
    older, newer = read(tmp_path)
    assert newer.first.tolist() == list(range(16, 31))
    assert older.last.tolist() == list(range(11, 16))


@pytest.mark.parametrize("newest", [0, 7, 15, 20, 99])
def test_of_all_rows_only_the_newest_are_read(tmp_path: Path, newest: int) -> None:
    for job in range(2):
        steps = range(1 + 15 * job, 16 + 15 * job)
        write_rank_times(tmp_path, 2, *((step, step, of_ranks(2, 1)) for step in steps))
    found = [step for job in read(tmp_path, newest) for step in job.first.tolist()]
    assert found == list(range(max(1, 31 - newest), 31))


def test_a_file_of_a_terabyte_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_times, "_MOST_BYTES", 1 << 20)
    path = write_rank_times(tmp_path, 100, (1, 1, of_ranks(100, 1)))
    os.truncate(path, 1 << 40)
    assert read(tmp_path) == []


def test_what_is_no_plain_file_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    (tmp_path / "rank_times").write_text("no folder")
    assert read(tmp_path) == []
    (tmp_path / "rank_times").unlink()
    folder = tmp_path / "rank_times"
    folder.mkdir()
    os.mkfifo(folder / "0001.bin")
    (folder / "0002.bin").mkdir()
    (folder / "0003.bin").symlink_to("/dev/zero")
    (folder / "0004.bin").symlink_to(folder / "0004.bin")
    for name in ("x.bin", "-5.bin", "²³.bin", "0006.bin.new", "readme"):
        (folder / name).write_bytes(head(1) + row(1, 1, [ONES]))
    assert read(tmp_path) == []
    assert next_file(tmp_path).name == "0005.bin"


def test_a_job_writes_behind_the_last_one(tmp_path: Path) -> None:
    assert next_file(tmp_path) == tmp_path / "rank_times" / "0001.bin"
    (tmp_path / "rank_times").mkdir()
    (tmp_path / "rank_times" / "12345.bin").touch()
    (tmp_path / "rank_times" / "0002.bin").touch()
    assert next_file(tmp_path).name == "12346.bin"


@pytest.mark.slow
def test_a_thousand_restarts(tmp_path: Path) -> None:
    for job in range(1000):
        write_rank_times(tmp_path, 2, (1 + job, 1 + job, of_ranks(2, job)))
    found = read(tmp_path)
    assert [job.first.item() for job in found] == list(np.arange(1.0, 1001))
