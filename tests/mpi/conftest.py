"""Distributed tests: mpirun -n N python -m pytest --with-mpi tests/mpi

Every rank runs the same tests in the same order. After each phase of a test (set-up, body,
tear-down) all ranks agree on its outcome: a test that fails on one rank fails on all, and rank 0,
which alone reports, shows every failure with its rank. A rank that does not come to the agreement
(it hangs, or waits in a collective for one that failed) ends the launch, with a message that names
the test and the rank.

A test that asks for `world` runs on 3 of the ranks given, one marked usual(2) on 2; the other ranks
sit it out. With --slow it runs once on 1, 2, 3, ... of them, and once on all. With more ranks than
the largest of these sizes only tests marked many_ranks run, on all of them. A test marked ranks(2,
4) runs on a world of 2 and of 4 ranks only: without --slow on the larger one. A test marked
cases(of=...) also asks for `case` and gets, on a world of n ranks, what of(n, everything) lists;
everything: with --slow. Without, it runs on usual(n) ranks if these have cases, else on the
largest world that has.

--means gloo and --means queued run the same tests with what GPUs need: collectives of
torch.distributed, and a device's staging.
"""

import faulthandler
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from hpczero.comm.world import World
from hpczero.device import CPU
from hpczero.train.setup import share_cores
from tests.support.queued import Queued

SIZES = (1, 2, 3, 4, 6, 8)
USUAL = 3
MARKERS = [
    "many_ranks: also runs on more ranks than 8",
    "ranks(2, 4): runs on so many ranks only",
    "by_mpi_alone(why): not with other --means",
    "usual(2): runs on so many ranks without --slow",
    "cases(of=...): what of(ranks, everything) lists are its cases",
]
LIMIT = 90  # seconds for one test, on every rank
GRACE = 10  # seconds that a rank whose test failed waits for the others
_WORD, _TEXT = 16, 16384  # bytes of a rank's outcome, and of what it says of a failure


class Verdict:
    """The ranks' agreement on the outcome of each phase."""

    def __init__(self, whole: World) -> None:
        from mpi4py import MPI

        self.whole = whole
        self.test = ""
        self._mpi = MPI
        self._communicator = MPI.COMM_WORLD.Dup()
        self._stderr = os.fdopen(os.dup(2), "w")  # the tests' own is captured

    def agree(self, report: pytest.TestReport) -> None:
        outcomes = self._gather(report, report.outcome, _WORD)
        if set(outcomes) in ({"passed"}, {"skipped"}):
            return
        texts = self._gather(report, report.longreprtext if report.failed else "", _TEXT)
        told = [
            f"---- rank {rank}: {outcome}\n{text}"
            for rank, (outcome, text) in enumerate(zip(outcomes, texts, strict=True))
            if text or "failed" not in outcomes
        ]
        report.outcome = "failed"
        report.longrepr = "\n".join(told)

    def _gather(self, report: pytest.TestReport, text: str, room: int) -> list[str]:
        """Return each rank's text, of a long one its last bytes."""
        mine = text.encode(errors="replace")[-room:].ljust(room, b"\0")
        found = bytearray(room * self.whole.size)
        request = self._communicator.Iallgather([mine, self._mpi.BYTE], [found, self._mpi.BYTE])
        begun = time.monotonic()
        while not request.Test():
            if report.failed and time.monotonic() - begun > GRACE:
                missing = "not every other rank came to its end"
                self.end_launch(
                    f"rank {self.whole.rank} failed in {self.test} ({report.when}), and "
                    f"{missing}:\n{report.longreprtext}"
                )
            time.sleep(0.0005)
        texts = (found[first : first + room] for first in range(0, len(found), room))
        return [text.rstrip(b"\0").decode(errors="replace") for text in texts]

    def too_long(self) -> None:
        faulthandler.dump_traceback(self._stderr)
        self.end_launch(
            f"rank {self.whole.rank} is still in {self.test} after {LIMIT} s: ending the launch"
        )

    def end_launch(self, message: str) -> None:
        """From any thread, even while another one is stuck inside MPI: the launcher ends the job
        when a rank is gone.
        """
        print(f"\n{message}", file=self._stderr, flush=True)
        time.sleep(0.5)
        os._exit(1)


