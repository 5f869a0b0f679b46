"""Files of runs as training writes them, made by hand."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero.runs import rank_times

BEGAN = 1_800_000_000.0  # seconds since 1970


def moment(seconds: float) -> str:
    """Return a time in ISO's form, so many seconds after the run began."""
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat()


def write_run(
    folder: Path, metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> Path:
    """Write a run; `time` of a line is in seconds after the run began."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics", metrics), ("events", events)):
        timed = [
            {**line, "time": moment(line["time"])} if "time" in line else line for line in lines
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in timed))
    (folder / "spec.toml").write_text("[train]\nsteps = 123\n")
    return folder


def ranks_on(*hosts: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]


def write_rank_times(
    run: Path, ranks: int, *rows: tuple[int, int, Sequence[Mapping[str, float]]]
) -> Path:
    """Write a job's file: rows of (first step, last step, each rank's sums by field)."""
    path = rank_times.next_file(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = rank_times.head(ranks)
    for first, last, of_ranks in rows:
        sums = [[of_rank.get(name, 0.0) for name in rank_times.FIELDS] for of_rank in of_ranks]
        content += rank_times.row(first, last, sums)
    path.write_bytes(content)
    return path
