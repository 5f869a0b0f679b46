"""A job that is too large is refused before anything is allocated or written."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpczero import machine
from hpczero.model.families import parameter_count
from hpczero.spec.schema import Model
from tests.support.launch import after_load, hpczero, launch, mpirun

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
@pytest.mark.few(1)
def test_a_model_larger_than_any_machine(folder: Path, ranks: int) -> None:
    settings = ["--set", "model.hidden=100000", "--set", "model.layers=1000"]
    done = launch([*mpirun(ranks), *hpczero("run", "spec.toml", *settings)], 60, folder)
    assert (done.code, after_load(done.out), done.left) == (2, "", [])
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
    """Two ranks of 27 M parameters: 0.9 GB at stage 0, besides what they are before they have a
    model.
    """
    done = launch(
        in_cgroup(cgroup, 1_200_000_000, [*mpirun(2), *hpczero("run", "spec.toml")]), 60, folder
    )
    assert (done.code, done.left) == (2, []), done
    assert f"in the cgroup {cgroup} on " in done.err
    assert "would fit: " in done.err
    assert not (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_states_in_files_do_not_count_in_a_cgroup(folder: Path, cgroup: Path) -> None:
    """8 bytes a parameter, of which the weights and gradients of half precision take 4: with the
    states in memory it is refused, with them in files it trains, to the same numbers.
    """
    size = ("layers=12", "hidden=1024", "heads=16", "vocab=4096", "seq_len=64")
    settings = [f"model.{key}" for key in size]
    settings += ["train.global_batch=1", "checkpoint.every=-1"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    names = {key: int(value) for key, _, value in (one.partition("=") for one in size)}
    parameters = parameter_count(Model(**names))
    command = [*mpirun(1), *hpczero("run", "spec.toml", *arguments)]
    free = launch([*command, "--set", "name=free"], 300, folder)
    assert (free.code, free.left) == (0, []), free
    limit = 8 * parameters
    refused = launch(in_cgroup(cgroup, limit, [*command, "--set", "name=refused"]), 60, folder)
    assert (refused.code, refused.left) == (2, []), refused
    assert f"in the cgroup {cgroup} on " in refused.err
    assert 'zero.offload = "nvme:FOLDER"' in refused.err
    offload = ["--set", f'zero.offload="nvme:{folder}/states"', "--set", "name=offloaded"]
    done = launch(in_cgroup(cgroup, limit, [*command, *offload]), 300, folder)
    assert (done.code, done.left) == (0, []), done
    losses = [
        json.loads((folder / "runs" / name / "summary.json").read_text())["final_loss"]
        for name in ("free", "offloaded")
    ]
    assert losses[0] == losses[1]
    assert os.listdir(folder / "states") == []


@pytest.mark.slow
def test_half_a_billion_parameters_train_at_stage_3(tmp_path: Path) -> None:
    """On 4 ranks of one machine with 24 GB, where stage 0 would need 34 GB and is refused."""
    model = "layers = 26\nhidden = 1280\nheads = 20\nseq_len = 64"
    train = "steps = 2\nglobal_batch = 4\nmicro_batch = 1\neval_batches = 0"
    (tmp_path / "spec.toml").write_text(
        f'[model]\n{model}\n[data]\nsource = "synthetic"\n[train]\n{train}\n[zero]\n'
        f"node_shared = false\n"
    )
    if machine.memory().available < 30e9:
        refused = launch(
            [*mpirun(4), *hpczero("run", "spec.toml", "--set", "zero.stage=0")], 60, tmp_path
        )
        assert refused.code == 2, refused
        assert "would fit: " in refused.err
    done = launch(
        [*mpirun(4), *hpczero("run", "spec.toml", "--set", "zero.stage=3")], 300, tmp_path
    )
    assert (done.code, done.left) == (0, []), done
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["parameters"] > 5e8
    node = summary["memory"]["nodes"][0]
    assert node["measured"] == pytest.approx(node["allocated"], rel=0.02)


GRIDS: list[Any] = [
    pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
    pytest.param(
        {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "schedule": '"gpipe"'},
        marks=pytest.mark.slow,
    ),
    {"pipeline": 4, "schedule": '"interleaved"', "chunks": 2},
]


def trained(
    folder: Path,
    ranks: int,
    stage: int,
    parallel: dict[str, object],
    *settings: str,
    seconds: float = 60,
) -> dict[str, Any]:
    """summary.json's account of memory."""
    (folder / "spec.toml").write_text(SPEC)
    given = [
        f"zero.stage={stage}",
        *(f"parallel.{key}={str(value).lower()}" for key, value in parallel.items()),
        *settings,
    ]
    arguments = [word for setting in given for word in ("--set", setting)]
    done = launch([*mpirun(ranks), *hpczero("run", "spec.toml", *arguments)], seconds, folder)
    assert (done.code, done.left) == (0, []), done
    summary: dict[str, Any] = json.loads((folder / "runs" / "large" / "summary.json").read_text())
    return summary["memory"]


@pytest.mark.parametrize("parallel", GRIDS, ids=str)
@pytest.mark.slow
def test_what_grids_allocate_is_what_was_predicted(
    tmp_path: Path, parallel: dict[str, object]
) -> None:
    """Each rank allocates what was predicted, by kind. There are no data ranks, whose reductions
    may be two at a time or not; what is summed is so large that it goes by messages.
    """
    size = "model.hidden=128", "model.seq_len=1024", "model.vocab=2048"
    memory = trained(tmp_path, 4, 2, parallel, *size, "train.global_batch=8", "train.micro_batch=2")
    for of_rank in memory["ranks"]:
        assert of_rank["allocated"] == {
            kind: of_rank["predicted"][kind] for kind in of_rank["allocated"]
        }
        assert of_rank["allocated"]["pipeline"] > 0
        assert of_rank["allocated"]["communication"] > 0 or "tensor" not in parallel


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_grids_of_two_hundred_million_parameters(
    tmp_path: Path, tensor: int, pipeline: int, stage: int
) -> None:
    """On 4 ranks: what 16 layers take more than two is measured as it was allocated (what a process
    takes whatever its model is compared apart), and each rank's states are the balanced share of
    parameters'.
    """
    model = Model(layers=16, hidden=1024, heads=16, vocab=8192, seq_len=128)
    changes = [
        f"model.{key}={getattr(model, key)}" for key in ("hidden", "heads", "vocab", "seq_len")
    ]
    parallel: dict[str, object] = {"tensor": tensor, "pipeline": pipeline}
    for layers in (2, model.layers):
        (tmp_path / str(layers)).mkdir()
    small = trained(tmp_path / "2", 4, stage, parallel, *changes, "model.layers=2", seconds=400)[
        "nodes"
    ][0]
    memory = trained(tmp_path / "16", 4, stage, parallel, *changes, "model.layers=16", seconds=400)
    node = memory["nodes"][0]
    assert node["measured"] - small["measured"] == pytest.approx(
        node["allocated"] - small["allocated"], rel=0.02
    )
    assert (
        0 <= small["measured"] - small["allocated"] < 4 * 30e6
    )  # code that is loaded when first used, threads
    copies = model.vocab * model.hidden if pipeline > 1 else 0
    share = (parameter_count(model) + copies) / (tensor * pipeline)
    shards = 1 if stage == 0 else 4 // (tensor * pipeline)
    for of_rank in memory["ranks"]:
        assert of_rank["allocated"]["moments"] == pytest.approx(8 * share / shards, rel=0.05)
