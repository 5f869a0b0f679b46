"""Checkpoints of replicas: a run that was stopped is the one that was not; other layouts, other
numbers of replicas and other optimizers go on with what is there.
"""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpczero.checkpoint import manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.verify import Verification
from hpczero.comm.world import World
from tests.support.covering import Case
from tests.support.replica_runs import STEPS, checkpoint_of, checkpointed, run, that_differ
from tests.support.replicas import METHODS

pytestmark = pytest.mark.mpi

LOCAL = [name for name in METHODS if "local" in name]
# ranks -> layouts: ranks of a node, and which of them share a copy
LAYOUTS: dict[int, list[Case]] = {
    2: [{"per_node": 1, "shards": "node"}],
    3: [{"per_node": 2, "shards": "node"}],
    4: [
        {"per_node": 2, "shards": "node"},
        {"per_node": 2, "shards": 1},
        {"per_node": 2, "shards": "node", "tensor": 2},
        {"per_node": 2, "shards": 1, "pipeline": 2},
    ],
}


def cases(ranks: int, everything: bool) -> list[Case]:
    """Every method, in the middle of a round and at its end, at each stage."""
    layouts = LAYOUTS.get(ranks, [])
    pairs = list(product(METHODS, layouts if everything else layouts[:1]))
    return [
        {"method": method, "stage": stage, "stops": stops} | layout
        for number, (method, layout) in enumerate(pairs)
        for stops, stage in (product((5, 8), (1, 2, 3)) if everything else [_one(number)])
    ]


def _one(number: int) -> tuple[int, int]:
    return (5, 8, 6)[number % 3], 1 + number % 3


def spec_of(case: Case, folder: str, **changes: Any) -> Any:
    sizes = {axis: case.get(axis, 1) for axis in ("tensor", "pipeline")}
    zero = {"stage": case["stage"], "shard_ranks": case["shards"]}
    return checkpointed(case["method"], folder, zero, sizes, **changes)


