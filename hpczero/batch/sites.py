"""A site's computers and queues, read from its TOML profile or written into a new one.

`hpczero.spec.site_profile` finds the profiles, and takes from them what a spec leaves open.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hpczero import env
from hpczero.batch import command
from hpczero.batch.scheduler import SCHEDULERS
from hpczero.errors import HpczeroError, InputError
from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY
from hpczero.planner import cluster
from hpczero.planner.needs import Hardware
from hpczero.planner.platform import Platform, device_of
from hpczero.spec import site_profile as profiles
from hpczero.spec.load import toml_value
from hpczero.spec.schema import Batch, Spec
from hpczero.spec.table import VARIABLE, WALLTIME, WORD, Table
from hpczero.text import join_words, printable

_Word = Annotated[str, Field(pattern=WORD, min_length=1)]
_Name = Annotated[str, Field(pattern=VARIABLE)]
_Resource = Literal["ncpus", "mpiprocs", "ngpus"]


class Limit(Table):
    """The longest walltime of a job of `least` to `nodes` nodes in `queue` (empty: in all).

    Of the rows for a queue the first with enough nodes counts.
    """

    queue: str = ""
    least: int = Field(default=1, ge=1)
    nodes: int = Field(ge=1)
    walltime: Annotated[str, Field(pattern=WALLTIME, min_length=1)]


class Partition(Table):
    """Computers of one kind; 0 stands for an unknown number."""

    description: str = ""
    # tested: jobs have run; rendered-only: scripts follow the site's manual
    support: Literal["tested", "rendered-only"] = "rendered-only"
    cpus: int = Field(default=0, ge=0)  # of a node, as the scheduler counts them
    memory_gb: int = Field(default=0, ge=0)  # of a node, as the scheduler counts it
    gpus: int = Field(default=0, ge=0)  # of a node
    gpu_memory_gb: int = Field(default=0, ge=0)  # of each
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"  # Slurm's option
    gpu_variable: _Name = "CUDA_VISIBLE_DEVICES"  # a wrapper shows a rank its GPU by it
    # device of local rank 0, 1, ...; empty: as numbered
    gpu_order: tuple[_Word, ...] = Field(default=(), strict=False)
    # PBS: what a chunk asks for; None: all known
    chunk: tuple[_Resource, ...] | None = Field(default=None, strict=False)
    totals: bool = False  # PBS without select: the sums over all nodes are asked for
    limits: tuple[Limit, ...] = Field(default=(), strict=False)
    probe: dict[str, str] = Field(
        default={}
    )  # keys of [batch] for a probe: where short jobs begin soon
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
    """Look up "site" or "site/partition"; return its full name, the site and the partition."""
    site_name, partition, profile = profiles.read_profile(name)
    try:
        site = Site.model_validate(profile.tree)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors]
        raise InputError(
            f"{profile.file} is no profile of a site: {printable('; '.join(wrong))}"
        ) from None
    return f"{site_name}/{partition}", site, site.partitions[partition]


def all_names() -> list[str]:
    """Return "site/partition" for each partition of each site."""
    return [
        f"{name}/{partition}"
        for name in profiles.profiles()
        for partition in profiles.read_profile(name)[2].tree["partitions"]
    ]


def hardware(batch: Batch, partition: Partition) -> Hardware:
    """Return the hardware a job has on each node: as the spec asks, else as the partition has.

    What neither says is that of the cluster, if there is one.
    """
    memory = gigabytes(batch.mem) if batch.mem else partition.memory_gb
    gpus = batch.gpus_per_node or partition.gpus
    known = Hardware(memory, gpus, partition.gpu_memory_gb)
    return known.completed(cluster.find(batch.cluster).cluster.hardware) if batch.cluster else known


def platform(spec: Spec, gpus: int) -> Platform:
    """Predict on a login node what a job runs on whose nodes have so many GPUs.

    hpczero's own kernels for GPUs are expected where the package that they need is installed: by
    default a job uses the Python environment that it was rendered in. Those for CPUs need nothing
    that a job can do without.
    """
    device = device_of(spec, gpus)
    ours = spec.model.kernels == "auto" and (device == "cpu" or env.has_package("numba_cuda"))
    native = device == "cuda" and spec.comm.backend != "mpi"
    return Platform(device, KERNELS_THAT_CHANGE_MEMORY[device] if ours else frozenset(), native)


def gigabytes(text: str) -> float:
    """Return the size as schedulers count: 512000M are 500G."""
    return int(text[:-1]) * {"M": 1 / 1024, "G": 1, "T": 1024}[text[-1]]


def limit(partition: Partition, queue: str, nodes: int) -> tuple[str, str]:
    """Return the longest walltime for so many nodes ("": unknown), and the queue's refusal."""
    rows = [row for row in partition.limits if row.queue in ("", queue)]
    for row in rows:
        if nodes < row.least:
            return "", f"has at least {row.least:,} nodes for a job"
        if nodes <= row.nodes:
            return row.walltime, ""
    return "", f"has at most {max(row.nodes for row in rows):,} nodes for a job" if rows else ""


def queues(partition: Partition) -> str:
    return join_words(
        sorted({row.queue for row in partition.limits if row.queue}) or ["none named"]
    )


# A new profile for this computer's site, from what its scheduler says of its queues.


def profile(name: str) -> str:
    """Ask the first scheduler that answers: one that does not run may have its commands here."""
    failed = []
    for scheduler, kind in SCHEDULERS.items():
        if shutil.which(kind.LIST_QUEUES[0]):
            try:
                text = command.output(kind.LIST_QUEUES)
                return _written(name, scheduler, kind.queues(text), kind.queues_left_out(text))
            except HpczeroError as error:
                failed.append(str(error))
    nowhere = (
        "neither sinfo (Slurm) nor qstat (PBS) is on this computer: go where jobs are submitted"
    )
    raise HpczeroError("; ".join(failed) or nowhere)


def _written(
    name: str, scheduler: str, partitions: Mapping[str, Mapping[str, Any]], missing: Sequence[str]
) -> str:
    if not partitions:
        raise HpczeroError("the scheduler names no partition or queue that is open")
    lines = [
        "# Made from what the scheduler said: hpczero site new. "
        "What it did not say is 0 or missing; docs/batch.md has all keys."
    ]
    if missing:
        lines.append(f"# left out: {printable(', '.join(missing))}")
    lines += [
        f"description = {toml_value(name)}",
        "hosts = [] # patterns of host names by which this site is known",
        "",
        "[spec.batch]",
        f"scheduler = {toml_value(scheduler)}",
    ]
    for queue, known in partitions.items():
        lines += _table(queue, known)
    return "\n".join(lines) + "\n"


def _table(queue: str, known: Mapping[str, Any]) -> list[str]:
    """Write the table of a queue; signs that a partition's name cannot have become "-"."""
    table = re.sub(r"[^A-Za-z0-9_.-]", "-", queue).lstrip("_.-") or "queue"
    lines = ["", f"[partitions.{toml_value(table)}]"]
    lines += [f"{key} = {known[key]}" for key in ("cpus", "memory_gb", "gpus") if known.get(key)]
    if known["walltime"]:
        nodes = known["nodes"] or 1_000_000
        row = {"queue": queue, "nodes": nodes, "walltime": known["walltime"]}
        keys = ", ".join(f"{key} = {toml_value(value)}" for key, value in row.items())
        lines.append(f"limits = [{{ {keys} }}]")
    return [
        *lines,
        f"[partitions.{toml_value(table)}.spec.batch]",
        f"queue = {toml_value(queue)}",
    ]
