"""A job that is too large is refused before anything is allocated or written."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpczero import machine
from tests.launch import hpczero, launch, mpirun

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
name = "large"
[model]
layers = 8
hidden = 512
heads = 8
vocab = 2048
[data]
source = "synthetic"
[train]
steps = 2
global_batch = 4
micro_batch = 1
eval_batches = 0
[zero]
stage = 0
node_shared = false
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_larger_than_any_machine(folder: Path, ranks: int) -> None:
    settings = ["--set", "model.hidden=100000", "--set", "model.layers=1000"]
    done = launch([*mpirun(ranks), *hpczero("run", "spec.toml", *settings)], 60, folder)
    assert (done.code, done.out, done.left) == (2, "", [])
    assert done.err.count("hpczero: ") == 1, done.err
    assert f"({ranks} rank" in done.err
    assert "zero.stage = 0 needs" in done.err
    assert "GB are available" in done.err
    assert [path.name for path in folder.iterdir()] == ["spec.toml"]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """An empty cgroup below this process's own, in which memory can be limited."""
    parents = [folder for _, folder in machine._cgroup_folders("memory", machine.ROOT)]
    own = parents[0] / f"hpczero-test-{os.getpid()}" if parents else Path("/nowhere")
    try:
        own.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    try:
        if not any((own / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            pytest.skip("memory cannot be limited in a cgroup made here")
        yield own
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                own.rmdir()
                break
            time.sleep(0.1)


def in_cgroup(cgroup: Path, limit: int, command: list[str]) -> list[str]:
    name = "memory.max" if (cgroup / "memory.max").exists() else "memory.limit_in_bytes"
    (cgroup / name).write_text(str(limit))
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(cgroup), *command]


def test_a_cgroup_that_is_too_small(folder: Path, cgroup: Path) -> None:
    """Two ranks of 27 M parameters: 0.9 GB at stage 0, besides what they are before they have a model."""
    done = launch(in_cgroup(cgroup, 1_200_000_000, [*mpirun(2), *hpczero("run", "spec.toml")]), 60, folder)
    assert (done.code, done.left) == (2, []), done
    assert f"in the cgroup {cgroup} on " in done.err
    assert "would fit: " in done.err
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_half_a_billion_parameters_train_at_stage_3(tmp_path: Path) -> None:
    """On 4 ranks of one machine with 24 GB, where stage 0 would need 34 GB and is refused."""
    model = "layers = 26\nhidden = 1280\nheads = 20\nseq_len = 64"
    train = "steps = 2\nglobal_batch = 4\nmicro_batch = 1\neval_batches = 0"
    (tmp_path / "spec.toml").write_text(f'[model]\n{model}\n[data]\nsource = "synthetic"\n[train]\n{train}\n[zero]\nnode_shared = false\n')
    if machine.memory().available < 30e9:
        refused = launch([*mpirun(4), *hpczero("run", "spec.toml", "--set", "zero.stage=0")], 60, tmp_path)
        assert refused.code == 2, refused
        assert "would fit: " in refused.err
    done = launch([*mpirun(4), *hpczero("run", "spec.toml", "--set", "zero.stage=3")], 300, tmp_path)
    assert (done.code, done.left) == (0, []), done
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["parameters"] > 5e8
    node = summary["memory"]["nodes"][0]
    assert node["measured"] == pytest.approx(node["allocated"], rel=0.02)
