"""The only reader of the environment (style 5): every variable that hpczero looks at is named here."""

import contextlib
import json
import os
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

VERSION = "0.1.0.dev0"

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
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )


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
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(leftover)
    }


def site_folders() -> list[Path]:
    """$HPCZERO_SITES, separated as in $PATH."""
    return [
        Path(folder) for folder in os.environ.get("HPCZERO_SITES", "").split(os.pathsep) if folder
    ]


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
    for size in (
        "UCX_TCP_TX_SEG_SIZE",
        "UCX_TCP_RX_SEG_SIZE",
    ):  # what a call moves over TCP: too little for a poll a millisecond
        os.environ.setdefault(size, "512k")
    os.environ.setdefault(
        "OMPI_MCA_osc", "^ucx"
    )  # Open MPI 5's wheel: "OSC UCX component priority set" for every window


def python_command(module: str) -> list[str]:
    """Return the command that runs a module of hpczero as this process would.

    It looks for packages where this process does. `python -m` would begin with the current folder,
    in which a stranger may have put an `h5py.py`.
    """
    begin = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_module"
    return [sys.executable, "-P", "-c", f"{begin}({module!r}, run_name='__main__')"]


# Where the files that belong to hpczero lie: in the checkout, or in the installation's share folder.
#
# The checkout comes first: what runs from a checkout (or an editable install of it) uses the checkout's kernels,
# templates and job specs, whatever else is installed.
_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def in_checkout() -> bool:
    return (_CHECKOUT / "setup.cfg").is_file() and (
        _CHECKOUT / "numba_cuda" / "hpczero_kernels"
    ).is_dir()


def install(extra: str) -> str:
    """The command that adds an extra to this hpczero."""
    return install_command(sys.executable, source(), extra)


def install_command(executable: str, source: str, extra: str) -> str:
    """From its source, as no package index has it; of an unknown one ("") the reader knows the folder."""
    wanted = shlex.quote(f"{source or '.'}[{extra}]")
    return f"{shlex.quote(executable)} -m pip install {wanted}" + (
        "" if source else ", in the folder of hpczero's source"
    )


def source() -> str:
    """The checkout, or the folder or file that pip was given, if it is still there; else ""."""
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
    """In a checkout the package `hpczero_kernels` lies under numba_cuda/, which is not on the path by itself."""
    folder = str(_CHECKOUT / "numba_cuda")
    if in_checkout() and folder not in sys.path:
        sys.path.insert(0, folder)


def shared_folder(name: str) -> Path:
    """The folder `templates`, `sites` or `jobspecs`."""
    roots = [Path(sysconfig.get_path("data")), Path(site.getuserbase()), _PACKAGE.parent]
    candidates = [root / "share" / "hpczero" / name for root in roots]
    if in_checkout():
        candidates.insert(0, _CHECKOUT / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise HpczeroError(
        f"hpczero's folder '{name}' is missing; looked in {', '.join(map(str, candidates))}: install hpczero again"
    )


# A note to the script of the batch job: a rank found the input wrong.
#
# Exit code 2 of one rank may not reach the script: a launcher that kills the other ranks may end with
# the code of one of those.
def wrong_input() -> None:
    """Leave the note, if this process belongs to a job whose script looks for one."""
    note = wrong_input_note()
    if note:
        with contextlib.suppress(OSError, HpczeroError):  # then the exit code has to say it
            safe_files.touch(note)
