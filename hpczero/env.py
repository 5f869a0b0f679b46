"""Environment variables, the user's folders, and the files that belong to hpczero.

Only this module reads the environment: every variable that hpczero looks at is named here.
"""

import contextlib
import json
import os
import re
import shlex
import site
import sys
import sysconfig
import tempfile
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpczero import safe_files
from hpczero.errors import HpczeroError

VERSION = "0.1.0.dev0"  # setup.cfg reads it without importing the module

# name of the launcher -> (variable with the rank, variable with the number of ranks)
_LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
    "PALS": ("PALS_RANKID", "PALS_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}

ARRAY_TASK = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX")


def home() -> Path:
    return Path(os.path.expanduser("~"))


def cache_folder() -> Path:
    """Return the user's cache: $XDG_CACHE_HOME/hpczero, else ~/.cache/hpczero."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Return the folder of the user's settings: $XDG_CONFIG_HOME/hpczero or ~/.config/hpczero."""
    return _user_folder("XDG_CONFIG_HOME", ".config")


def state_folder() -> Path:
    """Return the folder for records of runs: $XDG_STATE_HOME/hpczero or ~/.local/state/hpczero."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def _user_folder(name: str, default: str) -> Path:
    return Path(os.environ.get(name) or home() / default) / "hpczero"


def node_folder() -> Path:
    """Return this user's folder in $TMPDIR, else /tmp, for files that may vanish at any time."""
    return Path(tempfile.gettempdir()) / f"hpczero-{os.getuid()}"


def numba_cache() -> str | None:
    """Return the folder that the user has chosen for numba's compiled kernels, if any."""
    return variable("NUMBA_CACHE_DIR")


def use_numba_cache(folder: Path) -> None:
    """Choose the folder for compiled kernels; call it before numba is imported."""
    os.environ["NUMBA_CACHE_DIR"] = str(folder)


def encode_by_one_thread() -> None:
    """Have tokenizers use one core of this process, whatever there are."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def encoding_threads() -> int:
    """Return the threads that encode: the package `tokenizers` asks the same variable."""
    by_one = variable("TOKENIZERS_PARALLELISM") in {"false", "off", "no", "n", "f", "0"}
    return 1 if by_one else max(1, len(os.sched_getaffinity(0)))


def for_trackers() -> None:
    """Have the packages of trackers write files alone, and send nothing; call it before them."""
    os.environ |= {
        "DO_NOT_TRACK": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_ERROR_REPORTING": "false",
    }


def tells_malloc() -> bool:
    """Return True if the environment configures glibc's malloc."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )


def scheduler_environment() -> dict[str, str]:
    """Return the environment for a scheduler's command, without variables of a surrounding job."""
    leftover = ("SBATCH_", "SLURM_", "SRUN_", "PBS_", "PMI_", "PMIX_")
    kept = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_SERVER")  # where the scheduler is
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(leftover)
    }


def site_folders() -> list[Path]:
    """Return the folders in $HPCZERO_SITES, separated as in $PATH."""
    return [
        Path(folder) for folder in os.environ.get("HPCZERO_SITES", "").split(os.pathsep) if folder
    ]


def variable(name: str) -> str | None:
    return os.environ.get(name) or None


def expand(text: str) -> str:
    """Expand `~`, `$SCRATCH` and `${USER}` as a shell does; an unknown variable stays as it is."""
    return os.path.expandvars(os.path.expanduser(text))


def unset_variables(text: str) -> list[str]:
    """Return the variables that `expand` would put in the text, and that are not set, or empty."""
    names = re.findall(r"\$(?:(\w+)|\{([^}]*)\})", text, re.ASCII)
    return [name for plain, braced in names if not variable(name := plain or braced)]


def launched_tasks() -> dict[str, tuple[int, int]]:
    """Return launcher -> (rank, number of ranks), for each launcher whose variables are set."""
    tasks = {}
    for launcher, names in _LAUNCHERS.items():
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdigit() and size.isdigit():
            tasks[launcher] = (int(rank), int(size))
    return tasks


def powercap() -> Path:
    """Return the folder of the kernel's energy counters: $HPCZERO_POWERCAP, else that of Linux."""
    return Path(variable("HPCZERO_POWERCAP") or "/sys/class/powercap")


def forced_kernels() -> str:
    """Return $HPCZERO_KERNELS: operations and the implementations to use, as in "norm=torch"."""
    return os.environ.get("HPCZERO_KERNELS", "")


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def has_package(name: str) -> bool:
    """Return True if Python finds this package; a folder without code is none."""
    spec = util.find_spec(name)
    return spec is not None and spec.origin is not None


