"""What a site's profile says of its computers and queues: data, read from TOML (where it lies: `hpczero.spec.site_profile`)."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hpczero import env
from hpczero.errors import InputError
from hpczero.planner.platform import Hardware, Platform, device_of
from hpczero.spec import site_profile as profiles
from hpczero.spec.schema import VARIABLE, WALLTIME, WORD, Batch, Spec, Table
from hpczero.text import listed, printable

_Word = Annotated[str, Field(pattern=WORD, min_length=1)]
_Name = Annotated[str, Field(pattern=VARIABLE)]


class Limit(Table):
    """A job of `least` to `nodes` nodes in `queue` (empty: in all) may take so long. Of the rows for a queue the first with enough nodes counts."""

    queue: str = ""
    least: int = Field(default=1, ge=1)
    nodes: int = Field(ge=1)
    walltime: Annotated[str, Field(pattern=WALLTIME, min_length=1)]


class Partition(Table):
    """Computers that are alike. 0: not known."""

    description: str = ""
    support: Literal["tested", "rendered-only"] = "rendered-only"  # tested: jobs have run; rendered-only: scripts follow the site's manual
    cpus: int = Field(default=0, ge=0)  # of a node, as the scheduler counts them
    memory_gb: int = Field(default=0, ge=0)  # of a node, as the scheduler counts it
    gpus: int = Field(default=0, ge=0)  # of a node
    gpu_memory_gb: int = Field(default=0, ge=0)  # of each
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"  # how Slurm is asked for them
    gpu_variable: _Name = "CUDA_VISIBLE_DEVICES"  # by which a wrapper shows a rank its own
    gpu_order: tuple[_Word, ...] = Field(default=(), strict=False)  # device of local rank 0, 1, ...; empty: as numbered
    chunk: tuple[Literal["ncpus", "mpiprocs", "ngpus"], ...] | None = Field(default=None, strict=False)  # PBS: what a chunk asks for; None: all known
    totals: bool = False  # PBS without select: the sums over all nodes are asked for
    limits: tuple[Limit, ...] = Field(default=(), strict=False)
    probe: dict[str, str] = Field(default={})  # keys of [batch] for a probe: where short jobs begin soon
    charge: float = Field(default=0, ge=0)  # for a node for an hour
    spec: dict[str, Any] = Field(default={})


class Site(Table):
    description: str
    hosts: tuple[str, ...] = Field(default=(), strict=False)  # patterns of host names
    variables: dict[str, str] = Field(default={})  # that the site sets
    account_required: bool = False
    account_option: Literal["-A", "-P"] = "-A"  # PBS: the option that names who pays
    charge_unit: str = "node-hours"
    template: str = ""  # beside the profile; extends slurm.sh.j2 or pbs.sh.j2
    partitions: dict[str, Partition]
    spec: dict[str, Any] = Field(default={})


def facts(name: str) -> tuple[str, Site, Partition]:
    """Of "site" or "site/partition": its full name, the site, the partition."""
    found, partition, profile = profiles.read(name)
    try:
        site = Site.model_validate(profile.tree)
    except ValidationError as error:
        found_wrong = error.errors(include_url=False, include_input=False, include_context=False)
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found_wrong]
        raise InputError(f"{profile.file} is no profile of a site: {printable('; '.join(wrong))}") from None
    return f"{found}/{partition}", site, site.partitions[partition]


def all_names() -> list[str]:
    """Every "site/partition" there is."""
    return [f"{name}/{partition}" for name in profiles.profiles() for partition in profiles.read(name)[2].tree["partitions"]]


def hardware(batch: Batch, partition: Partition) -> Hardware:
    """Return what a job has of each node: what the spec asks for, else what the partition's have."""
    memory = gigabytes(batch.mem) if batch.mem else partition.memory_gb
    gpus = batch.gpus_per_node or partition.gpus
    return Hardware(memory, gpus, partition.gpu_memory_gb)


def platform(spec: Spec, gpus: int) -> Platform:
    """Return what a job on nodes with so many GPUs runs on, as far as a login node can tell.

    hpczero's kernels are counted on where the package that they need is installed: by default a job
    uses the Python environment that it was rendered in.
    """
    device = device_of(spec, gpus)
    ours = device == "cuda" and spec.model.kernels == "auto" and env.has_package("numba_cuda")
    native = device == "cuda" and spec.comm.backend != "mpi"
    return Platform(device, frozenset({"cross_entropy"} if ours else ()), native)


def gigabytes(text: str) -> float:
    """Return the size as schedulers count: 512000M are 500G."""
    return int(text[:-1]) * {"M": 1 / 1024, "G": 1, "T": 1024}[text[-1]]


def limit(partition: Partition, queue: str, nodes: int) -> tuple[str, str]:
    """The longest walltime for so many nodes ("" where nothing is known), and else why they are too many or too few."""
    rows = [row for row in partition.limits if row.queue in ("", queue)]
    for row in rows:
        if nodes < row.least:
            return "", f"has at least {row.least:,} nodes for a job"
        if nodes <= row.nodes:
            return row.walltime, ""
    return "", f"has at most {max(row.nodes for row in rows):,} nodes for a job" if rows else ""


def queues(partition: Partition) -> str:
    return listed(sorted({row.queue for row in partition.limits if row.queue}) or ["none named"])
