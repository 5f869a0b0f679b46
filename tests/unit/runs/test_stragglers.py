"""A slow rank is named with its cause; noise is no slow rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.runs import rank_times
from hpczero.runs.record import read_run
from hpczero.runs.stragglers import Straggler, _more_than_others, stragglers
from tests.support.run_files import ranks_on, write_rank_times, write_run

Change = Callable[[dict[str, float]], None]
EVERY = 10  # steps of a row
STEP = 0.2  # seconds
HOSTS = "n1", "n1", "n2", "\x1b[2Jn2"


def rows(
    ranks: int, count: int, noise: Callable[[], float], changed: dict[int, Change]
) -> list[tuple[int, int, list[dict[str, float]]]]:
    """Make rows in which all ranks end together: who is done earlier waits for the others."""
    made = []
    for at in range(count):
        of_ranks = []
        for rank in range(ranks):
            compute = EVERY * STEP * (0.7 + noise())
            sums = {"compute": compute, "data": 0.001, "processor": compute, "taken": 0.0}
            if rank in changed:
                changed[rank](sums)
            of_ranks.append(sums)
        busy = [one["compute"] + one["data"] + one.get("save", 0.0) for one in of_ranks]
        step = max(busy) + 0.1 * EVERY * STEP
        for one, seconds in zip(of_ranks, busy, strict=True):
            one |= {"step": step, "wait": step - seconds}
        made.append((1 + EVERY * at, EVERY * (at + 1), of_ranks))
    return made


def found_in(
    folder: Path, *of_rows: Any, ranks: int = 4, hosts: tuple[str, ...] = HOSTS
) -> list[Straggler]:
    run = write_run(folder, [], [{"event": "start", "time": 0, "ranks": ranks_on(*hosts[:ranks])}])
    write_rank_times(run, ranks, *of_rows)
    return stragglers(read_run(run), rank_times.read(run))


def computes_more(sums: dict[str, float]) -> None:
    sums["compute"] *= 1.4
    sums["processor"] *= 1.4


def loses_its_processor(sums: dict[str, float]) -> None:
    sums["compute"] += 0.8
    sums["taken"] = 0.75


def stands_still(sums: dict[str, float]) -> None:
    sums["compute"] += 0.8
    sums["taken"] = 0.05


def waits_for_pages(sums: dict[str, float]) -> None:
    sums["compute"] += 0.8
    sums["taken"] = 0.05
    sums["paged"] = 0.75


def waits_for_data(sums: dict[str, float]) -> None:
    sums["data"] += 0.8


def waits_for_a_save(sums: dict[str, float]) -> None:
    sums["save"] = 0.8


CAUSES = {
    "compute": computes_more,
    "taken": loses_its_processor,
    "stopped": stands_still,
    "paged": waits_for_pages,
    "data": waits_for_data,
    "save": waits_for_a_save,
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_slow_rank_is_named_with_its_cause(tmp_path: Path, cause: str, ranks: int) -> None:
    random = np.random.default_rng(ranks)
    made = rows(ranks, 12, lambda: 0.05 * random.random(), {1: CAUSES[cause]})
    (one,) = found_in(tmp_path / "r", *made, ranks=ranks)
    assert (one.rank, one.host, one.cause) == (1, "n1", cause)
    assert one.seconds == pytest.approx(0.08 if cause != "compute" else 0.056, rel=0.25)
    assert (one.first, one.last) == (1, 120)
    assert "Rank 1 on n1 is slow: in steps 1 to 120" in one.words


def test_a_rank_that_waits_for_saves_is_slow_by_its_disk(tmp_path: Path) -> None:
    """One row in three has a save."""
    slow = rows(4, 18, float, {2: waits_for_a_save})
    for first, _, of_ranks in slow:
        for sums in of_ranks:
            sums["save"] = sums.get("save", 0.0) * (0 if first // EVERY % 3 else 3)
    (one,) = found_in(tmp_path / "r", *slow)
    assert (one.rank, one.cause) == (2, "save")
    assert one.seconds == pytest.approx(0.8 / EVERY)
    once = [*slow[:3], *rows(4, 18, float, {})[3:]]
    assert found_in(tmp_path / "s", *once) == [], "a single save says nothing"


def test_other_work_is_no_slowness(tmp_path: Path) -> None:
    """A stage with more layers, and ranks with another sample, take longer; so may their turns."""

    def works(samples: float, stage: int, factor: float) -> Change:
        def change(sums: dict[str, float]) -> None:
            for name in ("compute", "processor"):
                sums[name] *= factor
            sums |= {"samples": samples, "stage": stage, "taken": 0.3 * sums["compute"]}
            sums["compute"] += sums["taken"]

        return change

    stages = {rank: works(2, rank // 2, 1.0 + rank // 2) for rank in range(4)}
    assert found_in(tmp_path / "stages", *rows(4, 12, float, stages)) == []
    samples = {rank: works(1 + rank % 2, 0, 1.0 + rank % 2) for rank in range(3)}
    assert found_in(tmp_path / "samples", *rows(3, 12, float, samples), ranks=3) == []
    alone = {0: works(1, 0, 1.0), 1: works(1, 1, 3.0)}
    assert found_in(tmp_path / "alone", *rows(2, 12, float, alone), ranks=2) == []


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "compute"])
def test_a_stage_of_one_rank_is_slow_by_all_but_its_computing(tmp_path: Path, cause: str) -> None:
    def of_stage(rank: int) -> Change:
        def change(sums: dict[str, float]) -> None:
            sums["stage"] = rank
            if rank == 2:
                CAUSES[cause](sums)

        return change

    changed = {rank: of_stage(rank) for rank in range(3)}
    (one,) = found_in(tmp_path / "r", *rows(3, 12, float, changed), ranks=3)
    assert (one.rank, one.cause) == (2, cause)


@pytest.mark.parametrize("change", [computes_more, stands_still])
def test_helpers_that_lose_their_processors_are_the_cause(tmp_path: Path, change: Change) -> None:
    """The main thread spins, or sleeps, until they have done their part."""

    def helped(sums: dict[str, float]) -> None:
        change(sums)
        sums["helpers"] = 0.7

    (one,) = found_in(tmp_path / "r", *rows(4, 12, float, {2: helped}))
    assert (one.rank, one.cause) == (2, "taken")


def test_the_slowest_of_two_comes_first(tmp_path: Path) -> None:
    made = rows(4, 12, float, {0: waits_for_data, 3: lambda sums: sums.update(data=1.5)})
    first, second = found_in(tmp_path / "r", *made)
    assert (first.rank, second.rank) == (3, 0)
    assert "\x1b" not in first.words
    assert first.host == "\\x1b[2Jn2"


@pytest.mark.parametrize("seed", range(20))
def test_healthy_noise_is_no_slow_rank(tmp_path: Path, seed: int) -> None:
    """Each rank's computing varies; one rank now and then takes twice as long."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 5))

    def noise() -> float:
        return float(0.07 * random.standard_gamma(2.0) / 2)

    def spikes(sums: dict[str, float]) -> None:
        if random.random() < 0.2:
            sums["compute"] *= 2
            sums["taken"] = sums["processor"]

    made = rows(ranks, int(random.integers(10, 60)), noise, {seed % ranks: spikes})
    assert found_in(tmp_path / "r", *made, ranks=ranks) == []


