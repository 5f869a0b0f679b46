"""`hpczero run` by what is not the default: another carrier of the collectives, a GPU that is
not there; and nothing of CUDA without one.
"""

import json
import sys
from pathlib import Path

import pytest

from hpczero import machine
from tests.support.launch import hpczero, launch, mpirun

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

WITHOUT_GPU = pytest.mark.skipif(machine.gpu_driver(), reason="there is a GPU's driver")
SPEC = """
name = "tiny"
[model]
layers = 2
hidden = 32
heads = 4
seq_len = 16
[data]
source = "synthetic"
[train]
steps = 4
global_batch = 5
micro_batch = 2
eval_batches = 2
[zero]
node_shared = false
[checkpoint]
every = 2
"""
NOTHING_OF_CUDA = """
import sys
import torch
before = set(sys.modules)  # PyTorch looks for packages of CUDA itself
import hpczero.cli
code = hpczero.cli.main(["run", "spec.toml", "--progress", "lines"])
packages = {"numba_cuda", "cuda", "cupy", "nvidia", "pynvml"}
new = set(sys.modules) - before
found = [name for name in new if name.split(".")[0] in packages]
found += [name for name in new if name.startswith("numba.cuda.cudadrv")]
assert not found, found
sys.exit(code)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_gloo_gives_the_losses_of_mpi_to_the_bit(folder: Path, stage: int) -> None:
    for backend in ("mpi", "gloo"):
        settings = [
            f"--set=comm.backend={backend}",
            f"--set=name={backend}",
            f"--set=zero.stage={stage}",
        ]
        ended = launch(
            [*mpirun(3), *hpczero("run", "spec.toml", "--progress", "lines", *settings)],
            120,
            folder,
        )
        assert (ended.code, ended.err) == (0, ""), ended
        assert ("collectives=gloo" in ended.out) == (backend == "gloo")
    assert losses(folder / "runs/gloo") == losses(folder / "runs/mpi")


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "train.device=cuda",
            'hpczero: train.device = "cuda": 2 of 2 ranks see no GPU: rank 0 on ',
        ),
        (
            "comm.backend=nccl",
            (
                'hpczero: comm.backend = "nccl": it carries tensors on cuda, and these are on '
                "cpu (train.device)"
            ),
        ),
    ],
)
@pytest.mark.few(1)
def test_what_needs_a_gpu_is_refused_where_there_is_none(
    folder: Path, setting: str, said: str
) -> None:
    ended = launch([*mpirun(2), *hpczero("run", "spec.toml", "--set", setting)], 60, folder)
    assert ended.code == 2, ended
    assert said in ended.err
    assert not (folder / "runs").exists()


@WITHOUT_GPU
@pytest.mark.slow
def test_nothing_of_cuda_is_imported_and_nothing_is_warned_of(folder: Path) -> None:
    ended = launch([sys.executable, "-W", "default", "-c", NOTHING_OF_CUDA], 60, folder)
    assert (ended.code, ended.err) == (0, ""), ended
