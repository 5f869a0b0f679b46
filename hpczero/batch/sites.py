"""What a site's profile says of its computers and queues: data, read from TOML (where it lies: `hpczero.spec.site_profile`)."""

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hpczero import env
from hpczero.batch import command
from hpczero.errors import HpczeroError, InputError
from hpczero.planner.memory import Hardware, Platform, device_of
from hpczero.spec import site_profile as profiles
from hpczero.spec.reference import toml_value
from hpczero.spec.schema import VARIABLE, WALLTIME, WORD, Batch, Spec, Table
from hpczero.text import clock, listed, printable

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
    support: Literal["tested", "rendered-only"] = (
        "rendered-only"  # tested: jobs have run; rendered-only: scripts follow the site's manual
    )
    cpus: int = Field(default=0, ge=0)  # of a node, as the scheduler counts them
    memory_gb: int = Field(default=0, ge=0)  # of a node, as the scheduler counts it
    gpus: int = Field(default=0, ge=0)  # of a node
    gpu_memory_gb: int = Field(default=0, ge=0)  # of each
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"  # how Slurm is asked for them
    gpu_variable: _Name = "CUDA_VISIBLE_DEVICES"  # by which a wrapper shows a rank its own
    gpu_order: tuple[_Word, ...] = Field(
        default=(), strict=False
    )  # device of local rank 0, 1, ...; empty: as numbered
    chunk: tuple[Literal["ncpus", "mpiprocs", "ngpus"], ...] | None = Field(
        default=None, strict=False
    )  # PBS: what a chunk asks for; None: all known
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
    """Of "site" or "site/partition": its full name, the site, the partition."""
    found, partition, profile = profiles.read(name)
    try:
        site = Site.model_validate(profile.tree)
    except ValidationError as error:
        found_wrong = error.errors(include_url=False, include_input=False, include_context=False)
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found_wrong]
        raise InputError(
            f"{profile.file} is no profile of a site: {printable('; '.join(wrong))}"
        ) from None
    return f"{found}/{partition}", site, site.partitions[partition]


def all_names() -> list[str]:
    """Every "site/partition" there is."""
    return [
        f"{name}/{partition}"
        for name in profiles.profiles()
        for partition in profiles.read(name)[2].tree["partitions"]
    ]


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


# A profile for this computer's site, from what its scheduler says: `sinfo` under Slurm, `qstat -Qf` under PBS.
_SINFO = ["sinfo", "--noheader", "--format=%R|%c|%m|%G|%l|%D"]
_QSTAT = ["qstat", "-Qf"]


def profile(name: str) -> str:
    """Ask the first scheduler that answers: commands of one that does not run may be installed."""
    failed = []
    if shutil.which("sinfo"):
        try:
            return _written(name, "slurm", of_sinfo(command.output(_SINFO)), [])
        except HpczeroError as error:
            failed.append(str(error))
    if shutil.which("qstat"):
        try:
            text = command.output(_QSTAT)
            return _written(name, "pbs", of_qstat(text), left_out(text))
        except HpczeroError as error:
            failed.append(str(error))
    nowhere = (
        "neither sinfo (Slurm) nor qstat (PBS) is on this computer: go where jobs are submitted"
    )
    raise HpczeroError("; ".join(failed) or nowhere)


def of_sinfo(text: str) -> dict[str, dict[str, Any]]:
    """Partition -> what is known. Nodes that differ come on lines of their own: the smallest figure of each holds for all of them."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        queue, cpus, memory, gres, limit, nodes = (part.strip() for part in line.split("|"))
        here: dict[str, Any] = {
            "cpus": _number(cpus),
            "memory_gb": _number(memory) // 1024,
            "gpus": _gpus(gres),
        }
        before = found.get(queue)
        count = _number(nodes) + (before["nodes"] if before else 0)
        if before:
            here = {key: min(value, before[key]) for key, value in here.items()}
        found[queue] = here | {"nodes": count, "walltime": _slurm_limit(limit)}
    return found


def of_qstat(text: str) -> dict[str, dict[str, Any]]:
    """Queue -> its longest walltime and most nodes; only those that a user's jobs run in."""
    found = {}
    for queue, values in _queues(text).items():
        if not _closed(values):
            walltime = values.get("resources_max.walltime", "")
            found[queue] = {
                "nodes": _number(values.get("resources_max.nodect", "")),
                "walltime": walltime if re.fullmatch(r"\d{1,5}:\d\d:\d\d", walltime) else "",
            }
    return found


def left_out(text: str) -> list[str]:
    """The queues of `qstat -Qf` that have no place in a profile, and why."""
    return [
        f"{queue} ({why})" for queue, values in _queues(text).items() if (why := _closed(values))
    ]


def _queues(text: str) -> dict[str, dict[str, str]]:
    found = {}
    for block in re.split(r"^Queue: ", text, flags=re.MULTILINE)[1:]:
        queue, _, rest = block.partition("\n")
        found[queue.strip()] = dict(
            line.strip().partition(" = ")[::2] for line in rest.splitlines() if " = " in line
        )
    return found


def _closed(values: Mapping[str, str]) -> str:
    """Why no job of a user's runs in this queue."""
    if values.get("queue_type") != "Execution":
        return "hands jobs on to others"
    if values.get("enabled") != "True":
        return "takes no jobs"
    if values.get("started") != "True":
        return "stopped"
    return "takes jobs from another queue only" if values.get("from_route_only") == "True" else ""


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _gpus(gres: str) -> int:
    """Of "gpu:a100:4(S:0-1),craynetwork:1"."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))


def _slurm_limit(text: str) -> str:
    """Of "1-12:00:00", "30:00" (minutes first) or "infinite"."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return ""
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return clock(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _written(
    name: str, scheduler: str, partitions: Mapping[str, Mapping[str, Any]], missing: Sequence[str]
) -> str:
    if not partitions:
        raise HpczeroError("the scheduler names no partition or queue that is open")
    lines = [
        "# Made from what the scheduler said: hpczero site new. What it did not say is 0 or missing; docs/batch.md has all keys."
    ]
    lines += [f"# left out: {printable(', '.join(missing))}"] if missing else []
    lines += [
        f"description = {toml_value(name)}",
        "hosts = [] # patterns of host names by which this site is known",
    ]
    lines += ["", "[spec.batch]", f"scheduler = {toml_value(scheduler)}"]
    for queue, known in partitions.items():
        table = re.sub(r"[^A-Za-z0-9_.-]", "-", queue).lstrip("_.-") or "queue"
        lines += ["", f"[partitions.{toml_value(table)}]"]
        lines += [
            f"{key} = {known[key]}" for key in ("cpus", "memory_gb", "gpus") if known.get(key)
        ]
        if known["walltime"]:
            row = {
                "queue": queue,
                "nodes": known["nodes"] or 1_000_000,
                "walltime": known["walltime"],
            }
            lines.append(
                "limits = [{ "
                + ", ".join(f"{key} = {toml_value(value)}" for key, value in row.items())
                + " }]"
            )
        lines += [f"[partitions.{toml_value(table)}.spec.batch]", f"queue = {toml_value(queue)}"]
    return "\n".join(lines) + "\n"
