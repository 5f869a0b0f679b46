"""The only reader of the environment (style 5): every variable that hpczero looks at is named here."""

import os
import sys
import tempfile
from importlib import util
from pathlib import Path

# name of the launcher -> (variable with the rank, variable with the number of ranks)
_LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
    "PALS": ("PALS_RANKID", "PALS_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def home() -> Path:
    return Path(os.path.expanduser("~"))


def cache_folder() -> Path:
    """The user's cache: $XDG_CACHE_HOME/hpczero, else ~/.cache/hpczero."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "hpczero"


def node_folder() -> Path:
    """A folder of this user's on this computer, for what may vanish at any time: in $TMPDIR, else /tmp."""
    return Path(tempfile.gettempdir()) / f"hpczero-{os.getuid()}"


def numba_cache() -> str | None:
    """Where numba keeps compiled kernels, if anybody has said."""
    return variable("NUMBA_CACHE_DIR")


def use_numba_cache(folder: Path) -> None:
    """Before numba is imported."""
    os.environ["NUMBA_CACHE_DIR"] = str(folder)


def tells_malloc() -> bool:
    """Whether somebody has said what glibc's malloc is to do."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ)


def config_folder() -> Path:
    """The user's settings: $XDG_CONFIG_HOME/hpczero, else ~/.config/hpczero."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "hpczero"


def state_folder() -> Path:
    """What hpczero remembers of the user's runs: $XDG_STATE_HOME/hpczero, else ~/.local/state/hpczero."""
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state") / "hpczero"


def for_scheduler() -> dict[str, str]:
    """The environment for a scheduler's command: without what is left over from a job that this process may run in."""
    leftover = ("SBATCH_", "SLURM_", "SRUN_", "PBS_", "PMI_", "PMIX_")
    kept = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_SERVER")  # where the scheduler is
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(leftover)}


def site_folders() -> list[Path]:
    """$HPCZERO_SITES, separated as in $PATH."""
    return [Path(folder) for folder in os.environ.get("HPCZERO_SITES", "").split(os.pathsep) if folder]


def variable(name: str) -> str | None:
    return os.environ.get(name) or None


def expand(text: str) -> str:
    """`~`, `$SCRATCH`, `${USER}` as the shell would write them; an unknown variable stays as it is."""
    return os.path.expandvars(os.path.expanduser(text))


def launched_tasks() -> dict[str, tuple[int, int]]:
    """What each launcher's variables say of this process: launcher -> (rank, number of ranks)."""
    found = {}
    for launcher, (rank, size) in _LAUNCHERS.items():
        if os.environ.get(rank, "").isdigit() and os.environ.get(size, "").isdigit():
            found[launcher] = (int(os.environ[rank]), int(os.environ[size]))
    return found


def forced_kernels() -> str:
    """Implementations of operations that are to be taken, as in HPCZERO_KERNELS=norm=torch,adamw=torch (docs/kernels.md)."""
    return os.environ.get("HPCZERO_KERNELS", "")


def has_package(name: str) -> bool:
    """Return whether Python finds this package. A folder of the name, as in a checkout, is none."""
    found = util.find_spec(name)
    return found is not None and found.origin is not None


def wrong_input_note() -> Path | None:
    """Return the file for a rank's note that the input is wrong: its launcher may say otherwise."""
    note = variable("HPCZERO_WRONG_INPUT")
    return Path(note) if note else None


def batch_job() -> str | None:
    """The batch system's name for the job that this process belongs to."""
    return variable("SLURM_JOB_ID") or variable("PBS_JOBID")


def deadline() -> float | None:
    """When the batch job ends, in seconds since 1970: what its script has found out ($HPCZERO_DEADLINE), or Slurm since 23.02 says."""
    for text in (variable("HPCZERO_DEADLINE"), variable("SLURM_JOB_END_TIME")):
        if text and text.isdecimal():
            return float(text)
    return None


def prepare_mpi() -> None:
    """Before MPI starts: settings without which a library complains about nothing, or is slow; what the user has set stays."""
    for size in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):  # what a call moves over TCP: too little for a poll a millisecond
        os.environ.setdefault(size, "512k")
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # Open MPI 5's wheel: "OSC UCX component priority set" for every window


def python_command(module: str) -> list[str]:
    """Return the command that runs a module of hpczero as this process would.

    It looks for packages where this process does. `python -m` would begin with the current folder,
    in which a stranger may have put an `h5py.py`.
    """
    begin = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_module"
    return [sys.executable, "-P", "-c", f"{begin}({module!r}, run_name='__main__')"]
