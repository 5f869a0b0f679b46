"""A run that finds other tokens at the path of its corpus."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import h5py
import pytest

from hpczero.train.resume import identity_of, resumed_identity
from tests.support.launch import Finished, hpczero, launch

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

from hpczero_kernels.random import RULE  # needs torch

SPEC = """
name = "tiny"
[model]
layers = 1
hidden = 16
heads = 2
seq_len = 16
[data]
source = "corpus.h5"
[train]
steps = 4
global_batch = 2
micro_batch = 2
eval_batches = 0
[checkpoint]
every = 2
"""


def build(folder: Path, text: str) -> None:
    (folder / "corpus.h5").unlink(missing_ok=True)
    (folder / "text.txt").write_text(text)
    command = [sys.executable, "-m", "hpczero", "data", "build", "-o", "corpus.h5", "text.txt"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def run(folder: Path, *more: str) -> Finished:
    return launch(hpczero("run", "spec.toml", *more), 200, folder)


@pytest.mark.slow
def test_another_corpus_at_the_same_path_is_refused_on_resume(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    text = "".join(f"line {number}\n" for number in range(2000))
    build(tmp_path, text)
    assert run(tmp_path, "--set", "train.steps=2").code == 0
    [index] = tmp_path.glob("runs/tiny/checkpoints/*/index.h5")
    build(tmp_path, text[::-1])
    refused = run(tmp_path)
    assert refused.code == 2, refused.err
    assert "is a checkpoint of a run on other data: data.fingerprint was" in refused.err
    with h5py.File(index) as file:
        identity = json.loads(file.attrs["identity"])
    assert identity["data.fingerprint"] in refused.err
    assert identity["model.initial_values"] == str(RULE)
    build(tmp_path, text)
    assert run(tmp_path).code == 0


def test_a_run_keeps_the_rule_by_which_its_initial_values_were_made() -> None:
    data = {"data.fingerprint": "a"}
    of_rule = partial(identity_of, data)
    assert resumed_identity({"model.initial_values": "7"}, of_rule(9)) == of_rule(7)
    assert resumed_identity({}, of_rule(9)) == of_rule(1)  # from before it was said
    assert resumed_identity({"model.initial_values": "7"}, of_rule()) == of_rule() == data
