"""Values that nobody writes by accident: one line that a terminal can show, and an exit code."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint.shard_file import Damaged
from hpczero.cli import main
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import STALE_AFTER, Holder, RunLock
from tests.support.checkpoints import Grid, Wanted, make, parameters, seal

LONG = "n" * 300
CLEAR = "\x1b[2J\x1b]0;owned\x07"  # clears the screen, and names the window
WANTED = Wanted(layers=parameters(a=(3, 7)), spec={"name": "crafted"})


def fit(said: str) -> None:
    """One line that the terminal does nothing about."""
    assert said.count("\n") == 1
    assert all(one.isprintable() for one in said[:-1])
    assert not any(len(word) > 500 for word in said.split())


@pytest.mark.parametrize(
    "command",
    [
        ["data", "build", "-o", f"{LONG}.h5", "text.txt"],
        ["data", "build", "-o", "x.h5", LONG],
        ["data", "show", LONG],
        ["data", "verify", LONG],
        ["ckpt", "ls", LONG],
        ["ckpt", "show", LONG],
        ["ckpt", "verify", LONG],
        ["ckpt", "prune", LONG, "--keep", "1"],
        ["ckpt", "export", "step", LONG],
        ["ckpt", "export", "step", f"{LONG}.safetensors"],
        ["ckpt", "export", "step", "out", "--shard-size", "9" * 400],
        ["ckpt", "export", "step", "out", "--shard-size", "1" + "0" * 300],
        ["status", LONG],
        ["runs", LONG],
        ["compare", LONG, f"{LONG}x"],
        ["check", LONG],
    ],
)
def test_a_long_name_or_number_is_an_error_in_one_line(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    if "step" in command:
        make(tmp_path, Grid(), WANTED).rename("step")
    assert main(command) in (1, 2)
    fit(capsys.readouterr().err)


@pytest.mark.parametrize("key", [CLEAR, "k" * 5000, "\u202e\r\b"])
def test_a_key_of_a_manifest_or_of_a_text_file_does_not_reach_the_terminal(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path, Grid(), WANTED)
    seal(made, lambda content: content["grid"].update({key: 2}))
    for verb in ("ls", "show"):
        assert main(["ckpt", verb, str(tmp_path if verb == "ls" else made)]) == 0
        said = capsys.readouterr().out
        assert all(one.isprintable() or one == "\n" for one in said)
        assert max(map(len, said.split("\n"))) < 1000
    seal(made, lambda content: content.update({key: 2}))
    assert main(["ckpt", "show", str(made)]) == 1
    fit(capsys.readouterr().err)
    (tmp_path / "lines.jsonl").write_text(json.dumps({key: 1}) + "\n")
    (tmp_path / f"{key[:9]}.txt").write_bytes(b"caf\xe9")
    assert main(["data", "build", "-o", str(tmp_path / "x.h5"), str(tmp_path)]) == 2
    fit(capsys.readouterr().err)
    (tmp_path / "lines.jsonl").unlink()
    assert main(["data", "build", "-o", str(tmp_path / "x.h5"), str(tmp_path)]) == 0
    assert all(one.isprintable() or one == "\n" for one in capsys.readouterr().out)


@pytest.mark.parametrize("kind", [HpczeroError, InputError, Damaged])
def test_an_error_is_fit_for_a_terminal_whatever_it_is_made_of(kind: type[HpczeroError]) -> None:
    said = str(kind(f"first {CLEAR}\nsecond {'x' * 9000} third"))
    assert said.split("\n")[0] == "first \\x1b[2J\\x1b]0;owned\\x07"
    assert len(said) < 600
    assert said.endswith("… third")


def record(**changed: Any) -> str:
    own = vars(Holder.this_process()) | {"kernel": "another computer"} | changed
    return json.dumps(own)


WRONG = [
    *({"pid": "12"}, {"pid": -1}, {"pid": 2**70}, {"pid": True}, {"pid": None}, {"pid": 1.5}),
    *({"process_start": "now"}, {"process_start": None}, {"process_start": 1e308}),
    *(
        {"host": 3},
        {"host": ["x"]},
        {"kernel": {}},
        {"since": "x" * 10_000},
        {"job": 7},
        {"user": None},
    ),
]


@pytest.mark.parametrize("changed", WRONG)
def test_a_lock_record_of_wrong_types_is_none(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.machine.is_local_file_system", lambda path: False)
    monkeypatch.setattr("hpczero.lock.SETTLE", 0.01)
    assert Holder.parse(record()) is not None
    assert Holder.parse(record(**changed)) is None
    (tmp_path / "lock").write_text(record(**changed))
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("text", ["[" * 60_000, '{"a": NaN}', "null", "[1]", "\x00" * 100])
def test_a_lock_record_that_is_none_is_none(text: str) -> None:
    assert Holder.parse(text) is None


@pytest.mark.parametrize(
    ("ahead", "lives"),
    [(-STALE_AFTER * 2, False), (-10, True), (10, True), (86_400, False), (10**9, False)],
)
def test_a_beat_from_the_future_is_none(
    ahead: float, lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.machine.is_local_file_system", lambda path: False)
    monkeypatch.setattr("hpczero.lock.SETTLE", 0.01)
    path = tmp_path / "lock"
    path.write_text(record(host=CLEAR))
    os.utime(path, (time.time() + ahead,) * 2)
    if lives:
        with pytest.raises(InputError, match="is in use by process") as raised:
            RunLock(tmp_path).take()
        fit(f"{raised.value}\n")
    else:
        with RunLock(tmp_path):
            pass