def test_one_rank_is_never_slower_than_others(tmp_path: Path) -> None:
    made = rows(1, 12, float, {0: stands_still})
    assert found_in(tmp_path / "r", *made, ranks=1) == []


def test_too_few_rows_say_nothing(tmp_path: Path) -> None:
    assert found_in(tmp_path / "r", *rows(4, 9, float, {1: stands_still})) == []
    assert found_in(tmp_path / "s") == []


def test_a_rank_that_was_slow_long_ago_is_not_named(tmp_path: Path) -> None:
    made = rows(4, 40, float, {1: stands_still})[:20] + rows(4, 40, float, {})[20:]
    assert found_in(tmp_path / "r", *made) == []


def test_rows_without_seconds(tmp_path: Path) -> None:
    made = [(step, step, [{}, {}]) for step in range(1, 10)]
    assert found_in(tmp_path / "r", *made, ranks=2) == []


def test_hosts_are_those_of_the_job_that_made_the_steps(tmp_path: Path) -> None:
    """The newest job, of as many ranks, has gone on behind them, and made no rows yet."""
    events = [
        {"event": "start", "time": 0, "ranks": ranks_on("a", "b")},
        {"event": "start", "time": 100, "ranks": ranks_on("c", "d", "e")},
        {"event": "start", "time": 200, "ranks": ranks_on("c", "d")},
        {"event": "resume", "time": 201, "step": 130},
    ]
    run = write_run(tmp_path / "r", [], events)
    write_rank_times(run, 2, *rows(2, 12, float, {1: stands_still}))
    (one,) = stragglers(read_run(run), rank_times.read(run))
    assert one.host == "b"


def test_a_run_without_events_has_unknown_hosts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [], [])
    write_rank_times(run, 2, *rows(2, 12, float, {1: stands_still}))
    (one,) = stragglers(read_run(run), rank_times.read(run))
    assert one.host == "an unknown host"


@given(st.integers(2, 9), st.integers(1, 4), st.randoms(use_true_random=False))
def test_more_than_the_median_of_the_others(ranks: int, count: int, random: Any) -> None:
    values = np.array([[random.randrange(5) for _ in range(ranks)] for _ in range(count)], float)
    found = _more_than_others(values)
    for row in range(count):
        for rank in range(ranks):
            others = np.delete(values[row], rank)
            assert found[row, rank] == values[row, rank] - np.median(others)
