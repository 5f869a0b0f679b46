"""`hpczero status RUN --json` says of time and energy what the run's files say."""

import json
from pathlib import Path

import pytest

from hpczero.cli import main
from hpczero.runs.goodput import goodput_in
from tests.support import run_folders


def test_time_and_energy_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folders.made(tmp_path)
    line = {"began": run_folders.moment(0), "time": run_folders.moment(9), "nodes_read": 1}
    (run / "energy.jsonl").write_text(
        json.dumps(line | {"processors": 90.0, "seconds": 9.0}) + "\n"
    )
    assert main(["status", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    booked = goodput_in(run)
    assert booked
    assert said["goodput"] == booked.as_data()
    assert said["goodput"]["computing"] > 0
    assert said["energy"]["joules"] == 90.0
    assert said["energy"]["joules_per_1000_tokens"] == pytest.approx(90_000 / booked.tokens)
