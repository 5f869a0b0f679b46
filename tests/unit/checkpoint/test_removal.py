"""Removal of checkpoints: never through a link, and never a copy under another name."""

import os
import shutil
from pathlib import Path

import pytest

from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.listing import listed
from hpczero.cli import main
from hpczero.errors import InputError
from tests.support.checkpoints import Wanted, make


def made(checkpoints: Path, *steps: int) -> dict[int, Path]:
    return {step: make(checkpoints, None, Wanted(step=step)) for step in steps}


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def states(checkpoints: Path) -> dict[str, str]:
    return {one.path.name: one.state for one in listed(checkpoints)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """The folder of checkpoints of a run."""
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A save in progress of another run."""
    path = tmp_path / "other" / "checkpoints" / "step-00000007"
    path.mkdir(parents=True)
    (path / "shard-00000.h5.new").write_text("being written")
    return path


@pytest.mark.parametrize("copy", ["step-00000500", "step-000000003", "step-00000002"])
def test_prune_keeps_the_newest_whatever_name_a_copy_of_it_has(
    checkpoints: Path, copy: str
) -> None:
    of_step = made(checkpoints, 1, 3)
    shutil.copytree(of_step[3], checkpoints / copy)
    assert main(["ckpt", "prune", str(checkpoints.parent), "--keep", "1"]) == 0
    assert names(checkpoints) == sorted(["step-00000003", copy])


def test_what_does_not_fit_its_name_is_a_state_of_its_own(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_step = made(checkpoints, 3)
    odd = ["step-00000500", "step-000000003", "step-00000009.20260101T000000"]
    for name in odd:
        shutil.copytree(of_step[3], checkpoints / name)
    (checkpoints / "step-000000004").mkdir()
    odd.append("step-000000004")
    assert states(checkpoints) == {"step-00000003": "complete"} | dict.fromkeys(odd, "misnamed")
    wanted = ["--keep", "1", "--incomplete", "--set-aside", "--damaged"]
    assert main(["ckpt", "prune", str(checkpoints.parent), *wanted]) == 0
    assert set(names(checkpoints)) == {"step-00000003", *odd}
    said = capsys.readouterr().out
    assert all(f"left {checkpoints / name} (misnamed" in said for name in odd)


def test_a_run_keeps_its_own_beside_copies_under_other_names(checkpoints: Path) -> None:
    of_step = made(checkpoints, 1, 2, 4)
    shutil.copytree(of_step[4], checkpoints / "step-00000003")
    old = [path for path, _ in directory.outdated(checkpoints, 4, keep=2, keep_every=0)]
    assert old == [of_step[1]]


def test_the_newest_of_a_run_is_one_that_fits_its_name(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_step = made(checkpoints, 1, 3)
    shutil.copytree(of_step[1], checkpoints / "step-00000500")
    assert main(["ckpt", "show", str(checkpoints.parent)]) == 0
    assert "step-00000003: step 3" in capsys.readouterr().out
    assert main(["ckpt", "show", str(checkpoints.parent), "--step", "500"]) == 2
    assert "is of another step" in capsys.readouterr().err


def test_its_name_is_durably_gone_before_its_data(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut there is a whole checkpoint, or none."""
    made(checkpoints, 3)
    (one,) = listed(checkpoints)
    synced: list[set[str]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(set(os.listdir(file))))
    files = {path.name for path in one.path.iterdir()}
    directory.remove(one.path, one.identity)
    assert synced == [files - {manifest.NAME}]
    assert not names(checkpoints)


def test_prune_does_not_remove_through_a_link(checkpoints: Path, other: Path) -> None:
    made(checkpoints, 1, 2)
    complete = made(other.parent, 1)[1]
    (checkpoints / "step-00000007").symlink_to(other)
    (checkpoints / "step-00000000").symlink_to(complete)
    assert states(checkpoints)["step-00000007"] == states(checkpoints)["step-00000000"] == "linked"
    wanted = ["--keep", "1", "--incomplete", "--damaged", "--set-aside"]
    assert main(["ckpt", "prune", str(checkpoints.parent), *wanted]) == 0
    assert names(checkpoints) == ["step-00000000", "step-00000002", "step-00000007"]
    assert names(other) == ["shard-00000.h5.new"]
    assert (complete / "MANIFEST.json").exists()


def test_a_run_that_starts_does_not_remove_through_a_link(checkpoints: Path, other: Path) -> None:
    made(checkpoints, 1)
    (checkpoints / "step-00000007").symlink_to(other)
    assert directory.make_way(checkpoints, 1, checkpoints / "step-00000001") == []
    assert names(other) == ["shard-00000.h5.new"]


def test_a_run_sets_aside_what_others_have_left_from_its_first_step_on(checkpoints: Path) -> None:
    made(checkpoints, 1, 2, 3)
    assert len(directory.make_way(checkpoints, 2, None)) == 2
    assert [one.step for one in listed(checkpoints) if one.state == "complete"] == [1]


def test_a_save_does_not_remove_through_a_link_that_has_its_name(
    checkpoints: Path, other: Path
) -> None:
    made(checkpoints, 1)
    (checkpoints / "step-00000007").symlink_to(other)
    path = directory.begin(checkpoints, 7)
    assert not path.is_symlink()
    assert names(path) == []
    assert names(other) == ["shard-00000.h5.new"]


def test_retention_does_not_remove_through_a_link(checkpoints: Path, tmp_path: Path) -> None:
    archived = made(tmp_path / "archive", 1)[1]
    made(checkpoints, 2, 3)
    (checkpoints / "step-00000001").symlink_to(archived)
    old = [path.name for path, _ in directory.outdated(checkpoints, 3, keep=1, keep_every=0)]
    assert old == ["step-00000002"]


def test_a_folder_that_took_the_name_meanwhile_is_not_removed(checkpoints: Path) -> None:
    of_step = made(checkpoints, 1, 2)
    looked_at = next(one for one in listed(checkpoints) if one.step == 1)
    of_step[1].rename(checkpoints / "elsewhere")
    shutil.copytree(of_step[2], of_step[1])
    with pytest.raises(OSError, match="another folder has got its name"):
        directory.remove(looked_at.path, looked_at.identity)
    of_step[2].rename(checkpoints / "away")
    of_step[2].symlink_to(checkpoints / "away")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        directory.remove(of_step[2])
    assert (of_step[1] / "MANIFEST.json").exists()
    assert (checkpoints / "away" / "MANIFEST.json").exists()


def test_checkpoints_that_are_another_runs_by_a_link_are_refused(
    checkpoints: Path, other: Path
) -> None:
    (other.parent.parent / "spec.toml").touch()
    checkpoints.parent.mkdir()
    checkpoints.symlink_to(other.parent)
    words = "leads to the checkpoints of another run.*remove the link"
    with pytest.raises(InputError, match=words):
        directory.begin(checkpoints, 7)
    with pytest.raises(InputError, match=words):
        directory.make_way(checkpoints, 0, None)
    assert names(other) == ["shard-00000.h5.new"]


def test_checkpoints_may_lie_on_another_disk_by_a_link(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    checkpoints.parent.mkdir()
    checkpoints.symlink_to(tmp_path / "scratch")
    made(checkpoints, 1, 2)
    assert main(["ckpt", "prune", str(checkpoints.parent), "--keep", "1"]) == 0
    assert names(tmp_path / "scratch") == ["step-00000002"]
