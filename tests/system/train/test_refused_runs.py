"""Runs that are refused: wrong input gives one message, and nothing is written or changed."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launch import REMOVED, after_load, hpczero, launch, mpirun
from tests.support.tiny_run import train

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")


TRIES = """
import contextlib, io, json, sys
from mpi4py import MPI  # started here: every command finds it running, and leaves it so
from hpczero.cli import main

def end_of(arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["run", "spec.toml", *arguments])
    return code, out.getvalue(), err.getvalue()

ends = MPI.COMM_WORLD.gather([end_of(arguments) for arguments in json.loads(sys.argv[1])])
if ends:
    print(json.dumps(ends))
MPI.Finalize()
"""


MUON = ("--set", "optimizer.name=muon")
OWN = """
from torch import nn

def model(sizes):
    module = nn.Sequential()
    module.add_module("body", nn.Linear(4, 4, bias=False))
    module.add_module("head", nn.Linear(4, 4, bias=False))
    return module
"""

MISTAKES = {
    "unknown key": (["--set", "train.stepz=3"], "train.steps"),
    "wrong type": (["--set", "train.steps=many"], "many"),
    "impossible grid": (["--set", "parallel.tensor=3"], "3"),
    "one head, two ranks": (["--set", "parallel.tensor=2", "--set", "model.heads=1"], "heads"),
    "missing data": (["--set", "data.source=nowhere.h5"], "nowhere.h5"),
    "truncated data": (
        ["--set", "data.source=truncated.h5", "--set", "train.eval_batches=0"],
        "truncated.h5",
    ),
    "foreign data": (["--set", "data.source=foreign.h5"], "foreign.h5"),
    "vocabulary": (
        [
            "--set",
            "data.source=corpus.h5",
            "--set",
            "model.vocab=100",
            "--set",
            "train.eval_batches=0",
        ],
        "model.vocab",
    ),
    "unwritable output": (["--set", "output=/proc/nowhere"], "/proc/nowhere"),
    "pattern of no parameter": (
        [*MUON, "--set", 'optimizer.not_muon=["heads.*"]'],
        "'heads.*' matches no parameter; the nearest names are head.",
    ),
    "pattern of no parameter of an own module": (
        [
            *MUON,
            "--set",
            "model.family=own:model",
            "--set",
            'optimizer.not_muon=["*embed*", "heads.*"]',
        ],
        "'heads.*' matches no parameter; the nearest names are head.weight, body.weight",
    ),
    "resume of nothing": (["--resume"], "no run"),
}


def written(folder: Path) -> list[Path]:
    """Return all files and folders but for Python's own, of modules that it imported."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


@pytest.fixture
def token_files(folder: Path) -> None:
    (folder / "text.txt").write_text("to be or not to be\n" * 500)
    (folder / "own.py").write_text(OWN)
    assert launch(hpczero("data", "build", "-o", "corpus.h5", "text.txt"), 60, folder).code == 0
    whole = (folder / "corpus.h5").read_bytes()
    (folder / "truncated.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "foreign.h5").write_bytes(b"\x89PNG not a token file at all" * 100)


@pytest.mark.usefixtures("token_files")
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.few(1)
def test_wrong_input_is_one_message_and_nothing_written(folder: Path, ranks: int) -> None:
    """One launch tries all mistakes, because starting takes longest; the next test checks how a
    refused command ends its launch.
    """
    (folder / "tries.py").write_text(TRIES)
    before = written(folder)
    tries = json.dumps([arguments for arguments, _ in MISTAKES.values()])
    done = launch(
        [*(mpirun(ranks) if ranks else []), sys.executable, "tries.py", tries], 120, folder
    )
    assert (done.code, done.err, done.left) == (0, "", [])
    ends = json.loads(done.out)
    assert len(ends) == max(1, ranks)
    for (name, (_, expected)), *ends_of_ranks in zip(MISTAKES.items(), *ends, strict=True):
        assert [(code, after_load(out)) for code, out, _ in ends_of_ranks] == [(2, "")] * len(
            ends
        ), (name, ends_of_ranks)
        said = REMOVED.sub("", "".join(err for _, _, err in ends_of_ranks))
        assert said.count("hpczero: ") == 1, (name, said)
        assert expected in said
        assert "Traceback" not in said
    assert written(folder) == before


@pytest.mark.slow
def test_the_directory_of_another_run_is_left_alone(finished: Path) -> None:
    summary = (finished / "runs" / "tiny" / "summary.json").read_bytes()
    done = train(finished, 2, "--set", "model.hidden=48", "--set", "seed=2")
    assert (done.code, done.err.count("hpczero: ")) == (2, 1), done
    assert "model.hidden: 32 there, 48 now" in done.err
    assert "seed: 1 there, 2 now" in done.err
    assert (finished / "runs" / "tiny" / "summary.json").read_bytes() == summary


def test_a_folder_that_is_no_run_directory_is_left_alone(folder: Path) -> None:
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "thesis.tex").write_text("precious")
    done = train(folder, 0)
    assert done.code == 2
    assert "is no run directory" in done.err
    assert [path.name for path in (folder / "runs" / "tiny").iterdir()] == ["thesis.tex"]


def test_one_rank_of_several_by_accident(folder: Path) -> None:
    """The launcher started several processes, and with another MPI than its own none of them
    finds the others.
    """
    done = train(folder, 0, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="4")
    assert done.code == 2, done
    assert "4" in done.err
    assert not (folder / "runs").exists()
