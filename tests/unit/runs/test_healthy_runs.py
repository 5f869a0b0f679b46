"""No rank of the recorded healthy runs is called slow, at no moment of them (healthy/README.md)."""

from pathlib import Path

import pytest

from hpczero.runs import rank_times
from hpczero.runs.record import read_run
from hpczero.runs.stragglers import stragglers
from tests.support.run_files import ranks_on, write_run

HEALTHY = sorted(Path(__file__).with_name("healthy").glob("*.bin"))
_LEAST_ROWS = 25


def test_there_are_twenty() -> None:
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("recorded", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_raises_no_alarm(recorded: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [{"event": "start", "time": 0, "ranks": ranks_on("n")}])
    (run / rank_times.FOLDER).mkdir()
    (run / rank_times.FOLDER / "0001.bin").write_bytes(recorded.read_bytes())
    (times,) = rank_times.read(run)
    assert len(times.first) >= _LEAST_ROWS
    for rows in range(1, len(times.first) + 1):
        assert stragglers(read_run(run), [times.part(slice(rows))]) == [], rows
