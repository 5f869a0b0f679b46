"""Seconds of ranks are gathered and written every few steps, and a run goes on without them."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpczero import safe_files
from hpczero.runs import rank_times
from hpczero.train.rank_clock import RankClock


class Ranks:
    """A world of two ranks that take the same time; this one is rank 0."""

    def __init__(self) -> None:
        self.gathered = 0
        self.progress = SimpleNamespace(spun=0.0)

    def gather_objects(self, value: Any) -> list[Any]:
        self.gathered += 1
        return [value, value]


class Clock(RankClock):
    """A clock whose warnings are kept."""

    def __init__(self, run: Path | None, every: int = 3) -> None:
        self.warnings: list[str] = []
        self.world = Ranks()
        super().__init__(self.world, every, run, self.warnings.append)  # type: ignore[arg-type]

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.begin()
            self.step(step, 1.0 + step, wait=0.25, data=0.5)


def test_a_row_every_few_steps_and_a_last_partial_one(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    clock.steps(5, 10)
    clock.saved(0.75)
    clock.steps(11, 11)
    clock.flush()
    clock.flush()
    clock.close()
    (job,) = rank_times.read(tmp_path)
    assert (job.ranks, job.first.tolist(), job.last.tolist()) == (2, [5, 7, 10], [6, 9, 11])
    assert clock.world.gathered == 3
    of_field = {name: values[:, 1].tolist() for name, values in job.of_field.items()}
    assert of_field["step"] == [13, 27, 23]
    assert of_field["wait"] == [0.5, 0.75, 0.5]
    assert of_field["data"] == [1.0, 1.5, 1.0]
    assert of_field["compute"] == [11.5, 24.75, 21.5]
    assert of_field["save"] == [0, 0, 0.75]


def test_the_next_job_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for first in (1, 4):
        clock = Clock(tmp_path)
        clock.steps(first, first + 2)
        clock.close()
    assert sorted(path.name for path in tmp_path.glob("rank_times/*")) == ["0001.bin", "0002.bin"]
    assert [job.first.tolist() for job in rank_times.read(tmp_path)] == [[1], [4]]


def test_processor_time_is_that_of_this_thread_without_its_waits(tmp_path: Path) -> None:
    clock = Clock(tmp_path, every=1)
    clock.begin()
    begin = time.thread_time()
    while time.thread_time() < begin + 0.2:
        pass
    clock.world.progress.spun += 0.15
    clock.step(1, 1.0, 0.0, 0.0)
    (job,) = rank_times.read(tmp_path)
    assert 0.05 <= job.of_field["processor"][0, 0] < 0.15
    assert job.of_field["taken"][0, 0] >= 0


def test_standing_still_while_pages_came_from_a_disk_is_waiting_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = 0
    monkeypatch.setattr("hpczero.train.rank_clock._pages_from_disks", lambda: faults)
    clock = Clock(tmp_path, every=1)
    for step in (1, 2):
        clock.begin()
        faults += step - 1
        clock.step(step, 2.0, wait=0.5, data=0.25)
    none, some = rank_times.read(tmp_path)[0].of_field["paged"][:, 0]
    assert none == 0
    assert some == pytest.approx(1.25, rel=0.1)


def test_helpers_that_wait_for_a_processor_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When one ends, its seconds are gone."""
    waited = 1.0
    monkeypatch.setattr("hpczero.processors.helpers_waited_for_core", lambda: waited)
    clock = Clock(tmp_path)
    for last, waited in ((3, 3.0), (6, 3.0), (9, 2.0), (12, 2.5)):  # noqa: B007
        clock.steps(last - 2, last)
    (job,) = rank_times.read(tmp_path)
    assert job.of_field["helpers"][:, 0].tolist() == [2, 0, 0, 0.5]


def test_what_a_rank_has_to_do_is_in_each_row(tmp_path: Path) -> None:
    world: Any = Ranks()
    clock = RankClock(world, 1, tmp_path, print, stage=2, samples=5)
    for step in (1, 2):
        clock.begin()
        clock.step(step, 1.0, 0.0, 0.0)
    (job,) = rank_times.read(tmp_path)
    assert job.of_field["stage"].tolist() == [[2, 2], [2, 2]]
    assert job.of_field["samples"].tolist() == [[5, 5], [5, 5]]


def a_file(run: Path) -> None:
    (run / "rank_times").write_text("")


def a_link_to_nowhere(run: Path) -> None:
    (run / "rank_times").symlink_to(run / "nowhere")


def a_folder_of_another_user(run: Path) -> None:
    (run / "rank_times").mkdir()
    os.chown(run / "rank_times", 12345, 12345)


@pytest.mark.parametrize("make", [a_file, a_link_to_nowhere, a_folder_of_another_user])
def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    try:
        make(tmp_path)
    except PermissionError:
        pytest.skip("only root can give a folder to another user")
    clock = Clock(tmp_path)
    clock.steps(1, 9)
    clock.close()
    (said,) = clock.warnings
    assert said.startswith(f"times of ranks are not written any more: {tmp_path}/rank_times: ")
    assert "None" not in said
    assert clock.world.gathered == 3, "the other ranks gather on"


def test_a_disk_that_fills_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path)
    clock.steps(1, 3)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safe_files, "write_at", full)
    clock.steps(4, 9)
    monkeypatch.undo()
    clock.steps(10, 12)
    assert [said.rpartition(": ")[2] for said in clock.warnings] == ["No space left on device"]
    assert rank_times.read(tmp_path)[0].last.tolist() == [3]


def test_a_disk_that_takes_a_part_at_a_time_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: write(file, content[:7], at))
    clock = Clock(tmp_path)
    clock.steps(1, 6)
    assert rank_times.read(tmp_path)[0].last.tolist() == [3, 6]


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    """A folder without a spec would be no run any more."""
    run = tmp_path / "run"
    run.mkdir()
    clock = Clock(run)
    shutil.rmtree(run)
    clock.steps(1, 3)
    assert not run.exists()
    assert clock.warnings == []


def test_a_rank_without_the_directory_only_gathers() -> None:
    clock = Clock(None)
    clock.steps(1, 3)
    assert (clock.world.gathered, clock.warnings) == (1, [])
