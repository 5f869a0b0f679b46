"""A save whose step has a checkpoint already: it takes the other's place when it is whole."""

import os
from pathlib import Path

import pytest

from hpczero.checkpoint import directory, manifest


def whole(folder: Path, text: str) -> None:
    (folder / manifest.NAME).write_text(text)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("left", ["nothing", "a save", "a link", "a pipe"])
def test_the_old_one_is_there_until_the_new_one_is_whole(
    tmp_path: Path, at_once: bool, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an earlier save, or somebody, has left beside it."""
    if not at_once:
        monkeypatch.setattr(directory, "exchange", lambda one, other: False)
    checkpoints = tmp_path / "checkpoints"
    first = directory.begin(checkpoints, 4)
    whole(first, "first")
    directory.put_in_place(first)
    beside = checkpoints / "step-00000004.new"
    if left == "a save":
        beside.mkdir()
    elif left == "a link":
        beside.symlink_to(tmp_path)
    elif left == "a pipe":
        os.mkfifo(beside)
    second = directory.begin(checkpoints, 4)
    assert second == beside
    assert list(second.iterdir()) == []
    assert (first / manifest.NAME).read_text() == "first"
    assert directory.steps(checkpoints) == {4: first}
    whole(second, "second")
    directory.put_in_place(second)
    assert directory.steps(checkpoints) == {4: directory.in_place(second)}
    assert (first / manifest.NAME).read_text() == "second"
    assert "first" in [
        (path / manifest.NAME).read_text()
        for path in directory.aside(checkpoints)
        if (path / manifest.NAME).exists()
    ]
    assert not os.path.lexists(beside)


def test_what_was_left_half_way_is_cleared_when_a_run_begins(tmp_path: Path) -> None:
    directory_of_run = tmp_path / "checkpoints"
    whole(directory.begin(directory_of_run, 4), "first")
    directory.begin(directory_of_run, 4)
    directory.make_way(directory_of_run, 4, directory_of_run / "step-00000004")
    assert sorted(path.name for path in directory_of_run.iterdir()) == ["step-00000004"]
