import threading

from hpczero.comm.progress import Background


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
