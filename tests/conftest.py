"""For every test: `--slow` adds the long ones, and under mpirun rank 0 alone writes the results file."""

from collections.abc import Sequence

import pytest

from hpczero import env


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--means", choices=["mpi", "gloo", "queued"], default="mpi",
        help="what the ranks of tests/mpi talk by: MPI; torch.distributed; MPI, from the memory of a device that does things later",
    )  # fmt: skip
    parser.addoption(
        "--gpu", action="store_true", help="end with an error where PyTorch sees no GPU"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """End once all tests have been imported: without a GPU they would run on the CPU, and pass."""
    if session.config.getoption("--gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.exit(f"no GPU: torch {torch.__version__} finds none", returncode=3)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if any(rank > 0 for rank, _ in env.launched_tasks().values()):
        config.option.xmlpath = None


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes long: runs with --slow"))
