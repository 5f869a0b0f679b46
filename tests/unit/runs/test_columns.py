"""Lines of figures as columns, whatever the file holds."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.runs import columns
from hpczero.runs.columns import TIME, Columns, read, seconds_of


def of_lines(folder: Path, *lines: object) -> Columns:
    """Read a file of these lines; bytes are written as they are."""
    path = folder / "metrics.jsonl"
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return read(path)


def test_a_column_has_nan_where_a_line_lacks_the_figure(tmp_path: Path) -> None:
    found = of_lines(
        tmp_path,
        {"step": 1, "loss": 4, "time": "2026-01-01T00:00:00+00:00"},
        {"step": 2, "loss": 3.5, "validation_loss": 3.0, "skipped": True},
    )
    assert found["step"].tolist() == [1, 2]
    assert found["loss"].tolist() == [4, 3.5]
    assert np.isnan(found["validation_loss"]).tolist() == [True, False]
    assert np.isnan(found["skipped"]).tolist() == [True, False]
    assert found[TIME][0] == 1767225600
    assert np.isnan(found[TIME][1])
    assert np.isnan(found["no such figure"]).tolist() == [True, True]
    assert "no such figure" not in found


def test_tables_in_lines_are_columns_of_their_own(tmp_path: Path) -> None:
    found = of_lines(
        tmp_path,
        {"step": 1, "losses": {"web": 2.0, "books": 3.0, "deeper": {"x": 1}}},
        {"step": 2, "losses": {"web": 1.0}},
    )
    inside = found.inside("losses")
    assert set(inside) == {"web", "books"}
    assert inside["web"].tolist() == [2, 1]


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "lo',
        b"",
        b"\0\0\0\0\0\0",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b'"step"',
        b"{}",
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 1.5}',
        b'{"step": NaN}',
        b'{"step": "2"}',
        b'{"step": {"step": 2}}',
        b'{"step": 1e999}',
        b'{"step": ' + b"9" * 40 + b"}",
        b'{"step": ' + b"9" * 5000 + b"}",
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
    ],
    ids=lambda line: ascii(line[:20]),
)
def test_a_line_that_is_no_step_is_left_out_and_counted(tmp_path: Path, line: bytes) -> None:
    found = of_lines(tmp_path, {"step": 1, "loss": 2}, line, {"step": 3, "loss": 1})
    assert found["loss"].tolist() == [2, 1]
    assert found.damaged == 1


@pytest.mark.parametrize("value", ["x\x1b[31m", None, [1], {"a": [2]}, 10**400])
def test_a_value_that_is_no_number_is_nan(tmp_path: Path, value: object) -> None:
    found = of_lines(tmp_path, {"step": 1, "loss": value}, {"step": 2, "loss": 1.0})
    assert np.isnan(found["loss"]).tolist() == [True, False]
    assert found.damaged == 0


def test_steps_that_come_again_count_as_their_last_line_says(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": at} for at, step in enumerate([1, 2, 3, 4, 2, 3, 3, 5])]
    found = of_lines(tmp_path, *lines)
    assert found["step"].tolist() == [1, 2, 3, 5]
    assert found["loss"].tolist() == [0, 4, 6, 7]


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 9)), max_size=40))
def test_steps_grow_and_each_has_its_last_line(lines: list[tuple[int, float]]) -> None:
    kept: dict[int, float] = {}
    for step, loss in lines:
        kept = {earlier: value for earlier, value in kept.items() if earlier < step} | {step: loss}
    steps, losses = (np.array(values, float) for values in ([*kept], [*kept.values()]))
    every = {"step": [step for step, _ in lines], "loss": [loss for _, loss in lines]}
    found = columns._in_order({name: np.array(values, float) for name, values in every.items()})
    assert np.array_equal(found["step"], steps)
    assert np.array_equal(found["loss"], losses)


def test_columns_that_begin_late_are_as_long_as_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_BLOCK", 3)
    lines = [{"step": step} | ({"late": step} if step > 7 else {}) for step in range(1, 11)]
    found = of_lines(tmp_path, *lines)
    assert len(found) == 10
    assert np.isnan(found["late"]).tolist() == [True] * 7 + [False] * 3
    assert found[TIME].shape == (10,)


def test_names_without_number_take_no_more_than_some_columns(tmp_path: Path) -> None:
    """Each line has names of its own: columns of all would be as many as the lines, squared."""
    lines = [
        {"step": step, "time": "2026-01-01"} | {f"{step}/{at}\x1b": 1 for at in range(100)}
        for step in range(3000)
    ]
    found = of_lines(tmp_path, *lines)
    assert len(found) == 3000
    assert len(found.of_name) <= columns._MOST_COLUMNS + 1
    assert not np.isnan(found[TIME]).any()


def test_a_line_without_end_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_LONGEST", 1000)
    found = of_lines(tmp_path, {"step": 1}, b"x" * 5000, {"step": 2})
    assert found["step"].tolist() == [1, 2]
    assert found.damaged >= 5


def test_what_is_no_plain_file_has_no_lines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "empty").touch()
    names = "pipe", "folder", "circle", "lost", "device", "empty", "none", "empty/below"
    for name in names:
        found = read(tmp_path / name)
        assert (len(found), found.damaged) == (0, 0), name
        assert len(found["loss"]) == 0


@pytest.mark.parametrize(
    "moment", [None, 5, "", "yesterday", "0001-01-01", "9999-12-31T23:59:59-23:59", "\x1b[31m", []]
)
def test_what_is_no_moment_is_nan(moment: object) -> None:
    assert not abs(seconds_of(moment)) < 6e10


def test_a_moment_is_its_seconds() -> None:
    assert seconds_of("1970-01-01T00:01:00.500+00:00") == 60.5
