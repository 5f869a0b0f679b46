"""No rank of the recorded healthy runs is called slow, at no moment of them (healthy/README.md)."""

from pathlib import Path

import pytest

from hpczero.runs import rank_times
from hpczero.runs.rank_times import RankTimes
from hpczero.runs.record import Run, read_run
from hpczero.runs.stragglers import stragglers
from tests.support.run_files import ranks_on, write_run

HEALTHY = sorted(Path(__file__).with_name("healthy").glob("*.bin"))
NAMED = 0.4  # of a step: of most runs and ranks half of that is enough
_LEAST_ROWS = 25


def run_of(folder: Path, recorded: Path) -> tuple[Run, RankTimes]:
    run = write_run(folder / "run", [], [{"event": "start", "time": 0, "ranks": ranks_on("n")}])
    (run / rank_times.FOLDER).mkdir()
    (run / rank_times.FOLDER / "0001.bin").write_bytes(recorded.read_bytes())
    (times,) = rank_times.read(run)
    return read_run(run), times


def test_there_are_twenty() -> None:
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("recorded", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_raises_no_alarm(recorded: Path, tmp_path: Path) -> None:
    run, times = run_of(tmp_path, recorded)
    assert len(times.first) >= _LEAST_ROWS
    for rows in range(1, len(times.first) + 1):
        assert stragglers(run, [times.part(slice(rows))]) == [], rows


def slowed(times: RankTimes, rank: int, part: str, share: float) -> RankTimes:
    """Let a rank take longer by this share of the new step, for which all others wait."""
    fields = {name: values.copy() for name, values in times.of_field.items()}
    mean = fields["step"].mean(axis=1)
    more = mean * share / (1 - share)
    fields["step"] += more[:, None]
    for other in range(times.ranks):
        own = "compute" if part == "stopped" else part
        fields[own if other == rank else "wait"][:, other] += more
    return RankTimes(times.first, times.last, times.ranks, fields)


@pytest.mark.parametrize("part", ["stopped", "data"])
@pytest.mark.parametrize("recorded", HEALTHY, ids=lambda path: path.stem)
def test_any_rank_for_which_others_wait_long_is_named_all_the_same(
    recorded: Path, tmp_path: Path, part: str
) -> None:
    """On their busy machine a rank that stands still may seem to have lost its processor."""
    run, times = run_of(tmp_path, recorded)
    for rank in range(times.ranks):
        found = stragglers(run, [slowed(times, rank, part, NAMED)])
        assert [one.rank for one in found] == [rank]
        assert found[0].cause in (["data"] if part == "data" else ["stopped", "taken"])