class Distributed:
    """The plugin that carries this out, in a launch with --with-mpi."""

    def __init__(self, config: pytest.Config) -> None:
        self.whole = World.start()
        means = config.getoption("--means", "mpi")
        self.whole.use(Queued() if means == "queued" else CPU, "gloo" if means == "gloo" else "mpi")
        share_cores(self.whole)
        self.verdict = Verdict(self.whole)
        if self.whole.rank > 0:
            config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115  # open until the end

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("skip"):
            return (yield)
        self.verdict.test = item.nodeid
        watch = threading.Timer(LIMIT, self.verdict.too_long)
        watch.daemon = True
        watch.start()
        try:
            return (yield)
        finally:
            watch.cancel()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Agree, but not on a test that is marked to be left out, as it is on every rank."""
        report = yield
        if not item.get_closest_marker("skip"):
            self.verdict.agree(report)
        elif report.failed:  # what an earlier test has made is torn down behind this one
            self.verdict.end_launch(report.longreprtext)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """The body is run by the ranks of its world only."""
        return True if pyfuncitem.funcargs.get("world", self) is None else None

    def pytest_unconfigure(self) -> None:
        self.whole.close()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--with-mpi"):
        config.pluginmanager.register(Distributed(config), "distributed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return
    everything = metafunc.config.getoption("--slow", False)
    given = ranks_given(metafunc.config)
    sizes = sorted({size for size in SIZES if size <= given} | {given})
    if given > max(SIZES):
        sizes = [given]
    only = metafunc.definition.get_closest_marker("ranks")
    sizes = [size for size in sizes if only is None or size in only.args]
    marker = metafunc.definition.get_closest_marker("cases")
    if marker is None:
        sizes = sizes if everything else one_of(sizes, metafunc.definition)
        metafunc.parametrize("world", sizes, indirect=True, ids=lambda size: f"{size}-ranks")
        return
    of = marker.kwargs["of"]
    if not everything:  # lists may take long to make: only until one has cases
        usual = metafunc.definition.get_closest_marker("usual")
        order = (one_of(sizes, metafunc.definition) if usual else []) + sizes[::-1]
        sizes = next(([size] for size in order if of(size, False)), [])
    lists = {size: of(size, everything and size == given) for size in sizes}
    cases = [(size, case) for size in sizes for case in lists[size]]
    names = [f"{size}-ranks-" + "-".join(map(str, case.values())) for size, case in cases]
    metafunc.parametrize(("world", "case"), cases, indirect=["world"], ids=names)


def one_of(sizes: list[int], test: pytest.Function) -> list[int]:
    """Return the size that the test is marked with, else the usual one, else the largest."""
    mark = test.get_closest_marker("usual")
    wanted = mark.args[0] if mark else USUAL
    return [wanted] if wanted in sizes else sizes[-1:]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("by_mpi_alone")
        if marker and config.getoption("--means", "mpi") != "mpi":
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))
    if ranks_given(config) <= max(SIZES):
        return
    for item in items:
        if "many_ranks" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"tried on at most {max(SIZES)} ranks"))


def ranks_given(config: pytest.Config) -> int:
    plugin: Any = config.pluginmanager.get_plugin("distributed")
    return plugin.whole.size if plugin else 1


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World | None]:
    """A world of the first so many ranks; None on the others, whose bodies are not run.

    What the body makes of torch's threads ends with it: the others have theirs.
    """
    whole = whole_of(request)
    threads = torch.get_num_threads()
    part = whole.part(range(request.param)) if whole.rank < request.param else None
    yield part
    if part:
        part.close()
    torch.set_num_threads(threads)


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> World:
    """All ranks of the launch."""
    return whole_of(request)


def whole_of(request: pytest.FixtureRequest) -> World:
    plugin: Any = request.config.pluginmanager.get_plugin("distributed")
    if plugin is None:
        pytest.skip("needs --with-mpi")
    whole: World = plugin.whole
    return whole


@pytest.fixture
def shared_folder(world: World | None) -> Iterator[str]:
    if world is None:  # this rank sits the test out
        yield ""
        return
    path = world.broadcast_object(
        tempfile.mkdtemp(prefix="hpczero-checkpoints-") if world.rank == 0 else ""
    )
    yield path
    world.everyone.barrier()
    if world.rank == 0:
        shutil.rmtree(path)
