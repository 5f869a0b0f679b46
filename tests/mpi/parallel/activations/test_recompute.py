"""Activations that are computed again in backward: the same numbers on every grid, to the bit."""

import pytest

from hpczero.comm.world import World
from hpczero.parallel.activations import away
from hpczero.spec.schema import Memory, Spec
from tests.support.covering import Case, covering
from tests.support.grids import (
    BERT,
    PLAIN,
    T5,
    Serial,
    assert_agrees,
    bitwise,
    differences,
    factors,
    on_grid,
    possible,
    spec_of,
)
from tests.support.training import train

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def serial() -> Serial:
    return Serial()


def with_memory(spec: Spec, **how: object) -> Spec:
    return spec.model_copy(update={"memory": Memory.model_validate(how)})


def selection(ranks: int, everything: bool = False) -> list[Case]:
    chosen = factors(ranks) | {"recompute": ["selective", "block"], "every": [1, 2]}
    chosen["partition"] = [False, True]
    return covering(chosen, (), possible)


@pytest.mark.cases(of=selection)
@pytest.mark.few(2)
def test_it_changes_no_number(world: World, case: Case) -> None:
    spec = spec_of(case)
    kept = on_grid(world, case, spec)
    again = with_memory(
        spec,
        recompute=case["recompute"],
        recompute_every=case["every"],
        partition_activations=case["partition"],
    )
    assert bitwise(kept, on_grid(world, case, again))


@pytest.mark.ranks(2, 4)
@pytest.mark.slow
def test_only_inputs_of_recomputed_blocks_are_cut(world: World) -> None:
    """Blocks between them keep what is each rank's own."""
    spec = spec_of(PLAIN | {"grid": (world.size, 1), "precision": "bf16"})
    kept = on_grid(world, PLAIN, spec)
    cut = with_memory(spec, recompute="block", recompute_every=2, partition_activations=True)
    assert bitwise(kept, on_grid(world, PLAIN, cut))


def on_a_device(ranks: int, everything: bool = False) -> list[Case]:
    chosen = factors(ranks) | {"recompute": ["none", "selective", "block"], "shared": [False]}
    chosen["partition"] = [False, True]
    return covering(chosen, (), possible)


@pytest.mark.cases(of=on_a_device)
@pytest.mark.usual(2)
@pytest.mark.few(1)
def test_what_a_device_keeps_may_be_on_the_host(
    there: World, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is late: what is used too early is garbage."""
    monkeypatch.setattr(away, "_SMALL", 1)
    spec = spec_of(case)
    kept = train(there, spec)
    how = {"recompute": case["recompute"], "partition_activations": case["partition"]}
    found = train(there, with_memory(spec, offload_activations="cpu", **how))
    assert not differences(kept, found)


def with_pieces(ranks: int, everything: bool = False) -> list[Case]:
    chosen = factors(ranks) | {"rows": [1, 7, 40], "recompute": ["none", "selective", "block"]}
    chosen["precision"] = ["fp32"]
    # families that mask have logits of their targets alone, and no pieces
    chosen["family"] = [name for name in chosen["family"] if name not in {**BERT, **T5}]
    return covering(chosen, (), possible)


@pytest.mark.cases(of=with_pieces)
@pytest.mark.few(1)
def test_a_loss_by_pieces_equals_the_serial_one(world: World, case: Case, serial: Serial) -> None:
    spec = spec_of(case)
    pieces = with_memory(spec, recompute=case["recompute"], loss_chunk=case["rows"])
    assert_agrees(on_grid(world, case, pieces), serial, world, spec)
