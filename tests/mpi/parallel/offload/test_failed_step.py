"""Storage that fails in a step of a loop of one's own, which catches the error and goes on."""

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpczero import safe_files
from hpczero.checkpoint import directory
from hpczero.checkpoint.save import SaveFailed
from hpczero.comm.world import World
from hpczero.parallel.offload.state_file import StorageFailed
from tests.support.own_loops import Loop, batch, spec_of, started

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1)]


class Storage:
    """Storage of which reads or writes fail after so many more, once that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.left: int | None = None
        self._lock = threading.Lock()
        self._intact = getattr(safe_files, name)
        monkeypatch.setattr(safe_files, name, self._tried)

    def _tried(self, *arguments: Any) -> Any:
        with self._lock:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._intact(*arguments)


@contextlib.contextmanager
def raises_again(error: StorageFailed | None = None) -> Iterator[Any]:
    """Expect a failure of storage, in the words of the first one."""
    with pytest.raises(StorageFailed) as found:
        yield found
    assert error is None or found.value is error


def offloaded(folder: str, stage: int) -> dict[str, Any]:
    offload = {"offload": f"nvme:{folder}/states"}
    return spec_of(folder, stage, zero=offload, train={"precision": "bf16"})


def uses(engine: Any) -> list[Callable[[], object]]:
    x, _ = batch(0)
    weight = next(engine.module.parameters())
    return [
        lambda: engine(x),
        lambda: engine.backward(x.sum()),
        engine.step,
        engine.save,
        engine.resume,
        engine.full_state_dict,
        engine.should_stop,
        lambda: engine.gathered([weight]).__enter__(),
        engine.engine.wait_for_weights,
        lambda: engine.engine.update.complete(engine.engine.units[0]),
        lambda: engine.engine.finish_step(0.1),
    ]


@pytest.mark.parametrize("name", ["read_at", "write_at"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.few(3)
def test_a_step_that_failed_stays_failed(
    world: World,
    name: str,
    stage: int,
    after: int,
    shared_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of a step is neither saved nor used, however often it is asked for; what was saved
    before is what it was, and the loop goes on from there.
    """
    storage = Storage(monkeypatch, name)
    spec = offloaded(shared_folder, stage)
    engine = started(world, spec)
    loop = Loop(engine, world).run(2)
    engine.save({"loop": 2}, wait=True)
    storage.left = after
    with raises_again() as first:
        loop.run(3)
    storage.left = None  # it works again, for what that is worth
    done = "read" if name == "read_at" else "written"
    assert f"of this rank's states in {shared_folder}/states could not be {done}" in str(
        first.value
    )
    for use in uses(engine):
        with raises_again(first.value):
            use()
    threads = threading.active_count()
    with raises_again(first.value):
        engine.close()
    assert threading.active_count() < threads
    engine.close()  # it is closed
    run = Path(shared_folder) / "loop"
    assert directory.steps(run / "checkpoints").keys() == {2}
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["reason"]) == ("failed", str(first.value))
    with started(world, spec) as again:
        assert again.resume().extra == {"loop": 2}
        Loop(again, world).run(4)


@pytest.mark.parametrize("behind", [True, False])
def test_a_checkpoint_of_states_that_are_gone_is_not_saved(
    world: World, behind: bool, shared_folder: str
) -> None:
    """A device that fails while states are copied: an error, not a signal."""
    spec = offloaded(shared_folder, 1)
    engine = started(world, spec)
    loop = Loop(engine, world).run(1)
    engine.save(wait=True)
    loop.run(2)
    os.ftruncate(engine.engine.file._file, 0)
    with pytest.raises(SaveFailed, match=r"of this rank's states in .* could not be read"):
        engine.save(wait=not behind)
    with raises_again():
        engine.full_state_dict()
    with raises_again() as first:
        loop.run(3)
    with raises_again(first.value):
        engine.close()
    assert directory.steps(Path(shared_folder) / "loop" / "checkpoints").keys() == {1}


def test_changes_by_hand_leave_no_pages(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go: list[str] = []
    with started(world, offloaded(shared_folder, 1)) as engine:
        file = engine.engine.file
        monkeypatch.setattr(file, "let_pages_go", lambda: let_go.append("pages"))
        weight = next(engine.module.parameters())
        with engine.gathered([weight], modify=True):
            weight.data.fill_(0.5)
        assert let_go == ["pages"]
        engine.load_state_dict(engine.full_state_dict())
        assert let_go == ["pages"] * 2
