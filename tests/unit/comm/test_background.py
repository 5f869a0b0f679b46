import threading
import time
from types import SimpleNamespace

import pytest

from hpczero.comm import progress as progress_module
from hpczero.comm.progress import Background, Progress, Requests, Work
from hpczero.comm.status import Status, WaitPoint
from hpczero.comm.trace import Entry


def test_what_fails_in_the_background_fails_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sees that the operation is done sees the failure, too."""
    known_when_done = []

    class Watched(Work):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "done" and value:
                known_when_done.append(str(self._progress._failed))
            super().__setattr__(name, value)

    monkeypatch.setattr(progress_module, "Work", Watched)
    mpi = SimpleNamespace(
        Request=SimpleNamespace(Testall=lambda requests: True),
        Exception=OSError,
        get_vendor=lambda: ("none", ()),
    )
    progress = Progress(mpi, Status())

    def steps() -> Requests:
        yield [object()]
        raise ArithmeticError("the pieces do not fit")

    work = progress.start(steps(), Entry(), WaitPoint(b""), ("data", "sum", -1), far=True)
    until = time.monotonic() + 10
    while progress._failed is None and time.monotonic() < until:
        time.sleep(0.001)
    for call in (progress.check, progress.advance, work.wait, work.poll, progress.close):
        with pytest.raises(ArithmeticError, match="do not fit"):
            call()
    assert known_when_done == ["the pieces do not fit"]


def test_it_advances_until_there_is_nothing_more_and_again_when_woken() -> None:
    calls, done = [], threading.Semaphore(0)

    def advance() -> bool:
        calls.append(threading.current_thread())
        more = len(calls) % 3 != 0
        if not more:
            done.release()
        return more

    background = Background(advance)
    background.close()  # never woken: there is no thread
    background = Background(advance)
    for round_ in (1, 2):
        background.wake()
        assert done.acquire(timeout=10)
        assert len(calls) == 3 * round_
    background.close()
    assert all(
        thread is not threading.current_thread() and not thread.is_alive() for thread in calls
    )
