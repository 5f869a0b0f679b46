"""`hpczero ckpt` on what `hpczero run` saved, and `hpczero run` on what `hpczero ckpt import`
made.
"""

import json
from pathlib import Path

import pytest

from tests.support.launch import hpczero, launch, mpirun

SPEC = """
name = "first"
output = "{output}"
[model]
layers = 2
hidden = 36
heads = 3
seq_len = 32
[data]
source = "synthetic"
[train]
steps = 4
global_batch = 8
micro_batch = 2
precision = "fp32"
[parallel]
tensor = 2
[checkpoint]
every = 2
"""
STANDING_STILL = [
    "--set",
    "parallel.tensor=1",
    "--set",
    "name=second",
    "--set",
    "train.steps=1",
    "--set",
    "optimizer.lr=1e-30",
]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("output")
    (folder / "spec.toml").write_text(SPEC.format(output=folder))
    done = launch([*mpirun(2), *hpczero("run", str(folder / "spec.toml"))], seconds=200)
    assert done.code == 0, done.err
    return folder


def ckpt(*arguments: object, ranks: int = 0, code: int = 0) -> str:
    done = launch(
        [*(mpirun(ranks) if ranks else []), *hpczero("ckpt", *map(str, arguments))], seconds=100
    )
    assert done.code == code, done.err
    assert not done.left
    return done.out


@pytest.mark.slow
def test_what_a_run_saved_is_listed_and_good(output: Path, everything: bool) -> None:
    found = json.loads(ckpt("ls", output, "--json"))
    assert [(one["step"], one["state"], one["ranks"]) for one in found] == [
        (2, "complete", 2),
        (4, "complete", 2),
    ]
    alone = ckpt("verify", *(one["path"] for one in found))
    assert alone.count("good") == 2
    if everything:
        assert ckpt("verify", *(one["path"] for one in found), ranks=2) == alone


@pytest.mark.slow
def test_ranks_share_the_verification_and_find_the_same(output: Path, tmp_path: Path) -> None:
    made = output / "first" / "checkpoints" / "step-00000002"
    raw = {path.name: path.read_bytes() for path in made.iterdir()}
    (tmp_path / made.name).mkdir()
    for name, content in raw.items():
        changed = bytearray(content)
        for place in (8 << 10, len(changed) // 2) if name.startswith("shard") else ():
            changed[place] ^= 4
        (tmp_path / made.name / name).write_bytes(changed)
    alone = json.loads(ckpt("verify", tmp_path / made.name, "--json", code=1))
    assert len(alone[0]["damages"]) >= 2
    assert json.loads(ckpt("verify", tmp_path / made.name, "--json", ranks=2, code=1)) == alone


def test_a_run_begins_with_the_weights_that_were_imported(output: Path) -> None:
    spec, weights = output / "spec.toml", output / "weights.safetensors"
    ckpt("export", output / "first", weights)
    ckpt("import", weights, "--spec", spec, *STANDING_STILL)
    done = launch([*mpirun(2), *hpczero("run", str(spec), *STANDING_STILL)], seconds=200)
    assert done.code == 0, done.err
    assert "resume" in done.out
    assert [one["step"] for one in json.loads(ckpt("ls", output / "second", "--json"))] == [0, 1]
    assert "equal" in ckpt(
        "diff", output / "first", output / "second", "--slot", "model", "--tolerance", "1e-6"
    )
