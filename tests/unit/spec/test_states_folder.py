"""The folder of zero.offload, looked at before anything is built."""

import os
from pathlib import Path

import pytest

from hpczero import env, machine
from hpczero.spec import states_folder
from hpczero.spec.schema import Zero


def of(folder: Path | str) -> Zero:
    return Zero(offload=f"nvme:{folder}")


@pytest.mark.parametrize("given", ["$A_PLACE/states", "${A_PLACE}/states", "/data/$A_PLACE"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_named(
    monkeypatch: pytest.MonkeyPatch, given: str, value: str | None
) -> None:
    """It is no folder with that name, nor the root."""
    monkeypatch.delenv("A_PLACE", raising=False)
    if value is not None:
        monkeypatch.setenv("A_PLACE", value)
    said = states_folder.problem(of(given))
    assert said.startswith(f'zero.offload = "nvme:{given}": $A_PLACE is not set')
    assert not states_folder.warning(of(given), "here")


def test_every_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PLACE", "there")
    assert env.unset_variables("~/$A_PLACE/${NO_PLACE}/$NOWHERE") == ["NO_PLACE", "NOWHERE"]
    assert not env.unset_variables("~/states")


def test_a_folder_that_there_is_or_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at only."""
    monkeypatch.setenv("A_PLACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in ("$A_PLACE", "states", "some/more/states", "link/states", "link"):
        assert not states_folder.problem(of(folder)), folder
    assert os.listdir(tmp_path) == ["link"]


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop is no folder" in states_folder.problem(of(tmp_path / "loop"))
    assert not states_folder.warning(of(tmp_path / "loop"), "here")


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for name in ("file", "nowhere"):
        for folder in (tmp_path / name, tmp_path / name / "states"):
            said = states_folder.problem(of(folder))
            assert said.endswith(f": {tmp_path / name} is no folder: name another one")


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refused(path: Path, mode: int, **how: bool) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(os, "access", refused)
    assert f"nothing can be written in {tmp_path}: name" in states_folder.problem(of(tmp_path))
    said = states_folder.problem(of(tmp_path / "new" / "states"))
    assert f"nothing can be written in {tmp_path}, where it would have to be made" in said
    assert asked == [tmp_path, tmp_path]


@pytest.mark.skipif(os.geteuid() > 0, reason="only root gives files away")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, -1)
    assert "is a folder that belongs to user 12345" in states_folder.problem(of(theirs))


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "ext4"])
def test_memory_is_no_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(machine, "file_system_type", lambda path: kind)
    said = states_folder.warning(of(tmp_path), "on n1")
    if kind == "ext4":
        assert not said
    else:
        assert said.startswith(f"zero.offload: {tmp_path} is in memory on n1 ({kind})")
    assert not states_folder.warning(Zero(), "on n1")
