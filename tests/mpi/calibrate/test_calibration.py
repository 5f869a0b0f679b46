"""A calibration on any ranks: all parts come to an end together, and say what they did not do."""

import tomllib
from pathlib import Path

import pytest

from hpczero.calibrate import links
from hpczero.calibrate.calibration import Calibration
from hpczero.calibrate.cluster_file import Origin, text
from hpczero.calibrate.turns import Turns
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.planner.cluster import Cluster

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usual(2),
    pytest.mark.by_mpi_alone("it chooses device and backend itself"),
]


def test_every_part_ends_and_gives_a_file(world: World, shared_folder: str) -> None:
    said: list[str] = []
    calibration = Calibration(world, Path(shared_folder), 0.5, said.append)
    calibration.run()
    findings = calibration.findings
    assert findings.machine.ranks == world.size
    assert findings.alone
    assert findings.at_once
    assert findings.launch
    assert all(one.product.seconds > 0 for timed in findings.products.values() for one in timed)
    assert {one.kernel for one in findings.kernels}
    assert bool(findings.inside) == (world.size > 1)
    assert bool(findings.beside_inside) == (world.size > 1)
    assert not findings.between
    assert len(said) == (7 if world.size > 1 else 6)
    assert findings.notes[-1].startswith(("one ", "noisy"))
    assert not list(Path(shared_folder).iterdir())
    if world.rank == 0:
        written = text(findings, Origin("here", ["a test's measurement"]))
        cluster = Cluster.model_validate(tomllib.loads(written))
        assert cluster.node.devices == findings.machine.devices
        assert ("link_gb_s" in cluster.node.model_fields_set) == (world.size > 1)
        assert "network" not in cluster.model_fields_set


def test_a_folder_that_takes_no_file_is_refused_by_all(world: World, shared_folder: str) -> None:
    with pytest.raises(InputError, match=r"--folder .*missing"):
        Calibration(world, Path(shared_folder) / "missing", 0.5, print)


def test_nodes_of_one_host_have_no_network(world: World) -> None:
    part = world.part(range(world.size), ranks_per_node=1)
    assert links.is_simulated(part) == (world.size > 1)
    assert not links.has_network(part)
    turns = Turns(part)
    turns.begin(0.1, 1)
    assert not links.inside(turns, links.torch.float32)
    assert not links.beside_inside(turns, links.torch.float32)
    assert not links.beside_between(turns, links.torch.float32)
    assert not links.between(turns, links.torch.float32, at_once=True)
    part.close()


@pytest.mark.usual(3)
@pytest.mark.slow
def test_ranks_without_a_group_wait_for_those_that_exchange_beside_computing(world: World) -> None:
    if world.size < 2:
        return
    group = world.group("pair", range(2)) if world.rank < 2 else None
    turns = Turns(world)
    turns.begin(0.1, 1)
    found = links._beside(turns, group, links.torch.float32)
    assert [one.operation for one in found][:1] == ["reduce_scatter"]
    medians = [[one.alone.median, one.both.median] for one in found]
    assert world.all_gather_objects(medians) == [medians] * world.size
    assert all(one.both.median > one.alone.median for one in found)


def test_operations_move_what_they_say(world: World) -> None:
    """Each action may be carried out as often as turns ask for, by the ledger's bytes."""
    group = world.everyone
    if world.size == 1:
        return
    for operation in links.OPERATIONS:
        world.ledger.reset()
        action = links._action(group, operation, 4096, links.torch.float32)
        action()
        action()
        entry = world.ledger.as_dict()["world"][operation]
        assert entry["bytes"] == 2 * links._sent(operation, 4096, world.size)
