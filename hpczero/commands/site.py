"""`hpczero site list`, `show`, `new` and `hpczero render`: what a site wants of a job.

They run on login nodes: no torch, no mpi4py, no psutil.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.batch import sites
from hpczero.batch.job import BatchJob, SubmitHost, plan, print_notes, program, supply_of
from hpczero.batch.render import render as script_of
from hpczero.batch.sites import Limit, Partition, all_names, facts
from hpczero.errors import InputError, for_terminal
from hpczero.safe_files import make_folders, write_new, write_text
from hpczero.spec import site_profile as profiles
from hpczero.spec.keys import entries, full_name
from hpczero.spec.load import LoadedSweep, load, load_sweep
from hpczero.spec.schema import Spec
from hpczero.text import format_count, printable, toml_repr


def list_(options: Namespace) -> int:
    here = profiles.current_site()
    rows: list[dict[str, Any]] = []
    for name in all_names():
        _, site, partition = facts(name)
        rows.append(
            {
                "site": name,
                "support": partition.support,
                "description": site.description,
                "node": _node(partition),
                "here": name.startswith(f"{here}/"),
            }
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(str(row["site"])) for row in rows)
    for row in rows:
        sign = "*" if row["here"] else " "
        of_site = f"{row['site']:<{width}}  {row['support']:<13}  {row['description']}"
        print(for_terminal(f"{sign} {of_site}: {row['node']}"))
    folders = ", ".join(printable(str(folder)) for folder in profiles.folders())
    print(f"\n* this computer's site; profiles are looked for in {folders}")
    return 0


def show(options: Namespace) -> int:
    name, site, partition = facts(options.name)
    _, _, profile = profiles.read_profile(name)
    spec = _merged(site.spec, partition.spec)
    if options.json:
        data = {
            "site": name,
            "file": profile.file,
            "facts": site.model_dump(exclude={"partitions", "spec"}),
            "spec": spec,
        }
        print(json.dumps(data | {"partition": partition.model_dump(exclude={"spec"})}, indent=2))
        return 0
    account = "has to be given" if site.account_required else "as the site wants it"
    lines = [
        f"{name}: {site.description} ({partition.support})",
        f"  file      {printable(profile.file)}",
        f"  a node    {_node(partition)}",
        f"  account   {account}",
    ]
    if partition.charge:
        lines.append(f"  charged   {partition.charge:g} {site.charge_unit} for a node for an hour")
    lines += map(_limit, partition.limits)
    lines.append("  what a job has there, unless its spec says something else:")
    lines += [
        f"    {full_name(table, leaf)} = {_value(value)}" for table, leaf, value in entries(spec)
    ]
    print("\n".join(map(for_terminal, lines)))
    return 0


def _limit(row: Limit) -> str:
    nodes = f"{row.least:,} to {row.nodes:,}" if row.least > 1 else f"up to {row.nodes:,}"
    return (
        f"  limit     {row.walltime:>4} for {nodes} nodes{f' in {row.queue}' if row.queue else ''}"
    )


def new(options: Namespace) -> int:
    if not options.name.replace("-", "").replace("_", "").isalnum() or not options.name.isascii():
        raise InputError(f"{toml_repr(options.name)}: a site's name has letters, digits, - and _")
    path = Path(options.output or env.config_folder() / "sites" / f"{options.name}.toml")
    text = sites.profile(options.name)
    try:
        make_folders(path.parent)
        write_new(path, text)
    except FileExistsError:
        raise InputError(
            f"{printable(str(path))} exists already and is left as it is: name another file (-o)"
        ) from None
    except OSError as error:
        raise InputError(f"{printable(str(path))} cannot be written: {error.strerror}") from None
    print(f"wrote {printable(str(path))}; read it, and complete what the scheduler did not say")
    return 0


def _node(partition: Partition) -> str:
    known = {
        f"{partition.cpus} CPUs": partition.cpus,
        f"{partition.memory_gb} GB": partition.memory_gb,
        f"{partition.gpus} GPUs of {partition.gpu_memory_gb} GB": partition.gpus,
    }
    return ", ".join(words for words, number in known.items() if number) or "not known"


def _merged(of_site: dict[str, Any], of_partition: dict[str, Any]) -> dict[str, Any]:
    """Return the site's spec with the partition's values, table by table."""
    merged = dict(of_site)
    for name, value in of_partition.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={inner}" for name, inner in value.items())
    return toml_repr(value)


# The verb `render`: a job's script, whatever the computer.


def render(options: Namespace) -> int:
    sweep = load_sweep(options.spec, options.overrides)
    if sweep:
        spec = sweep.runs[0][1].spec
        job = _array(sweep, options)
    else:
        spec = load(options.spec, options.overrides).spec
        job = _job(spec, options, options.overrides)
    supply = supply_of(spec)
    script = script_of(job)
    if options.output:
        _write(Path(options.output), script)
    else:
        print(script, end="")
    runs = f"{format_count(job.tasks, 'run')}, each on " if sweep else ""
    print(f"hpczero: {job.site}: {runs}{job.size}, {job.cost}", file=sys.stderr)
    print_notes(spec, job, supply)
    if spec.batch.chain > 1:
        print(
            f"hpczero: batch.chain = {spec.batch.chain}: "
            "it is hpczero submit that puts so many into the queue; this is one",
            file=sys.stderr,
        )
    return 0


def _job(spec: Spec, options: Namespace, overrides: Sequence[str]) -> BatchJob:
    words = program(spec.batch, str(Path(options.spec).absolute()), overrides)
    return plan(spec, SubmitHost.now(), words)


def _array(sweep: LoadedSweep, options: Namespace) -> BatchJob:
    """Return an array of jobs, each task a run of the sweep, whose number it takes itself."""
    specs = [loaded.spec for _, loaded in sweep.runs]
    if specs[0].batch.command:
        raise InputError(
            "a task of an array takes its run by sweep.run, which a program of batch.command does "
            "not see: hpczero submit gives each run a spec of its own"
        )
    jobs = [_job(spec, options, [*options.overrides, "sweep.run=task"]) for spec in specs]
    if any(replace(job, name="") != replace(jobs[0], name="") for job in jobs):
        raise InputError(
            "the runs of this sweep ask for different jobs, which are no array: hpczero submit "
            "takes each as its own, and render one: --set sweep.run=NAME"
        )
    tasks = len(jobs)
    return replace(jobs[0], name=sweep.name, tasks=tasks, at_once=sweep.at_once)


def _write(path: Path, script: str) -> None:
    try:
        write_text(path, script)
    except OSError as error:
        raise InputError(f"{printable(str(path))} cannot be written: {error.strerror}") from None
