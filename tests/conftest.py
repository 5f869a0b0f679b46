"""For every test: `--slow` adds the long ones; the results file, written by rank 0 alone, tells
the processor time of each.
"""

import contextlib
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Sequence

import pytest

from hpczero import env

gc.disable()  # until all tests are imported, which takes a fifth longer with it
SELDOM = 10_000, 20, 50  # numba and torch make objects by the million, of which few are garbage
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


with contextlib.suppress(ImportError):  # a machine with a GPU may lack it
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # speed is nothing that a test asserts
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--means",
        choices=["mpi", "gloo", "queued"],
        default="mpi",
        help="what the ranks of tests/mpi talk by: MPI; torch.distributed; "
        "MPI, from the memory of a device that does things later",
    )
    parser.addoption(
        "--gpu", action="store_true", help="end with an error where PyTorch sees no GPU"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """End once all tests have been imported: without a GPU they would run on the CPU, and pass."""
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()
    if torch := sys.modules.get("torch"):
        # sums in one order; and threads that wait for others spin, which takes most of a busy core
        torch.set_num_threads(1)
    if session.config.getoption("--gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.exit(f"no GPU: torch {torch.__version__} finds none", returncode=3)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if any(rank > 0 for rank, _ in env.launched_tasks().values()):
        config.option.xmlpath = None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    cases = defaultdict(list)
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes long: runs with --slow"))
        elif count := few_of(item):
            cases[item.nodeid.partition("[")[0], count].append(item)
    for (_, count), those in cases.items():
        for item in leave_out(those, count):
            item.add_marker(pytest.mark.skip(reason="one case of many: runs with --slow"))


def few_of(item: pytest.Item) -> int:
    """Return how many of the test's cases run without --slow; 0: all."""
    mark = item.get_closest_marker("few")
    simulated = mark.kwargs.get("simulated", 0) if mark and SIMULATED else 0
    return simulated or sum(mark.args if mark else ())


def leave_out(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """Return all but so many of the cases; those that stay are spread over the list."""
    last = len(cases) - 1
    stay = {round(number * last / max(1, count - 1)) for number in range(count)}
    return [case for number, case in enumerate(cases) if number not in stay]


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """Return True with --slow."""
    return bool(request.config.getoption("--slow"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.user_properties.append(("begun", processor_seconds()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Enter the processor time of the test and of the processes that it has ended into the
    results file.
    """
    try:
        return (yield)
    finally:
        begun = dict(item.user_properties)["begun"]
        item.user_properties[:] = [("processor_seconds", round(processor_seconds() - begun, 3))]


def processor_seconds() -> float:
    return sum(os.times()[:4])
