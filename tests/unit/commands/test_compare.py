"""`hpczero compare`: what it prints, its files, what it refuses, and runs of strangers."""

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpczero.cli import main
from tests.support.json_values import json_values
from tests.support.launch import BLOCKER
from tests.support.made_runs import Made, line, steady

CLEAR = "\x1b[2J\x1b]0;owned\x07"
FILES = ("spec.toml", "metrics.jsonl", "events.jsonl", "summary.json", "memory.jsonl")
FIGURES = ("loss", "tokens", "step_seconds", "validation_loss", "validation_standard_error")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two learning rates of two seeds each."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    for name, loss, lr in (("a-1", 2.0, 0.1), ("a-2", 2.2, 0.1), ("b-1", 2.5, 1), ("b-2", 2.71, 1)):
        steady(loss, int(name[-1]), lr).write(tmp_path / "runs" / name)
    return tmp_path


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the words of the lines of a table, without its head."""
    lines = text.partition(heading)[2].partition("\n\n")[0].splitlines()
    return [one.split() for one in lines[2:]]


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_a_folder_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    said = compared(capsys, "runs")
    assert said.startswith("4 runs in 2 groups, by validation loss\n")
    assert rows(said, "what differs in their specs") == [["a", "1-2", "0.1"], ["b", "1-2", "1.0"]]
    figures = rows(said, "figures at their ends")
    assert figures[0][:6] == ["a", "finished", "2.1000", "±", "0.1414", "2.0000–2.2000"]
    assert figures[1][:3] == ["b", "finished", "2.6050"]
    losses = rows(said, "training loss over tokens")
    assert losses[0][0] == "a"
    assert [one for one in losses[0][1:] if one != "±"][-2:] == ["2.125", "0.141"]
    assert "loss over steps" not in said
    assert "best: a, by 0.5050 of validation loss over b:\n" in said
    assert "more than the noise: its 95 % interval is 0.4415 to 0.5685" in said


@pytest.mark.usefixtures("folder")
def test_every_run_by_itself_over_one_axis(capsys: pytest.CaptureFixture[str]) -> None:
    said = compared(capsys, "--each", "--over", "steps", "runs/a-1", "a-2")
    assert said.startswith("2 runs in 2 groups")
    assert "over tokens" not in said
    assert "validation loss over steps" in said
    assert "What other seeds would change cannot be told" in said


def test_where_tokens_are_not_known_losses_are_over_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop of one's own may log the loss alone."""
    for name, lr in (("a", "0.1"), ("b", "0.2")):
        lines = [{"step": step, "loss": 3.0} for step in range(1, 9)]
        Made(lines, {"optimizer.lr": lr}, summary={}).write(tmp_path / name)
    said = compared(capsys, str(tmp_path))
    assert "training loss over steps (mean of the last 1 step before each point)" in said
    assert "over tokens" not in said
    over = compared(capsys, str(tmp_path), "--over", "tokens")
    assert "no losses over tokens: no run has them" in over


@pytest.mark.usefixtures("folder")
def test_a_narrow_terminal_has_tables_in_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = compared(capsys, "runs").partition("\n\nbest:")[0]
    tables = [one for one in said.splitlines() if one.startswith("  ")]
    assert len(tables) > 20
    assert not [one for one in tables if len(one) > 60 or not one.strip()]


def test_as_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(compared(capsys, "runs", "--json", "--points", "10"))
    assert [one["name"] for one in found["groups"]] == ["a", "b"]
    assert found["groups"][0]["validation_loss"]["mean"] == pytest.approx(2.1)
    assert found["differences"][0]["key"] == "optimizer.lr"
    assert found["tables"].keys() == {"steps", "tokens", "seconds", "clock"}
    assert found["best"]["group"] == "a"
    assert found["best"]["margin"] == pytest.approx(0.505)
    assert found["best"]["more_than_noise"] is True
    one = found["runs"][0]
    assert one["path"] == str(folder / "runs" / "a-1")
    assert len(one["curves"]["training"]["steps"]) == 10
    assert one["curves"]["validation"] == {
        "steps": [40], "tokens": [4000], "seconds": [40], "clock": [40], "loss": [2.0],
        "low": [2.0], "high": [2.0], "standard_error": [0.01],
    }  # fmt: skip


