"""Runs as their folders show them, while they go on and afterwards."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Process = subprocess.Popen[bytes]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(condition: Callable[[], Any], process: Process, limit: float = 240) -> Any:
    """Wait until it is true, while the process goes on; return what it then is.

    Where kernels are compiled first, a step may be minutes away.
    """
    begun = time.monotonic()
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - begun < limit, "it did not come to that"
        time.sleep(0.05)
    return found


def steps_done(folder: Path, name: str = "tiny") -> int:
    path = folder / "runs" / name / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_ranks(pids: Iterable[int]) -> None:
    """Kill them; mpirun may end the others as soon as the first one, which is there, is dead."""
    first, *others = pids
    os.kill(first, signal.SIGKILL)
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def our_segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("hpczero*")}


def by_hand(run: Path, *, ended: str = "", saved: int = 0) -> Path:
    """A run that was started with mpirun; `ended`: the state in its summary."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "spec.toml").write_text("[train]\nsteps = 100\n")
    now = datetime.now(UTC).isoformat()
    (run / "events.jsonl").write_text(json.dumps({"event": "start", "time": now}) + "\n")
    line = {"step": 40, "loss": 4.6, "step_seconds": 2.0, "tokens_per_second": 50.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    if ended:
        (run / "summary.json").write_text(json.dumps({"state": ended, "reason": "SIGTERM"}))
    if saved:
        (run / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{saved:08d}" / "MANIFEST.json").touch()
    return run
