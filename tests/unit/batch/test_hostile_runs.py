"""Runs whose files a stranger wrote: what `status`, `runs`, `logs` and `cancel` say of them."""

import json
import os
import threading
from pathlib import Path

import pytest

from hpczero.cli import main

CLEAR = "\x1b[2J\x1b]0;owned\x07\r"  # clears the screen, names the window, writes over the line
BOOKS = "batch/20260101T000000-0123456789ab"
SUBMITTED = {
    "id": "x", "scheduler": "slurm", "site": "s", "nodes": 1, "ranks": 1, "walltime": 60,
    "chain": 1, "submitted": "2026", "complete": True, "jobs": ["12"],
}  # fmt: skip
SPEC = "[train]\nsteps = 10\n"
STEP = '{"step": 1, "step_seconds": 1}\n'
VERBS = (["status"], ["status", "--json"], ["runs"], ["logs"], ["logs", "--rank", "0"], ["cancel"])


def started(ranks: object) -> str:
    return json.dumps({"event": "start", "time": "2026-01-01T00:00:00", "ranks": ranks}) + "\n"


def submitted(links: str, **more: str) -> dict[str, str]:
    """The files of a run with a job."""
    books = {"submission.json": json.dumps(SUBMITTED), "links": links, **more}
    return {"spec.toml": SPEC} | {f"{BOOKS}/{name}": text for name, text in books.items()}


CRAFTED = {
    "a step of 400 digits": {"metrics.jsonl": '{"step": 1%s, "step_seconds": 1}\n' % ("0" * 400)},
    "a step that takes for ever": {"metrics.jsonl": '{"step": 1, "step_seconds": 1e308}\n'},
    "a loss of 308 digits": {"metrics.jsonl": STEP[:-2] + ', "loss": 1e308}\n'},
    "infinite steps": {"spec.toml": "[train]\nsteps = inf\n", "metrics.jsonl": STEP},
    "steps of 400 digits": {"spec.toml": f"[train]\nsteps = 1{'0' * 400}\n", "metrics.jsonl": STEP},
    "a step that is no number": {"metrics.jsonl": STEP, "checkpoints/step-²/MANIFEST.json": "x"},
    "a code that is no number": submitted("2026 12 ended ²\n"),
    "a code of 5000 digits": submitted(f"2026 12 ended 1{'0' * 5000}\n"),
    "ranks that are none": {"events.jsonl": started(7)},
    "a rank that is none": {"events.jsonl": started([1])},
    "signs in a log": submitted(
        f"2026 12 ended 1\n2026 12 {CLEAR} 1\n",
        **{"log-12": f"{CLEAR}\nrank 0: {CLEAR}\n", "12.OU": CLEAR, "over": CLEAR},
    ),
    "signs in an event": {
        "events.jsonl": started([{"rank": 0, "pid": CLEAR, "host": CLEAR}]),
        "summary.json": json.dumps({"state": "failed", "reason": CLEAR * 400}),
    },
}


def put(run: Path, files: dict[str, str]) -> None:
    for name, text in ({"spec.toml": SPEC, "events.jsonl": started([])} | files).items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)


@pytest.mark.parametrize("crafted", CRAFTED)
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.few(30)
def test_nothing_of_it_fails_or_reaches_the_terminal(
    crafted: str,
    verb: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path / "run", CRAFTED[crafted])
    assert main([verb[0], str(tmp_path / "run"), *verb[1:]]) in (0, 1, 2)
    said = capfd.readouterr()
    for text in (said.out, said.err):
        assert all(one.isprintable() or one in "\n\t" for one in text)
        assert "--json" in verb or not any(len(word) > 500 for word in text.split())


def test_a_log_keeps_its_lines_tabs_and_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("hpczero.commands.logs._PIECE", 3)  # in the middle of a letter
    monkeypatch.setattr("hpczero.commands.logs.still_living", lambda run: False)
    log = "step 1\tloss 2,5\nGröße: 三 €\n" + "x" * 5000 + "\n"
    put(tmp_path / "run", submitted("2026 12 ended 0\n", **{"log-12": log}))
    assert main(["logs", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().out == log
    assert main(["logs", "-f", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().out == log


def test_the_last_lines_of_a_followed_job_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It writes them, and ends, while the scheduler is asked whether it lives."""
    log = tmp_path / "run" / BOOKS / "log-12"

    def ends(run: Path) -> bool:
        with log.open("a") as file:
            file.write("the last line\n")
        return False

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("hpczero.commands.logs.still_living", ends)
    put(tmp_path / "run", submitted("2026 12 ended 0\n", **{"log-12": "the first line\n"}))
    assert main(["logs", "-f", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().out == "the first line\nthe last line\n"


def test_a_pipe_as_a_log_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path / "run", submitted("2026 12 ended 0\n"))
    os.mkfifo(tmp_path / "run" / BOOKS / "log-12")
    codes: list[int] = []
    look = threading.Thread(
        target=lambda: codes.append(main(["logs", str(tmp_path / "run")])), daemon=True
    )
    look.start()
    look.join(10)
    assert codes == [2]


def test_a_profile_of_a_site_does_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    evil = json.dumps(CLEAR)  # TOML writes a text the same way
    (tmp_path / "sites" / "mine.toml").write_text(
        f"description = {evil}\ncharge_unit = {evil}\n"
        f"[partitions.cpu]\ncharge = 1\nlimits = [{{nodes = 1, walltime = '1h', queue = {evil}}}]\n"
    )
    for words in (["site", "list"], ["site", "show", "mine/cpu"]):
        assert main(words) == 0
        said = capfd.readouterr().out
        assert "owned" in said
        assert all(one.isprintable() or one == "\n" for one in said)
