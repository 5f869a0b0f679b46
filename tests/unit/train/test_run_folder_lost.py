"""Folders of runs that were removed, cut short or never completed: one command goes on."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hpczero.checkpoint import directory as folder
from hpczero.cli import main
from hpczero.errors import HpczeroError, InputError
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from hpczero.train import run_directory
from hpczero.train.run_directory import RunDirectory
from tests.support.checkpoints import Wanted, make
from tests.support.runs import lines_of


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return Spec(name="run", output=str(tmp_path))


def claimed(spec: Spec, fresh: bool = False) -> RunDirectory:
    return RunDirectory.claim(spec, resume=False, fresh=fresh)


@pytest.fixture
def killed_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, which ended between the checkpoint's manifest and the run's spec."""
    (tmp_path / "spec.toml").write_text('name = "run"\n[model]\nfamily = "some.module:factory"\n')
    save_file({"w": np.ones(1000, np.float32)}, tmp_path / "in.safetensors")
    spec, run = str(tmp_path / "spec.toml"), str(tmp_path / "run")
    command = ["ckpt", "import", str(tmp_path / "in.safetensors"), "--spec", spec, "-o", run]

    def killed(path: Path) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpczero.commands.export_import.written_durably", killed)
        assert main(command) == 1
    assert not (tmp_path / "run" / "spec.toml").exists()
    assert list(folder.steps(tmp_path / "run" / "checkpoints")) == [0]
    return command


def test_an_import_that_was_killed_before_its_end_goes_on(
    killed_import: list[str], tmp_path: Path
) -> None:
    assert main(killed_import) == 0
    assert (tmp_path / "run" / "spec.toml").exists()
    assert list(folder.steps(tmp_path / "run" / "checkpoints")) == [0]
    assert main(killed_import) == 2  # now it is a run's


def test_a_run_goes_on_where_an_import_was_killed_before_its_end(
    killed_import: list[str], tmp_path: Path
) -> None:
    spec = load(tmp_path / "spec.toml", [f'output="{tmp_path}"']).spec
    run_directory.refuse_another(spec)
    other = spec.model_copy(update={"seed": 7})
    with pytest.raises(InputError, match=r"(?s)holds another run.*seed"):
        claimed(other)
    assert not (tmp_path / "run" / "spec.toml").exists()
    claimed(spec).close()
    assert (tmp_path / "run" / "spec.toml").exists()


def test_a_run_does_not_begin_where_an_import_was_killed_while_it_wrote(
    spec: Spec, tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000000").mkdir(parents=True)
    with pytest.raises(InputError, match=r"give the same import again, or .*--fresh"):
        claimed(spec)
    claimed(spec, fresh=True).close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("events.jsonl", "memory.jsonl", "metrics.jsonl", "spec.toml"),
    ]
    assert len(list(tmp_path.glob("run.*/checkpoints/step-00000000"))) == 1


def test_what_is_no_runs_is_left_alone(spec: Spec, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    for fresh in (False, True):
        with pytest.raises(InputError, match="is no run directory"):
            claimed(spec, fresh)
    assert (tmp_path / "run" / "thesis.tex").exists()


@pytest.mark.parametrize("saved_since", [False, True])
def test_a_folder_that_is_removed_under_a_run_is_made_again(
    spec: Spec, tmp_path: Path, saved_since: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, run = claimed(spec), tmp_path / "run"
    directory.metrics({"step": 1})
    shutil.rmtree(run)
    if saved_since:
        written = spec.model_dump(mode="json")
        make(run / "checkpoints", None, Wanted(spec=written, step=1))
    directory.event("save", step=1)
    directory.metrics({"step": 2})
    directory.close()
    assert "was removed under this run" in capsys.readouterr().err
    assert [line["event"] for line in lines_of(run / "events.jsonl")] == ["WARN", "save"]
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == [2]
    claimed(spec).close()


def test_a_folder_that_cannot_be_made_again_is_one_error(spec: Spec, tmp_path: Path) -> None:
    directory = claimed(spec)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").touch()
    with pytest.raises(HpczeroError, match=r"exists and is no folder"):
        directory.event("save", step=1)
    directory.close()


def test_a_run_whose_folder_has_checkpoints_only_goes_on(spec: Spec, tmp_path: Path) -> None:
    make(tmp_path / "run" / "checkpoints", None, Wanted(spec=spec.model_dump(mode="json"), step=3))
    with pytest.raises(InputError, match=r"(?s)holds another run.*seed"):
        claimed(spec.model_copy(update={"seed": 7}))
    claimed(spec).close()
    claimed(spec).close()


def test_steps_that_a_power_cut_took_are_said(spec: Spec, tmp_path: Path) -> None:
    directory = claimed(spec)
    for step in (1, 2, 3):
        directory.metrics({"step": step})
    directory.close()
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo\0\0\0\0')
    directory = claimed(spec)
    assert directory.missing_before(4) == ""
    assert "lacks steps 4 to 6, which the checkpoint has" in directory.missing_before(7)
    directory.keep_metrics_before(7)
    directory.metrics({"step": 7})
    directory.close()
    assert [line["step"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 7]


def test_an_event_does_not_continue_a_line_that_was_cut_short(spec: Spec, tmp_path: Path) -> None:
    claimed(spec).close()
    events = tmp_path / "run" / "events.jsonl"
    events.write_bytes(b'{"event": "start"}\n{"event": "sa\0\0')
    directory = claimed(spec)
    directory.event("resume", step=3)
    directory.close()
    assert json.loads(events.read_text().splitlines()[-1])["event"] == "resume"


def test_sync_brings_all_lines_to_the_disk(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    directory = claimed(spec)
    names = lambda number: Path(os.readlink(f"/proc/self/fd/{number}")).name  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(names(number)))
    directory.metrics({"step": 1})
    directory.sync()
    directory.close()
    assert synced == ["metrics.jsonl", "memory.jsonl", "events.jsonl"]
