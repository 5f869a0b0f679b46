"""`hpczero top` beside a job of two ranks, from outside: ranks that compute, and one that stands
still; nothing is written before somebody looks.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import hpczero, launch, started
from tests.support.run_folders import made
from tests.support.runs import wait_for
from tests.support.tiny_run import SPEC, command

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

ENDLESS = (
    *("--set", "train.steps=10000000", "--set", "train.precision=fp32"),
    *("--set", "parallel.tensor=2", "--set", "train.global_batch=8"),
    *("--set", "schedule.warmup_steps=0", "--set", "comm.timeout_s=3600"),
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    folder = tmp_path_factory.mktemp("top")
    (folder / "spec.toml").write_text(SPEC)
    with started(command(2, *ENDLESS), folder) as process:
        run = folder / "runs" / "tiny"
        wait_for(lambda: steps_of(run) > 5, process, 240)
        yield process, run


Job = tuple[subprocess.Popen[bytes], Path]


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def seen(run: Path) -> dict[str, Any]:
    said = launch(hpczero("top", str(run), "--once", "--json"), 60)
    assert (said.code, said.err, said.left) == (0, "", [])
    facts: dict[str, Any] = json.loads(said.out)
    return facts


def test_ranks_are_seen_from_outside_and_nothing_is_written_unasked(job: Job) -> None:
    process, run = job
    wait_for(lambda: (run / "watch" / "asked").exists(), process)
    steps = steps_of(run)
    wait_for(lambda: steps_of(run) > steps + 20, process)
    assert [path.name for path in (run / "watch").iterdir()] == ["asked"]
    facts = wait_for(lambda: (found := seen(run))["ranks"] and found, process)
    assert facts["state"] == "running"
    assert [one["rank"] for one in facts["ranks"]] == [0, 1]
    usual = {"computing", "waiting", "loading data"}
    assert {one["state"] for one in facts["ranks"]} <= usual, "each of them trains"
    assert all(one["step"] > steps and one["resident"] > 1e7 for one in facts["ranks"])
    assert all(one["axis"] for one in facts["ranks"] if one["state"] == "waiting"), facts["ranks"]
    words = launch(hpczero("top", str(run)), 60)
    assert (words.code, words.err) == (0, ""), "without a terminal it is one frame"
    assert words.out.startswith("tiny: running")
    assert "2 ranks: seen " in words.out


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_also_if_it_was_the_one_to_write(job: Job) -> None:
    process, run = job
    wait_for(lambda: seen(run)["ranks"], process)
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    (ranks,) = (event["ranks"] for event in events if event["event"] == "start")
    os.kill(ranks[0]["pid"], signal.SIGSTOP)
    try:
        facts = wait_for(
            lambda: (found := seen(run)) and found["behind"] and found["ranks"] and found, process
        )
    finally:
        os.kill(ranks[0]["pid"], signal.SIGCONT)
    assert facts["behind"]["ranks"] == [0]
    assert facts["behind"]["words"].startswith("Rank 0 on ")
    assert "its process is stopped" in facts["behind"]["words"]
    first, *others = facts["ranks"]
    assert first["state"] == "stopped"
    assert {one["state"] for one in others} == {"waiting"}
    assert any(one["waits_for"] == [0] for one in others)
    stopped_at = steps_of(run)
    wait_for(lambda: steps_of(run) > stopped_at, process)


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
@pytest.mark.few(1)
def test_on_a_terminal_it_is_drawn_again_until_it_is_ended(key: bytes, tmp_path: Path) -> None:
    """The terminal is then as it was before; Ctrl-Z gives it back for a while."""
    run = made(tmp_path, "seen")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 90, 0, 0))
    before = termios.tcgetattr(theirs)
    shown = start_on(theirs, hpczero("top", str(run), "--every", "0.5"))
    try:
        text = read_until(ours, lambda text: text.count("seen: finished") >= 3)
        os.write(ours, b"\x1a")
        read_until(ours, lambda text: text.endswith(LEFT))
        os.waitid(os.P_PID, shown.pid, os.WSTOPPED)
        assert termios.tcgetattr(theirs) == before
        shown.send_signal(signal.SIGCONT)
        read_until(ours, lambda text: text.count("seen: finished") >= 2)
        os.write(ours, key)
        read_until(ours, lambda text: text.endswith(LEFT))
        assert shown.wait(60) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        shown.kill()
        _, errors = shown.communicate()
        os.close(ours)
        os.close(theirs)
    assert errors == b""
    assert text.startswith("\x1b[?1049h\x1b[?25l\x1b[H")
    frame = text.split("\x1b[H")[1]
    assert all(len(line) < 90 for line in re.split(r"\x1b\[K\r?\n", frame))
    assert "last events" in frame


LEFT = "\x1b[?25h\x1b[?1049l"  # the cursor, and the other screen


def read_until(terminal: int, condition: Callable[[str], bool]) -> str:
    text = b""
    while not condition(text.decode(errors="replace")):
        assert select.select([terminal], [], [], 60)[0], text
        text += os.read(terminal, 65536)
    return text.decode()


def start_on(terminal: int, command: list[str]) -> subprocess.Popen[bytes]:
    """Start it as a shell does, in front of the terminal."""
    return subprocess.Popen(
        command,
        env=os.environ | {"TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
