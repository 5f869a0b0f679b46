"""MPI libraries and the launchers below which they may run."""

from types import SimpleNamespace

import pytest

from hpczero import env
from hpczero.comm import mpi_library
from hpczero.errors import InputError

MPICH = "MPICH Version:      5.0.2\nMPICH Device:    ch4:ofi\nMPICH configure: --with-pm=hydra"
LAUNCHED = {"Open MPI": (0, 2)}


@pytest.mark.parametrize(
    ("library", "launched", "refused"),
    [
        (MPICH, LAUNCHED, True),
        (f"{MPICH} --with-pmix=/usr", LAUNCHED, False),
        ("Open MPI v5.0.11, package: Open MPI", LAUNCHED, False),
        (MPICH, {"MPICH": (0, 2)}, False),
        (MPICH, {"Open MPI": (0, 1)}, False),
    ],
    ids=["without PMIx", "with PMIx", "its own library", "its own launcher", "one process"],
)
def test_only_an_mpich_that_cannot_start_below_open_mpis_mpirun_is_refused(
    library: str,
    launched: dict[str, tuple[int, int]],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env, "launched_tasks", lambda: launched)
    mpi = SimpleNamespace(Get_library_version=lambda: library)
    if not refused:
        mpi_library.refuse_foreign_launcher(mpi)
        return
    with pytest.raises(InputError, match=r"\(Open MPI\) started 2 processes"):
        mpi_library.refuse_foreign_launcher(mpi)
