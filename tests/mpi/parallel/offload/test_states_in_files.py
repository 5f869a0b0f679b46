"""States in files: the same numbers to the bit, on every grid, and what is read and written."""

import errno
import os
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import safe_files
from hpczero.comm.world import World
from hpczero.parallel.offload import offloaded_adamw
from hpczero.parallel.offload.state_file import StorageFailed
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.weights import DTYPES
from hpczero.spec.schema import Memory, Spec
from tests.support.covering import Case, covering
from tests.support.grids import bitwise, factors, on_grid, possible, spec_of
from tests.support.updates import GROUPS, assert_equal, by_hpczero
from tests.support.updates import spec_of as spec_of_update
from tests.support.user_modules import made

pytestmark = pytest.mark.mpi
SMALL = 1024  # elements of a piece: several to a unit


def in_files(spec: Spec, folder: str) -> Spec:
    zero = spec.zero.model_copy(update={"offload": f"nvme:{folder}"})
    return spec.model_copy(update={"zero": zero})


def with_memory(spec: Spec, **how: Any) -> Spec:
    return spec.model_copy(update={"memory": Memory(**how)})


def selection(ranks: int, everything: bool = False) -> list[Case]:
    chosen = factors(ranks) | {"piece": [SMALL, offloaded_adamw.PIECE], "optimizer": ["adamw"]}
    chosen["family"] = ["gpt", "relative"]
    chosen |= {"recompute": ["none", "selective", "block"], "partition": [False, True]}
    chosen |= {"rows": [0, 7]}  # of the loss by pieces, which rounds otherwise
    return covering(chosen, (), possible)


@pytest.mark.cases(of=selection)
@pytest.mark.usual(2)
@pytest.mark.few(2)
def test_it_changes_no_number(
    world: World, case: Case, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activations that are computed again, and cut, as well."""
    spec = with_memory(spec_of(case), loss_chunk=case["rows"])
    kept = on_grid(world, case, spec)
    monkeypatch.setattr(offloaded_adamw, "PIECE", case["piece"])
    how = {"recompute": case["recompute"], "partition_activations": case["partition"]}
    away = with_memory(in_files(spec, shared_folder), loss_chunk=case["rows"], **how)
    assert bitwise(kept, on_grid(world, case, away))
    assert not os.listdir(shared_folder)  # files without names


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adagrad], ids=["AdamW", "of PyTorch"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.few(1)
def test_modules_of_ones_own(world: World, optimizer: Any, stage: int, shared_folder: str) -> None:
    """With groups, parameters that steps leave out, and an average; an optimizer of PyTorch
    reads and writes through the map.
    """
    spec = spec_of_update(stage, False, 1e-2)
    wanted = {"optimizer": optimizer, "average": 0.9}
    wanted |= {} if optimizer else {"groups": GROUPS}
    kept = by_hpczero(world, spec, **wanted)
    spec["zero"] |= {"offload": f"nvme:{shared_folder}"}
    assert_equal(kept, by_hpczero(world, spec, **wanted))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_average_follows_behind(
    world: World, precision: str, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece, while the step does: nobody waits for it, and it is the same to the bit."""
    monkeypatch.setattr(offloaded_adamw, "PIECE", SMALL)
    x = torch.ones(2, 50, dtype=DTYPES[precision])

    def averages(offload: str) -> dict[str, torch.Tensor]:
        spec = spec_of_update(1, False, 1e-2, precision)
        spec["zero"] |= {"offload": offload}
        module = made(lambda: nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)))
        with hpczero.initialize(module, spec, world, average=0.9) as engine:
            for _ in range(3):
                engine.backward(engine(x).float().square().sum())
                engine.engine.finish_step(1e-2)
                assert engine.engine.update.is_behind == (offload != "none")
            with engine.averaged():
                return engine.full_state_dict()

    kept, found = averages("none"), averages(f"nvme:{shared_folder}")
    assert_equal(([], kept), ([], found))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_reads_and_writes_each_state_once(
    world: World, precision: str, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []
    init = Engine.__init__

    def noted(engine: Engine, *arguments: Any, **named: Any) -> None:
        init(engine, *arguments, **named)
        engines.append(engine)

    monkeypatch.setattr(Engine, "__init__", noted)
    case = {"grid": (1, 1), "schedule": "1f1b", "sequence": False, "stage": 1, "shared": False}
    case |= {"precision": precision, "tied": True, "dropout": 0.0, "batch": (world.size, 1)}
    spec = spec_of(case, steps=5)
    on_grid(world, case, in_files(spec, shared_folder))
    (engine,) = engines
    file = engine.file
    assert file
    states = 2 + (precision == "bf16")
    pages = sum(-(-4 * unit.layout.shard_size // 4096) for unit in engine.units)
    assert file.bytes_read == file.bytes_written == 5 * states * pages * 4096
    assert file.size == states * pages * 4096


@pytest.mark.ranks(1)
@pytest.mark.parametrize("failing", ["read", "write"])
def test_storage_that_fails_ends_the_run(
    world: World, failing: str, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the path and the bytes."""
    name = f"{failing}_at"
    intact = getattr(safe_files, name)
    calls = []

    def broken(file: int, content: memoryview, place: int) -> int:
        calls.append(place)
        if len(calls) > 40:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(intact(file, content, place) or 0)

    monkeypatch.setattr(safe_files, name, broken)
    case = {"grid": (1, 1), "schedule": "1f1b", "sequence": False, "stage": 1, "shared": False}
    case |= {"precision": "bf16", "tied": True, "dropout": 0.0, "batch": (1, 1)}
    with pytest.raises(StorageFailed) as failure:
        on_grid(world, case, in_files(spec_of(case, steps=9), shared_folder))
    done = "read" if failing == "read" else "written"
    text = str(failure.value)
    assert f"of this rank's states in {shared_folder} could not be {done}" in text
    assert "bytes at " in text
    assert "Input/output error" in text
