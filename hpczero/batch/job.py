"""From a spec and a site to a job: how many ranks lie where, what is asked for. All is decided and checked before a line is written."""

import importlib.metadata
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpczero import env
from hpczero.batch import command, sites
from hpczero.batch.sites import Partition, Site, gigabytes, hardware
from hpczero.comm.grid import Grid
from hpczero.errors import HpczeroError, InputError
from hpczero.model.shapes import known, layers
from hpczero.planner import fit
from hpczero.planner.memory import as_run
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Batch, Spec
from hpczero.text import clock, seconds, shown

_SUBMITS = {"slurm": "sbatch", "pbs": "qsub"}
_OF_THE_SYSTEM = ("/usr", "/usr/local")
_ONLY_FOR = {
    "slurm": ("qos", "constraint", "reservation", "exclude"),
    "pbs": ("pbs_chunk", "pbs_place", "pbs_resources"),
}


@dataclass(frozen=True)
class Here:
    """What a job takes over from where it was rendered."""

    folder: str  # where the job works
    environment: str  # the virtual environment (or a Python of its own folder; none in the system's, which would come before the modules' programs)
    schedulers: tuple[str, ...]  # that are installed

    @classmethod
    def now(cls) -> "Here":
        environment = sys.prefix if sys.prefix not in _OF_THE_SYSTEM else ""
        return cls(
            str(Path.cwd()),
            environment,
            tuple(name for name, program in _SUBMITS.items() if shutil.which(program)),
        )


@dataclass(frozen=True)
class BatchJob:
    name: str
    site: str  # "perlmutter/gpu"
    facts: Site
    partition: Partition
    scheduler: str
    launcher: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int  # 0: not asked for
    gpus_per_node: int
    gpu_select: str
    walltime: int  # seconds
    batch: Batch
    environment: str  # "": none
    folder: str
    arguments: tuple[str, ...]  # of hpczero, in the job
    first: tuple[str, ...] = ()  # of a probe: the arguments of the run up to its save
    run: str = ""  # the run's directory, and
    submission: str = (
        ""  # the folder in it where a submitted job keeps its books; empty: rendered only
    )
    tag: str = ""  # PBS: by which its jobs are known in the queue

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def clock(self) -> str:
        return clock(self.walltime)

    @property
    def cost(self) -> str:
        """In the site's own unit, if it has one."""
        hours = self.nodes * self.walltime / 3600
        rate = self.partition.charge
        charged = f", charged as {hours * rate:,.4g} {self.facts.charge_unit}" if rate else ""
        return f"at most {hours:,.4g} node-hours{charged}"


def plan(spec: Spec, here: Here, arguments: tuple[str, ...]) -> BatchJob:
    """InputError with everything that is wrong."""
    batch = spec.batch
    name, site, partition = sites.facts(_site(batch, here))
    scheduler = _scheduler(batch, partition, site)
    gpus = 0 if spec.train.device == "cpu" else batch.gpus_per_node or partition.gpus
    per_node = batch.ranks_per_node or gpus or 1
    job = BatchJob(
        name=spec.name,
        site=name,
        facts=site,
        partition=partition,
        scheduler=scheduler,
        launcher=batch.launcher
        if batch.launcher != "auto"
        else {"slurm": "srun", "pbs": "mpirun"}[scheduler],
        nodes=batch.nodes,
        ranks_per_node=per_node,
        cpus_per_rank=batch.cpus_per_rank or partition.cpus // per_node,
        gpus_per_node=gpus,
        gpu_select=batch.gpu_select if batch.gpu_select != "auto" else "visible",
        walltime=seconds(batch.walltime),
        batch=batch,
        environment=here.environment if batch.venv == "auto" else env.expand(batch.venv),
        folder=here.folder,
        arguments=arguments,
    )
    if problems := [*_resources(job), *_words(job), *_layout(job, spec)]:
        raise InputError(
            "\n  ".join([f"{len(problems)} problems on {name}:", *problems])
            if len(problems) > 1
            else f"{name}: {problems[0]}"
        )
    return job


def _site(batch: Batch, here: Here) -> str:
    if batch.site != "auto":
        return batch.site
    scheduler = (
        batch.scheduler
        if batch.scheduler != "auto"
        else here.schedulers[0]
        if here.schedulers
        else ""
    )
    if not scheduler:
        raise InputError(
            'this computer belongs to no known site and has neither sbatch nor qsub: say batch.scheduler = "slurm" or "pbs", '
            "or batch.site (hpczero site list)"
        )
    return f"generic/{scheduler}"


def _scheduler(batch: Batch, partition: Partition, site: Site) -> str:
    """The spec's own word; a spec that names the site has it from the profile."""
    if batch.scheduler != "auto":
        return batch.scheduler
    found = [part.get("batch", {}).get("scheduler", "auto") for part in (partition.spec, site.spec)]
    named = next((name for name in found if name != "auto"), "")
    if not named:
        raise InputError(
            'the site\'s profile does not say which scheduler it has: batch.scheduler = "slurm" or "pbs"'
        )
    return str(named)