def test_as_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The points' steps, each with its own number of lines, have the mean of all losses."""
    said = compared(capsys, "runs", "--csv", "-", "--points", "10")
    compared(capsys, "runs", "--csv", "out.csv", "--points", "10")
    assert (folder / "out.csv").read_text() == said
    lines = list(csv.DictReader(io.StringIO(said)))
    assert {(one["run"], one["group"], one["seed"]) for one in lines} == {
        ("a-1", "a", "1"), ("a-2", "a", "2"), ("b-1", "b", "1"), ("b-2", "b", "2"),
    }  # fmt: skip
    training = [one for one in lines if one["run"] == "b-1" and one["figure"] == "training"]
    assert len(training) == 10
    assert min(float(one["low"]) for one in training) == pytest.approx(2.5 + 1 / 40)
    assert max(float(one["high"]) for one in training) == pytest.approx(3.5)
    assert all(float(one["tokens"]) == 100 * float(one["steps"]) for one in training)
    whole = compared(capsys, "runs", "--csv", "-")
    every = [one for one in csv.DictReader(io.StringIO(whole)) if one["run"] == "b-1"]
    assert [float(one["loss"]) for one in every[:-1]] == [2.5 + 1 / step for step in range(1, 41)]
    assert (every[-1]["figure"], every[-1]["standard_error"]) == ("validation", "0.01")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs/a-1"], "compare wants two runs or more, and there is only"),
        (["runs/a-1", "a-1"], "runs/a-1 is named twice: leave one of them out"),
        (["runs", "runs/link"], "is named twice"),
        (["runs/a-1", "nowhere"], "nowhere: there is no such run"),
        (["runs/a-1", "empty"], "empty is no run"),
        (["runs", "--points", "1"], "--points 1: must be from 2 to 200,000"),
        (["runs", "--csv", "nowhere/out.csv"], "nowhere/out.csv"),
        (["runs", "--csv", "-", "--json"], "--json and --csv - both write to stdout"),
    ],
)
def test_what_it_refuses(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    (folder / "runs" / "link").symlink_to("a-2")
    assert main(["compare", *arguments]) == 2
    wrong = capsys.readouterr()
    assert said in wrong.err
    assert wrong.out == ""


def test_on_a_login_node(folder: Path) -> None:
    program = BLOCKER.format(blocked=["torch", "mpi4py", "numba"])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", "runs"],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "best: a" in done.stdout


def test_names_that_a_terminal_or_a_spreadsheet_acts_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Made([line(1, 3.0)], {CLEAR.encode("unicode_escape").decode(): "1"})
    problem.write(folder / "bad" / f"=1+1{CLEAR}")
    steady(2.0).write(folder / "bad" / f"@{CLEAR}\n")
    for more in ([], ["--json"], ["--csv", "-"]):
        assert main(["compare", "bad", *more]) == 0
        said = capsys.readouterr()
        assert all(one.isprintable() or one in "\n" for one in said.out + said.err)
    names = [row[0] for row in csv.reader(io.StringIO(said.out))][1:]
    assert all(name.startswith(("'=", "'@")) for name in names)


damaged_lines = st.lists(
    st.dictionaries(st.sampled_from(FIGURES), json_values | st.floats(0, 9), max_size=5), max_size=6
)


def strict(value: str) -> Any:
    raise AssertionError(f"{value} is no JSON")


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    of_runs=st.lists(damaged_lines, min_size=2, max_size=4),
    name=st.sampled_from(FILES),
    content=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()),
    each=st.booleans(),
)
def test_no_file_of_a_run_makes_it_fail(
    of_runs: list[list[dict[str, Any]]],
    name: str,
    content: bytes,
    each: bool,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines of any values, and one file of anything."""
    folder = tmp_path_factory.mktemp("fuzzed")
    for seed, lines in enumerate(of_runs):
        made = [{**line(step, 3.0), **values} for step, values in enumerate(lines, 1)]
        Made(made, seed=seed).write(folder / f"run-{seed}")
    (folder / "run-1" / name).write_bytes(content)
    arguments = ["compare", *map(str, sorted(folder.iterdir())), *(["--each"] if each else [])]
    assert main(arguments) == 0
    assert main([*arguments, "--csv", "-"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out, parse_constant=strict)
    assert len(found["runs"]) == len(of_runs)
    assert all(one.isprintable() or one == "\n" for one in said.err)
    margin = (found["best"] or {}).get("margin", 0.0)
    assert margin >= 0
    assert math.isfinite(margin)
