"""Refuses to start where MPI library and launcher do not fit: every process would run alone."""

import time
from typing import Any

from hpczero import env, job_note
from hpczero.errors import InputError

HEAD_START = 1.0  # seconds in which rank 0 may say for all of them what is wrong with the input
_SPEAKERS = 4  # ranks that say what is wrong though each believes itself alone


def library(mpi: Any) -> str:
    """"MPICH Version: 5.0.2", "Open MPI v5.0.11"."""
    return " ".join(mpi.Get_library_version().rstrip("\x00").split("\n")[0].split(",")[0].split())


def refuse_foreign_launcher(mpi: Any) -> None:
    """MPICH without PMIx cannot even start under Open MPI's mpirun; its own message there helps nobody."""
    version = mpi.Get_library_version()
    if "Open MPI" in env.launched_tasks() and version.startswith("MPICH") and "pmix" not in version.lower():
        _refuse_launcher(mpi)


def refuse_unusable(mpi: Any) -> None:
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        level = f"thread level {mpi.Query_thread()}, below MPI_THREAD_SERIALIZED ({mpi.THREAD_SERIALIZED})"
        raise InputError(f"{library(mpi)} offers {level}, which hpczero needs: use an MPI that was built with thread support")
    if mpi.COMM_WORLD.size == 1:
        _refuse_launcher(mpi)


def _give_way(rank: int) -> None:
    """Let an earlier rank of processes that know nothing of each other say what is wrong.

    srun kills the others when one has ended: whichever that is must have spoken.
    """
    time.sleep(HEAD_START * min(rank, 10 * _SPEAKERS))
    if rank >= _SPEAKERS:
        job_note.wrong_input()
        raise SystemExit(InputError.exit_code)


def _srun_options(mpi: Any) -> str:
    options = {"MPICH": "--mpi=pmi2", "Open MPI": "--mpi=pmix"}
    fitting = [option for name, option in options.items() if library(mpi).startswith(name)]
    named = " or ".join(f'["{option}"]' for option in fitting or options.values())
    return f"batch.launch_options = {named} (srun --mpi=list names those that there are)"


def _refuse_launcher(mpi: Any) -> None:
    """The MPI library is not the launcher's if that has started several processes and each would believe itself alone."""
    launcher, (rank, size) = next(iter(env.launched_tasks().items()), ("", (0, 1)))
    if size == 1:
        return
    _give_way(rank)
    if launcher == "Slurm":
        raise InputError(
            f"srun started {size} processes, but each would run alone: "
            f"it does not know how {library(mpi)} starts. "
            f'In the spec: {_srun_options(mpi)}, or batch.launcher = "mpirun"'
        )
    raise InputError(
        f"the launcher ({launcher}) started {size} processes, but each would run alone: the MPI library in use, {library(mpi)}, is not "
        f"the launcher's. Start with the mpirun that belongs to this library (of the same virtual environment or module), or point mpi4py "
        f"at the launcher's library (MPI4PY_LIBMPI=/path/to/libmpi.so); `python -m mpi4py --mpi-library` shows which one is taken"
    )
