"""Which MPI the job's environment brings along, and whether this site's `srun` starts it."""

import importlib.metadata
import re
import sys
from pathlib import Path

from hpczero import env
from hpczero.batch import command
from hpczero.batch.job import Job
from hpczero.errors import HpczeroError, InputError
from hpczero.text import shown

# PyPI's package -> the MPI in it, and the plugins of Slurm that start it (the first is advised)
_STARTED_BY = {"mpich": ("MPICH", ("pmi2", "cray_shasta")), "openmpi": ("Open MPI", ("pmix",))}
_CHOICE = "SLURM_MPI_TYPE"  # the variable that srun goes by where no option says more


def refuse_launcher(job: Job) -> None:
    """InputError if every rank would run alone: srun does not speak the MPI's language.

    Only a warning where a module or a line of setup may change what srun does.
    """
    batch = job.batch
    told = any(option.startswith("--mpi") for option in batch.launch_options)
    if job.launcher != "srun" or told or batch.container or not job.environment:
        return
    package, default = _package(Path(job.environment)), _default()
    if not package or not default or _CHOICE in batch.env or _CHOICE in "\n".join(batch.setup):
        return
    name, plugins = _STARTED_BY[package]
    if default.startswith(plugins):
        return
    message = (
        f"srun cannot start the MPI of {shown(job.environment)}: "
        f"that is {name} (PyPI's {package}), "
        f"and srun starts programs by {shown(default)} here: {_way_out(plugins[0])}"
    )
    if not batch.modules:
        raise InputError(message)
    print(f"hpczero: unless a module changes it, {message}", file=sys.stderr)


def _way_out(plugin: str) -> str:
    """Slurm lists PMIx also where the library that it loads for it is missing."""
    mpirun, option = 'batch.launcher = "mpirun"', f'batch.launch_options = ["--mpi={plugin}"]'
    if not _offers(plugin):
        return mpirun
    if plugin == "pmix":
        return f"{mpirun}, or {option} where the nodes have the library of PMIx"
    return f"{option}, or {mpirun}"


def _package(environment: Path) -> str:
    """PyPI's MPI in this environment; "" if there is none, or more than one."""
    folders = [str(path) for path in environment.glob("lib/python3*/site-packages")]
    names = {found.name for found in importlib.metadata.distributions(path=folders)}
    packages = sorted(names & _STARTED_BY.keys())
    return packages[0] if len(packages) == 1 else ""


def _default() -> str:
    """How srun starts programs if nobody says more; "" if that is not known."""
    if chosen := env.variable(_CHOICE):
        return chosen
    try:
        found = re.search(
            r"^MpiDefault\s*=\s*(\S+)", command.output(["scontrol", "show", "config"]), re.MULTILINE
        )
    except HpczeroError:
        return ""
    return found[1] if found else ""


def _offers(plugin: str) -> bool:
    try:
        answer = command.run(["srun", "--mpi=list"])
    except HpczeroError:
        return True
    return plugin in f"{answer.out}\n{answer.err}".split() or bool(answer.code)
