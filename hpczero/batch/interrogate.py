"""A profile for this computer's site, from what its scheduler says: `sinfo` under Slurm, `qstat -Qf` under PBS."""

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from hpczero.batch import command
from hpczero.errors import HpczeroError
from hpczero.spec.duration import clock
from hpczero.spec.toml import toml_value
from hpczero.text import printable

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
        here: dict[str, Any] = {"cpus": _number(cpus), "memory_gb": _number(memory) // 1024, "gpus": _gpus(gres)}
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
    lines = ["# Made from what the scheduler said: hpczero site new. What it did not say is 0 or missing; docs/batch.md has all keys."]
    lines += [f"# left out: {printable(', '.join(missing))}"] if missing else []
    lines += [f"description = {toml_value(name)}", "hosts = [] # patterns of host names by which this site is known"]
    lines += ["", "[spec.batch]", f"scheduler = {toml_value(scheduler)}"]
    for queue, known in partitions.items():
        table = re.sub(r"[^A-Za-z0-9_.-]", "-", queue).lstrip("_.-") or "queue"
        lines += ["", f"[partitions.{toml_value(table)}]"]
        lines += [f"{key} = {known[key]}" for key in ("cpus", "memory_gb", "gpus") if known.get(key)]
        if known["walltime"]:
            row = {"queue": queue, "nodes": known["nodes"] or 1_000_000, "walltime": known["walltime"]}
            lines.append("limits = [{ " + ", ".join(f"{key} = {toml_value(value)}" for key, value in row.items()) + " }]")
        lines += [f"[partitions.{toml_value(table)}.spec.batch]", f"queue = {toml_value(queue)}"]
    return "\n".join(lines) + "\n"