def wrong_input_note() -> Path | None:
    """Return the file for a rank's note that the input is wrong ($HPCZERO_WRONG_INPUT)."""
    note = variable("HPCZERO_WRONG_INPUT")
    return Path(note) if note else None


def batch_job() -> str | None:
    """Return the batch system's identifier of the job that this process belongs to."""
    array, task = variable("SLURM_ARRAY_JOB_ID"), variable("SLURM_ARRAY_TASK_ID")
    if array and task and variable("SLURM_JOB_ID"):
        return f"{array}_{task}"
    return variable("SLURM_JOB_ID") or variable("PBS_JOBID")


def array_task() -> int | None:
    """Return the number of this task in an array of jobs; None outside of one."""
    numbers = [variable(name) or "" for name in ARRAY_TASK]
    return next((int(number) for number in numbers if number.isdecimal()), None)


def deadline() -> float | None:
    """Return the end of the batch job in seconds since 1970, if it is known.

    The job's script sets $HPCZERO_DEADLINE; Slurm sets its own variable since 23.02.
    """
    for text in (variable("HPCZERO_DEADLINE"), variable("SLURM_JOB_END_TIME")):
        if text and text.isdecimal():
            return float(text)
    return None


def prepare_mpi() -> None:
    """Set variables that make MPI libraries fast and quiet, before MPI starts; the user's stay."""
    # Bytes that a call moves over TCP: by default too few for one poll a millisecond.
    for size in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        os.environ.setdefault(size, "512k")
    # Open MPI 5's wheel prints "OSC UCX component priority set" for every window.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")


def python_command(module: str) -> list[str]:
    """Return the command that runs a module of hpczero with this process's search path.

    `python -m` would begin with the current folder, in which a stranger may have put an `h5py.py`.
    """
    begin = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_module"
    return [sys.executable, "-P", "-c", f"{begin}({module!r}, run_name='__main__')"]


# ----------------------------------------- files of hpczero: in the checkout or the installation
#
# The checkout comes first: what runs from a checkout (or an editable install of it) uses the
# checkout's kernels, templates and job specs, whatever else is installed.

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def in_checkout() -> bool:
    kernels = _CHECKOUT / "numba_cuda" / "hpczero_kernels"
    return (_CHECKOUT / "setup.cfg").is_file() and kernels.is_dir()


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation of hpczero."""
    return install_command(sys.executable, source(), extra)


def install_command(executable: str, source: str, extra: str) -> str:
    """Return the pip command; it installs from the source, as no package index has hpczero.

    Of an unknown source ("") the reader is expected to know the folder.
    """
    wanted = shlex.quote(f"{source or '.'}[{extra}]")
    where = "" if source else ", in the folder of hpczero's source"
    return f"{shlex.quote(executable)} -m pip install {wanted}{where}"


def source() -> str:
    """Return the checkout, or the folder or file that pip was given; "" if it no longer exists."""
    if in_checkout():
        return str(_CHECKOUT)
    try:
        record = metadata.distribution("hpczero").read_text("direct_url.json")
        url = urlsplit(json.loads(record or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return ""
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).exists() else ""


def make_kernels_importable() -> None:
    """Put a checkout's numba_cuda/, which holds the package `hpczero_kernels`, on Python's path."""
    folder = str(_CHECKOUT / "numba_cuda")
    if in_checkout() and folder not in sys.path:
        sys.path.insert(0, folder)


def shared_folder(name: str) -> Path:
    """Return the folder `templates`, `sites` or `jobspecs` of hpczero."""
    roots = [Path(sysconfig.get_path("data")), Path(site.getuserbase()), _PACKAGE.parent]
    candidates = [root / "share" / "hpczero" / name for root in roots]
    if in_checkout():
        candidates.insert(0, _CHECKOUT / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    searched = ", ".join(map(str, candidates))
    raise HpczeroError(
        f"hpczero's folder '{name}' is missing; looked in {searched}: install hpczero again"
    )


def note_wrong_input() -> None:
    """Leave a note for the batch job's script, if it looks for one: a rank found the input wrong.

    The rank's exit code 2 may not reach the script: a launcher that kills the other ranks may end
    with the code of one of those.
    """
    note = wrong_input_note()
    if note:
        with contextlib.suppress(OSError, HpczeroError):  # then the exit code has to say it
            safe_files.touch(note)