@pytest.mark.cases(of=cases)
@pytest.mark.usual(4)
@pytest.mark.few(2)
def test_a_stopped_run_is_the_one_that_was_not(
    world: World, case: Case, shared_folder: str
) -> None:
    """To the bit, with what messages have left out; a request stops it in the middle of a round."""
    whole = run(world, spec_of(case, f"{shared_folder}/whole"), case["per_node"])
    spec = spec_of(case, f"{shared_folder}/parts")
    stops = case["stops"]
    first = run(world, spec, case["per_node"], stops_after=stops)
    assert (first.state, list(first.losses)) == ("stopped", list(range(1, stops + 1)))
    second = run(world, spec, case["per_node"])
    assert second.resumed
    assert (second.resumed.step, second.resumed.warnings) == (stops, ())
    assert that_differ(first.states, second.restored) == []
    assert first.losses | second.losses == whole.losses
    assert that_differ(whole.states, second.states) == []
    assert whole.losses[STEPS] < whole.losses[1]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_what_is_saved_behind_training_is_of_its_step(
    world: World, shared_folder: str, method: str
) -> None:
    """From copies, which what other replicas send at the next save does not change."""
    case = {"method": method, "stage": 2, "shards": "node"}
    spec = spec_of(case, shared_folder)
    settings = spec.checkpoint.model_copy(update={"every": 4, "asynchronous": True})
    spec = spec.model_copy(update={"checkpoint": settings})
    whole = run(world, spec, world.size // 2)
    assert len(whole.losses) == STEPS
    for step in (16, 8):
        if world.rank == 0:  # the job was killed
            for later in range(step + 4, STEPS + 1, 4):
                shutil.rmtree(checkpoint_of(shared_folder, later))
        world.everyone.barrier()
        found = run(world, spec, world.size // 2)
        assert found.resumed
        assert found.resumed.step == step
        assert found.losses == {at: whole.losses[at] for at in range(step + 1, STEPS + 1)}
        assert that_differ(whole.states, found.states) == []


_ADAMW = {"model", "optimizer/moment1", "optimizer/moment2"}
_ERRORS = {"optimizer/served_error", "replica_0/error", "replica_1/error"}
_OUTER_ERRORS = {name.replace("error", "outer_error") for name in _ERRORS}
_APART = {
    f"replica_{number}/{name}" for number in (0, 1) for name in ("weights", "moment1", "moment2")
}
SLOTS_OF = {
    "sums": _ADAMW,
    "int8": _ADAMW,
    "one_bit_adam": _ADAMW | _ERRORS,
    "local steps": {"model", "optimizer/outer_momentum"} | _APART,
    "local steps, int4": {"model", "optimizer/outer_momentum"} | _APART | _OUTER_ERRORS,
}
OTHERS: list[Case] = [
    {"per_node": 1, "shards": "node"},  # four replicas
    {"per_node": 2, "shards": 1},
    {"per_node": 4, "shards": "node"},  # one
    {"per_node": 2, "shards": "node", "tensor": 2},
    {"per_node": 2, "shards": 1, "pipeline": 2},
    {"per_node": 2, "shards": "node", "ranks": 3},
    {"per_node": 1, "shards": "node", "ranks": 1},
]


def moves(ranks: int, everything: bool) -> list[Case]:
    """From two replicas of two shards to any other layout, and back."""
    pairs = list(product(METHODS, OTHERS))
    return [{"method": method, **other} for method, other in pairs] if ranks == 4 else []


@pytest.mark.cases(of=moves)
@pytest.mark.few(1)
def test_other_layouts_go_on(world: World, case: Case, shared_folder: str) -> None:
    """The loss of the next step is that of the run that was not stopped, within a hundredth."""
    stops, method = 13, case["method"]
    written = {"method": method, "stage": 2, "shards": "node"}
    whole = run(world, spec_of(written, f"{shared_folder}/whole"), 2)
    spec = spec_of(written, f"{shared_folder}/parts")
    run(world, spec, 2, stops_after=stops)
    ranks = case.get("ranks", world.size)
    other = spec_of(case | {"stage": 1 + ranks % 3}, f"{shared_folder}/parts")
    if world.rank < ranks:
        part = world.part(range(ranks))
        found = run(part, other, case["per_node"], stops_after=stops + 2)
        assert found.resumed
        assert found.resumed.step == stops
        assert found.losses[stops + 1] == pytest.approx(whole.losses[stops + 1], rel=0.01)
        assert whole.losses[1] > 1.03 * whole.losses[stops + 1]
        if part.rank == 0 and found.common:
            assert_common(found.common, checkpoint_of(f"{shared_folder}/parts", stops))
        part.close()
    world.everyone.barrier()
    back = run(world, spec, 2, stops_after=stops + 4)
    assert back.losses[stops + 3] == pytest.approx(whole.losses[stops + 3], rel=0.02)


def assert_common(found: dict[str, Tensor], path: Path) -> None:
    """The weights are those of the checkpoint, or the mean of replicas that trained apart."""
    with Checkpoint.open(path) as checkpoint:
        slots = [slot for slot in checkpoint.slots if slot.endswith("/weights")] or ["model"]
        for name in (tensor.name for tensor in checkpoint.table.tensors):
            values = [checkpoint[f"/{slot}/{name}"].torch() for slot in slots]
            mean = torch.stack(values).mean(0)
            torch.testing.assert_close(found[name], mean, rtol=1e-6, atol=1e-7)


SWITCHES = [
    ("one_bit_adam", "sums"),
    *(("sums", method) for method in LOCAL),
    ("int8", "one_bit_adam"),
    *((method, "sums") for method in LOCAL),
    ("local steps", "one_bit_adam"),
    ("local steps, int4", "local steps"),
    ("one_bit_adam", "local steps, int4"),
    ("sums", "one_bit_adam"),
]


def switches(ranks: int, everything: bool) -> list[Case]:
    found = SWITCHES if ranks in (2, 4) else []
    return [{"from": first, "to": second} for first, second in found]


@pytest.mark.cases(of=switches)
@pytest.mark.usual(4)
@pytest.mark.few(1)
def test_another_method_goes_on(world: World, case: Case, shared_folder: str) -> None:
    """Weights and moments are those of before, or their mean over replicas that were apart."""
    stops, per_node, folder = 13, world.size // 2, f"{shared_folder}/parts"
    layout = {"stage": 2, "shards": "node"}
    first, second = ({"method": case[which]} | layout for which in ("from", "to"))
    whole = run(world, spec_of(first, f"{shared_folder}/whole"), per_node)
    run(world, spec_of(first, folder), per_node, stops_after=stops)
    found = run(world, spec_of(second, folder), per_node, stops_after=stops + 2)
    assert found.resumed
    assert found.resumed.step == stops
    assert found.losses[stops + 1] == pytest.approx(whole.losses[stops + 1], rel=0.01)
    again = run(world, spec_of(first, folder), per_node)
    assert again.losses[stops + 3] == pytest.approx(whole.losses[stops + 3], rel=0.02)
    assert all(values.isfinite().all() for values in again.states.values())
    factor = 1.0
    if case["from"] == "one_bit_adam":  # frozen after the first update, it counts as one of 13
        factor = (1 - 0.95**stops) / (1 - 0.95)
    both_apart = case["from"] in LOCAL and case["to"] in LOCAL
    assert_taken(world, found.restored, checkpoint_of(folder, stops), factor, both_apart)


def assert_taken(
    world: World, restored: dict[str, Tensor], path: Path, factor: float, both_apart: bool
) -> None:
    """The sums of magnitudes of weights and moments, of both replicas, are those in the file.

    Each replica has the mean, unless they go on `both_apart`. `factor`: of the second moment.
    """
    for kind, slot in (("master", "weights"), ("moment1", "moment1"), ("moment2", "moment2")):
        own = [values.double() for name, values in restored.items() if name.endswith(f" {kind}")]
        found = torch.stack([values.abs().sum() for values in own]).sum().view(1)
        world.everyone.all_reduce(found)
        with Checkpoint.open(path) as checkpoint:
            slots = [one for one in checkpoint.slots if one.endswith(f"/{slot}")] or ["model"]
            expected = 0.0
            for name in (tensor.name for tensor in checkpoint.table.tensors):
                values = np.stack([checkpoint[f"/{one}/{name}"].numpy() for one in slots])
                values = values.astype(np.float64)
                of_replicas = values if both_apart else 2 * values.mean(0)
                expected += float(np.abs(of_replicas).sum())
        expected *= factor if kind == "moment2" else 1.0
        assert found.item() == pytest.approx(expected, rel=1e-6), kind


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(1)
def test_what_is_saved_is_whole(world: World, shared_folder: str, method: str) -> None:
    """Every slot of every tensor verifies; replicas have slots of their own, in format 4."""
    case = {"method": method, "stage": 1, "shards": "node"}
    run(world, spec_of(case, shared_folder), world.size // 2, stops_after=5)
    if world.rank == 0:
        path = checkpoint_of(shared_folder, 5)
        content = manifest.read(path)
        is_plain = method in ("sums", "int8")
        assert content.format == (1 if is_plain else 4)
        assert set(content.slots) == SLOTS_OF[method]
        with Verification(path) as verification:
            tasks = verification.tasks()
            found = [verification.carry_out(task, lambda size: None) for task in tasks]
        assert tasks
        assert not any(found)
    world.everyone.barrier()
