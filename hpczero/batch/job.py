"""Plan a job from a spec and a site: its ranks on nodes, what it asks for, and all checks.

`plan` is pure but for the site's profile; `refuse_launcher` asks Slurm, just before a submission.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero import env
from hpczero.batch import command, sites
from hpczero.batch.scheduler import SCHEDULERS
from hpczero.batch.sites import Partition, Site, gigabytes, hardware
from hpczero.comm.grid import Grid
from hpczero.data.supply import count_tokens
from hpczero.errors import HpczeroError, InputError
from hpczero.model.families import known, layers
from hpczero.planner import fit
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.outlook import Outlook, outlook
from hpczero.planner.platform import as_run
from hpczero.planner.volumes import resolved
from hpczero.spec import site_profile
from hpczero.spec.schema import Batch, Spec
from hpczero.text import format_count, parse_duration, scheduler_duration, toml_repr

_OF_THE_SYSTEM = ("/usr", "/usr/local")


@dataclass(frozen=True)
class SubmitHost:
    """The facts that a job takes over from the computer on which it is rendered."""

    folder: str  # where the job works
    # the virtual environment, or a Python in its own folder; "" for the system's Python, whose
    # folder would come before the modules' programs
    environment: str
    schedulers: tuple[str, ...]  # that are installed

    @classmethod
    def now(cls) -> "SubmitHost":
        environment = sys.prefix if sys.prefix not in _OF_THE_SYSTEM else ""
        installed = [name for name, kind in SCHEDULERS.items() if command.is_here(kind.PROGRAM)]
        return cls(str(Path.cwd()), environment, tuple(installed))


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
    program: tuple[str, ...]  # that each rank runs
    first: tuple[str, ...] = ()  # of a probe: the program up to its save
    run: str = ""  # the run's directory
    submission: str = ""  # the folder of a submitted job's record; "": rendered only
    tag: str = ""  # PBS: marks the run's jobs in the queue
    tasks: int = 0  # of an array of jobs, each a run of a sweep; 0: it is no array
    at_once: int = 0  # tasks that may run at the same time; 0: any number
    members: tuple[str, ...] = ()  # names of the tasks' runs, where each has a script of its own
    is_task: bool = False  # this script is started by that of an array

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def submission_name(self) -> str:
        """The name of the folder of the record, which an array's runs have in common."""
        return Path(self.submission).name

    @property
    def size(self) -> str:
        return f"{format_count(self.ranks, 'rank')} on {format_count(self.nodes, 'node')}"

    @property
    def clock(self) -> str:
        return scheduler_duration(self.walltime)

    @property
    def cost(self) -> str:
        """The job's largest cost, also in the site's own unit if it has one."""
        hours = self.nodes * self.walltime / 3600
        rate = self.partition.charge
        charged = f", charged as {hours * rate:,.4g} {self.facts.charge_unit}" if rate else ""
        return f"at most {hours:,.4g} node-hours{charged}"


