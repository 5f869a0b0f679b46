"""The threads of one rank: a kernel over a flat range, cut at multiples of BLOCK so that the cut cannot change a result."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

BLOCK = 4096  # elements: what a sum of squares covers, and the unit in which ranges are cut
_WORTH_A_THREAD = 16  # blocks: some 10 microseconds of work, about what handing a slice to a thread costs


def slices_of(count: int, most: int) -> list[tuple[int, int]]:
    """range(count) as at most `most` (start, stop) of nearly equal length that begin at multiples of BLOCK: fewer where they would be short."""
    blocks = -(-count // BLOCK)
    parts = max(1, min(most, blocks // _WORTH_A_THREAD))
    edges = [blocks * part // parts * BLOCK for part in range(parts)]
    return list(zip(edges, [*edges[1:], count], strict=True))


class Pool:
    """`threads` threads, the calling one included, for kernels that release the GIL."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, threads
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "hpczero-kernel") if threads > 1 else None

    def run(self, kernel: Callable[[int, int], None], count: int) -> None:
        """kernel(start, stop) for slices that together are range(count); what a slice raises is raised here, once all have ended."""
        if self._others is None:
            kernel(0, count)
            return
        mine, *theirs = slices_of(count, self.threads)
        started = [self._others.submit(kernel, *part) for part in theirs]
        try:
            kernel(*mine)
        finally:
            wait(started)
        for work in started:
            work.result()

    def close(self) -> None:
        """Ends the threads; there is nothing to end in a pool of one."""
        if self._others:
            self._others.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


INLINE = Pool(1)  # the calling thread alone
