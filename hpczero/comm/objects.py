"""Work on files takes one rank a second and another one, whose disk is slow, many minutes. So that the watchdog does not take that for a dead
rank, the work is done in a thread, which calls no MPI, while the ranks meet every now and then until all have done theirs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from hpczero.comm.world import World

_ROUND = 0.2  # seconds between two meetings

Result = TypeVar("Result")


def run_while_polling(
    world: World, action: Callable[[], Result], meanwhile: Callable[[], object] = lambda: None
) -> Result:
    """Collective. What the action returns or raises here; not before it has ended on all ranks. `meanwhile`: work of this rank beside it."""
    done: Future[Result] = Future()
    problem: BaseException | None = None

    def work() -> None:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    try:
        threading.Thread(target=work, name="hpczero-files", daemon=True).start()
    except RuntimeError:  # no more threads are to be had: the others wait as long as they may
        work()
    try:
        meanwhile()
    except BaseException as error:  # the others are met all the same
        problem = error
    while True:
        wait([done], _ROUND)
        if all(world.broadcast_object(world.gather_objects(done.done()))):
            if problem:
                raise problem
            return done.result()