def program(batch: Batch, spec: str, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the words of the program that reads this spec; `overrides`: words of --set.

    InputError: a program of the user's own would not see them.
    """
    if not batch.command:
        settings = [word for override in overrides for word in ("--set", override)]
        return ("python3", "-m", "hpczero", "run", spec, *settings)
    unseen = [override for override in overrides if not override.startswith("batch.")]
    if unseen:
        raise InputError(
            f"--set {unseen[0]}: the program of batch.command reads the spec's file, which has not "
            "this value: write it there"
        )
    return tuple(word.replace("{spec}", spec) for word in batch.command)


def plan(spec: Spec, here: SubmitHost, program: tuple[str, ...]) -> BatchJob:
    """Return the job; raise InputError with everything that is wrong."""
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
        launcher=SCHEDULERS[scheduler].LAUNCHER if batch.launcher == "auto" else batch.launcher,
        nodes=batch.nodes,
        ranks_per_node=per_node,
        cpus_per_rank=batch.cpus_per_rank or partition.cpus // per_node,
        gpus_per_node=gpus,
        gpu_select="visible" if batch.gpu_select == "auto" else batch.gpu_select,
        walltime=parse_duration(batch.walltime),
        batch=batch,
        environment=here.environment if batch.venv == "auto" else env.expand(batch.venv),
        folder=here.folder,
        program=program,
    )
    problems = [*_node_problems(job), *_queue_problems(job), *_words(job), *_layout(job, spec)]
    if len(problems) > 1:
        raise InputError("\n  ".join([f"{len(problems)} problems on {name}:", *problems]))
    if problems:
        raise InputError(f"{name}: {problems[0]}")
    return job


def _site(batch: Batch, here: SubmitHost) -> str:
    if batch.site != "auto":
        return batch.site
    if batch.scheduler != "auto":
        return f"generic/{batch.scheduler}"
    if not here.schedulers:
        raise InputError(
            "this computer belongs to no known site and has neither sbatch nor qsub: "
            'say batch.scheduler = "slurm" or "pbs", or batch.site (hpczero site list)'
        )
    return f"generic/{here.schedulers[0]}"


def _scheduler(batch: Batch, partition: Partition, site: Site) -> str:
    """Return the spec's scheduler, else that of the site's profile."""
    specs = [{"batch": {"scheduler": batch.scheduler}}, partition.spec, site.spec]
    names = [spec.get("batch", {}).get("scheduler", "auto") for spec in specs]
    name = next((name for name in names if name != "auto"), "")
    if not name:
        raise InputError(
            "the site's profile does not say which scheduler it has: "
            'batch.scheduler = "slurm" or "pbs"'
        )
    return str(name)


def _node_problems(job: BatchJob) -> Iterator[str]:
    """Hold what is asked of a node against what the site's nodes have."""
    has = job.partition
    per_node = job.ranks_per_node
    gpus = job.gpus_per_node
    cpus = max(1, job.cpus_per_rank)
    asked = f"batch.gpus_per_node = {job.batch.gpus_per_node}"
    ranks = f"batch.ranks_per_node = {per_node}"
    if has.cpus and per_node * cpus > has.cpus:
        yield (
            f"{ranks} x batch.cpus_per_rank = {cpus} makes {per_node * cpus} CPUs, "
            f"and a node has {has.cpus}: at most {has.cpus // cpus} ranks, "
            f"or {has.cpus // per_node} CPUs for each"
        )
    if job.batch.gpus_per_node > has.gpus and (has.gpus or has.cpus):
        yield f"{asked}, and a node has {has.gpus}"
    if job.batch.gpus_per_node and not gpus:
        yield f'{asked}, and train.device = "cpu" uses none: leave one of the two out'
    if gpus and per_node % gpus and gpus % per_node:
        fitting = ", ".join(str(count) for count in range(1, gpus + 1) if gpus % count == 0)
        yield (
            f"{ranks}, batch.gpus_per_node = {gpus}: GPUs are not divisible among them; "
            f"{fitting} ranks would fit"
        )
    if gpus and job.gpu_select == "closest" and (per_node != gpus or job.launcher != "srun"):
        yield (
            'batch.gpu_select = "closest" needs srun and one rank for each GPU: '
            f"here {job.launcher}, {per_node} ranks and {gpus} GPUs on a node"
        )
    if has.memory_gb and job.batch.mem and gigabytes(job.batch.mem) > has.memory_gb:
        yield f'batch.mem = "{job.batch.mem}", and a node has {has.memory_gb} GB'


def _queue_problems(job: BatchJob) -> Iterator[str]:
    """Hold the job's nodes, time and account against the site's queue."""
    batch = job.batch
    if job.walltime == 0:
        yield f'batch.walltime = "{batch.walltime}": a job needs some time'
    has_qos = "qos" in SCHEDULERS[job.scheduler].ONLY_KEYS
    queue = (has_qos and batch.qos) or batch.queue
    longest, refusal = sites.limit(job.partition, queue, job.nodes)
    named = f'the queue "{queue}"' if queue else "it"
    if refusal:
        queues = sites.queues(job.partition)
        yield f"batch.nodes = {job.nodes:,}: {named} {refusal} (queues: {queues})"
    elif longest and job.walltime > parse_duration(longest):
        yield (
            f'batch.walltime = "{batch.walltime}" is more than the {longest} '
            f"that {named} allows for {job.nodes:,} nodes"
        )
    if job.facts.account_required and not batch.account:
        yield "batch.account is missing: this site wants to know who pays"


def _words(job: BatchJob) -> Iterator[str]:
    """Find keys that this scheduler or launcher has no word for, and paths no job can have."""
    batch = job.batch
    for scheduler, kind in SCHEDULERS.items():
        for name in kind.ONLY_KEYS if scheduler != job.scheduler else ():
            if getattr(batch, name):
                yield f"batch.{name} is for {scheduler} only, and this is {job.scheduler}"
    if job.launcher == "srun" and job.scheduler != "slurm":
        yield (
            'batch.launcher = "srun" belongs to Slurm, '
            f'and this is {job.scheduler}: "mpirun" or "mpiexec"'
        )
    if job.launcher == "mpirun" and batch.bind not in ("auto", "none"):
        yield (
            f'batch.bind = "{batch.bind}": each mpirun has its own words for this; '
            '"auto" or "none", and the words in batch.launch_options'
        )
    if batch.env_inherit and batch.env_pass:
        yield (
            "batch.env_pass names variables, and batch.env_inherit = true hands over all of them: "
            "one of the two"
        )
    if batch.container.startswith("shifter:") and job.scheduler != "slurm":
        yield f"batch.container: shifter is known under Slurm only, and this is {job.scheduler}"
    if job.environment and not Path(job.environment).is_absolute():
        venv = toml_repr(job.environment)
        yield f'batch.venv = {venv}: a job needs the whole path (or "auto")'


def _layout(job: BatchJob, spec: Spec) -> Iterator[str]:
    """Check that the ranks form a grid, and that the nodes have the memory it needs."""
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
    if known(spec.model) and not spec.batch.command:
        on_nodes = dict.fromkeys(range(job.nodes), job.ranks_per_node)
        limits = fit.NodeLimits.planned(on_nodes, node, platform)
        _, problem = fit.as_it_fits(spec, layers(spec.model), limits)
        if problem:
            yield problem


def _outlook(spec: Spec, job: BatchJob) -> Outlook | None:
    """Return the predicted time of the job, where its program is hpczero's own.

    InputError if there is no cluster as the spec names one.
    """
    if spec.batch.cluster:
        find(spec.batch.cluster)
    if spec.batch.command:
        return None
    platform = sites.platform(spec, hardware(job.batch, job.partition).gpus)
    nodes = Allocation(job.ranks, job.ranks_per_node)
    return outlook(spec, layers(spec.model), nodes, platform) if known(spec.model) else None


def supply_of(spec: Spec, must_be_here: bool = False) -> list[str]:
    """Return how much text there is for the run, in words; none if a program of its own reads it.

    InputError: the run would refuse what is there.
    """
    supply = None if spec.batch.command else count_tokens(spec, must_be_here)
    if supply is None:
        return []
    key = "data.sources" if spec.data.sources else "data.source"
    return [f"{key} = {line}" for line in supply.in_lines(spec.data.source)]


def print_notes(spec: Spec, job: BatchJob, supply: list[str]) -> None:
    """Say how long the job takes, if that is predicted, which data it has (`supply_of`), and which
    profiles of sites are left out.
    """
    time = _outlook(spec, job)
    for line in [*time.in_lines(), *time.warnings()] if time else []:
        print(f"hpczero: {line}", file=sys.stderr)
    for line in supply:
        print(f"hpczero: {line}", file=sys.stderr)
    for line in site_profile.unusable():
        print(f"hpczero: {line}", file=sys.stderr)


# Which MPI the job's environment has, and whether this site's `srun` starts it.

# PyPI's package -> the MPI in it, and the plugins of Slurm that start it (the first is advised)
_STARTED_BY = {"mpich": ("MPICH", ("pmi2", "cray_shasta")), "openmpi": ("Open MPI", ("pmix",))}
_CHOICE = "SLURM_MPI_TYPE"  # the variable that srun follows where no option says more


def refuse_launcher(job: BatchJob) -> None:
    """Raise InputError if srun cannot start the environment's MPI: every rank would run alone.

    Only warn where a module or a line of setup may change what srun does.
    """
    batch = job.batch
    chosen = any(option.startswith("--mpi") for option in batch.launch_options)
    if job.launcher != "srun" or chosen or batch.container or not job.environment:
        return
    package = _package(Path(job.environment))
    default = _default_plugin()
    if not package or not default or _CHOICE in batch.env or _CHOICE in "\n".join(batch.setup):
        return
    name, plugins = _STARTED_BY[package]
    if default.startswith(plugins):
        return
    message = (
        f"srun cannot start the MPI of {toml_repr(job.environment)}: "
        f"that is {name} (PyPI's {package}), "
        f"and srun starts programs by {toml_repr(default)} here: {_way_out(plugins[0])}"
    )
    if not batch.modules:
        raise InputError(message)
    print(f"hpczero: unless a module changes it, {message}", file=sys.stderr)


def _way_out(plugin: str) -> str:
    """Advise on PMIx with care: Slurm lists it also where the library that it loads is missing."""
    mpirun = 'batch.launcher = "mpirun"'
    option = f'batch.launch_options = ["--mpi={plugin}"]'
    if not _offers(plugin):
        return mpirun
    if plugin == "pmix":
        return f"{mpirun}, or {option} where the nodes have the library of PMIx"
    return f"{option}, or {mpirun}"


def _package(environment: Path) -> str:
    """Return PyPI's MPI in this environment; "" if there is none, or more than one."""
    folders = [str(path) for path in environment.glob("lib/python3*/site-packages")]
    names = {package.name for package in importlib.metadata.distributions(path=folders)}
    packages = sorted(names & _STARTED_BY.keys())
    return packages[0] if len(packages) == 1 else ""


def _default_plugin() -> str:
    """Return the plugin by which srun starts programs; "" if it is not known."""
    if chosen := env.variable(_CHOICE):
        return chosen
    try:
        config = command.output(["scontrol", "show", "config"])
    except HpczeroError:
        return ""
    match = re.search(r"^MpiDefault\s*=\s*(\S+)", config, re.MULTILINE)
    return match[1] if match else ""


def _offers(plugin: str) -> bool:
    try:
        answer = command.run(["srun", "--mpi=list"])
    except HpczeroError:
        return True
    return plugin in f"{answer.out}\n{answer.err}".split() or bool(answer.code)