def _resources(job: BatchJob) -> Iterator[str]:
    """What a node and a queue of the site can give."""
    part, per_node, cpus, gpus = (
        job.partition,
        job.ranks_per_node,
        job.cpus_per_rank,
        job.gpus_per_node,
    )
    if part.cpus and per_node * max(1, cpus) > part.cpus:
        asked = f"batch.ranks_per_node = {per_node} x batch.cpus_per_rank = {max(1, cpus)} makes {per_node * max(1, cpus)} CPUs"
        fitting = (
            f"at most {part.cpus // max(1, cpus)} ranks, or {part.cpus // per_node} CPUs for each"
        )
        yield f"{asked}, and a node has {part.cpus}: {fitting}"
    if job.batch.gpus_per_node > part.gpus and (part.gpus or part.cpus):
        yield f"batch.gpus_per_node = {job.batch.gpus_per_node}, and a node has {part.gpus}"
    if job.batch.gpus_per_node and not gpus:
        yield f'batch.gpus_per_node = {job.batch.gpus_per_node}, and train.device = "cpu" uses none: leave one of the two out'
    if gpus and per_node % gpus and gpus % per_node:
        fitting = ", ".join(str(count) for count in range(1, gpus + 1) if gpus % count == 0)
        yield f"batch.ranks_per_node = {per_node}, batch.gpus_per_node = {gpus}: GPUs are not divisible among them; {fitting} ranks would fit"
    if gpus and job.gpu_select == "closest" and (per_node != gpus or job.launcher != "srun"):
        yield f'batch.gpu_select = "closest" needs srun and one rank for each GPU: here {job.launcher}, {per_node} ranks and {gpus} GPUs on a node'
    if part.memory_gb and job.batch.mem and gigabytes(job.batch.mem) > part.memory_gb:
        yield f'batch.mem = "{job.batch.mem}", and a node has {part.memory_gb} GB'
    if job.walltime == 0:
        yield f'batch.walltime = "{job.batch.walltime}": a job needs some time'
    queue = job.batch.queue if job.scheduler == "pbs" else job.batch.qos or job.batch.queue
    longest, refused = sites.limit(part, queue, job.nodes)
    named = f'the queue "{queue}"' if queue else "it"
    if refused:
        yield f"batch.nodes = {job.nodes:,}: {named} {refused} (queues: {sites.queues(part)})"
    elif longest and job.walltime > seconds(longest):
        yield f'batch.walltime = "{job.batch.walltime}" is more than the {longest} that {named} allows for {job.nodes:,} nodes'
    if job.facts.account_required and not job.batch.account:
        yield "batch.account is missing: this site wants to know who pays"


def _words(job: BatchJob) -> Iterator[str]:
    """Keys that this scheduler or launcher has no word for, and paths that a job cannot have."""
    for scheduler, names in _ONLY_FOR.items():
        if scheduler != job.scheduler:
            yield from (
                f"batch.{name} is for {scheduler} only, and this is {job.scheduler}"
                for name in names
                if getattr(job.batch, name)
            )
    if job.launcher == "srun" and job.scheduler != "slurm":
        yield f'batch.launcher = "srun" belongs to Slurm, and this is {job.scheduler}: "mpirun" or "mpiexec"'
    if job.launcher == "mpirun" and job.batch.bind not in ("auto", "none"):
        yield f'batch.bind = "{job.batch.bind}": each mpirun has its own words for this; "auto" or "none", and the words in batch.launch_options'
    if job.batch.env_inherit and job.batch.env_pass:
        yield "batch.env_pass names variables, and batch.env_inherit = true hands over all of them: one of the two"
    if job.batch.container.startswith("shifter:") and job.scheduler != "slurm":
        yield f"batch.container: shifter is known under Slurm only, and this is {job.scheduler}"
    if job.environment and not Path(job.environment).is_absolute():
        yield f'batch.venv = {shown(job.environment)}: a job needs the whole path (or "auto")'


def _layout(job: BatchJob, spec: Spec) -> Iterator[str]:
    """Whether the ranks make a grid, and whether what they hold fits the nodes."""
    node_of_rank = [rank // job.ranks_per_node for rank in range(job.ranks)]
    node = hardware(job.batch, job.partition)
    platform = sites.platform(spec, node.gpus)
    if platform.on_gpus and job.partition.cpus and not node.gpus:
        way_out = 'take another partition, or train.device = "auto" or "cpu"'
        yield f'train.device = "cuda", and a node of {job.site} has no GPU: {way_out}'
        return
    spec = as_run(spec, platform.device)
    try:
        Grid.build(resolved(spec, node_of_rank), node_of_rank)
    except InputError as error:
        yield f"{error} (batch.nodes = {job.nodes} x batch.ranks_per_node = {job.ranks_per_node})"
        return
    if known(spec.model):
        on_nodes = dict.fromkeys(range(job.nodes), job.ranks_per_node)
        site = fit.Site.planned(on_nodes, node, platform)
        if refusal := fit.final_refusal(spec, layers(spec.model), site):
            yield refusal


# Which MPI the job's environment brings along, and whether this site's `srun` starts it.
# PyPI's package -> the MPI in it, and the plugins of Slurm that start it (the first is advised)
_STARTED_BY = {"mpich": ("MPICH", ("pmi2", "cray_shasta")), "openmpi": ("Open MPI", ("pmix",))}
_CHOICE = "SLURM_MPI_TYPE"  # the variable that srun goes by where no option says more


def refuse_launcher(job: BatchJob) -> None:
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
