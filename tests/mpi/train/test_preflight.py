"""The look at memory and storage before a run, on several ranks."""

import pytest

from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.model import families
from hpczero.spec import states_folder
from hpczero.spec.schema import Memory, Model, Spec, Train, Zero
from hpczero.train import preflight

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


@pytest.mark.parametrize("hidden", [64, 100_000])
def test_the_ranks_say_once_what_they_see(
    world: World, monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    """However many ways there are to run the spec."""
    model = Model(layers=20, hidden=hidden, heads=4, vocab=128, seq_len=32)
    spec = Spec(model=model, memory=Memory(recompute="auto"), train=Train(global_batch=8))
    assert len(list(preflight.ways_to_run(spec))) > 2
    calls: list[str] = []

    def note(name: str) -> None:
        call = getattr(world, name)
        monkeypatch.setattr(world, name, lambda value: calls.append(name) or call(value))

    note("gather_objects")
    note("broadcast_object")
    if hidden == 64:
        way = preflight.fit_to_memory(world, spec, families.layers(model), None)
        assert way.memory.recompute == "none"
    else:
        with pytest.raises(InputError, match=r"zero\.stage = 1 needs"):
            preflight.fit_to_memory(world, spec, families.layers(model), None)
    assert calls == ["gather_objects", "broadcast_object"]


def test_a_folder_that_one_node_lacks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks say which one."""
    last = world.rank + 1 == world.size
    monkeypatch.setattr(world, "hosts", [f"n{rank}" for rank in range(world.size)])
    monkeypatch.setattr(states_folder, "problem", lambda zero: "it is missing" if last else "")
    spec = Spec(zero=Zero(offload="nvme:/local/states"))
    with pytest.raises(InputError, match=f"^on n{world.size - 1}: it is missing$"):
        preflight.check_folder(world, spec)


def test_a_variable_that_is_empty_on_one_rank(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the folder is "", as where there is to be none."""
    monkeypatch.setenv("A_PLACE", "" if world.rank == 0 else "/tmp")
    with pytest.raises(InputError, match=r"\$A_PLACE is not set"):
        preflight.check_folder(world, Spec(zero=Zero(offload="nvme:$A_PLACE")))


def test_memory_in_place_of_storage_is_said_once(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    last = world.rank + 1 == world.size
    monkeypatch.setattr(states_folder, "problem", lambda zero: "")
    monkeypatch.setattr(
        states_folder, "warning", lambda zero, place: f"in memory {place}" if last else ""
    )
    preflight.check_folder(world, Spec(zero=Zero(offload="nvme:/local/states")))
    said = f"hpczero: WARN in memory on {world.hosts[world.size - 1]}\n"
    assert capfd.readouterr().err == (said if world.rank == 0 else "")
