"""`hpczero calibrate`: write a cluster file of this machine, measured, or of what runs show."""

import json
import re
import sys
import time
import tomllib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero import env, kernel_cache, safe_files
from hpczero.calibrate import cluster_file, from_runs
from hpczero.calibrate.cluster_file import Origin
from hpczero.calibrate.findings import Findings
from hpczero.commands.cluster import in_lines
from hpczero.commands.jobs import run_named
from hpczero.errors import InputError, for_terminal
from hpczero.planner.cluster import Cluster, Device, Named, find, names
from hpczero.spec.table import NAME, PATTERNS
from hpczero.text import format_count, join_words, log_line, printable

_LEAST, _MOST = 1.0, 3600.0  # seconds
_FOLDER = Path("clusters")


def calibrate(options: Namespace) -> int:
    _check(options)
    if options.runs:
        if any(rank > 0 for rank, _ in env.launched_tasks().values()):
            return 0  # the first one does it
        runs = [run_named(name) for name in options.runs]
        base = find(options.base).cluster if options.base else None
        path = _target(options, options.name or runs[0].name)
        text = from_runs.text(runs, base)
        _write(path, text)
        _print(options, path, text, {"runs": [str(run) for run in runs]})
        return 0
    return _measured(options)


def _check(options: Namespace) -> None:
    if not _LEAST <= options.seconds <= _MOST:
        raise InputError(f"--seconds {options.seconds:g}: it must be {_LEAST:g} to {_MOST:g}")
    if options.name and not re.fullmatch(NAME, options.name):
        raise InputError(f"--name {printable(options.name, 60)}: {PATTERNS[NAME]}")
    if options.output and not options.output.endswith(".toml"):
        raise InputError(f"-o {printable(options.output, 60)}: a cluster's file ends in .toml")
    if options.base and not options.runs:
        raise InputError("--base is for --from: a calibration measures all that it writes")


def _target(options: Namespace, name: str) -> Path:
    """Return the file to write; refuse one that exists, unless it may be replaced."""
    path = Path(options.output) if options.output else _FOLDER / f"{name}.toml"
    if options.output and not path.parent.is_dir():
        raise InputError(f"-o {printable(str(path))}: there is no folder {path.parent}")
    if safe_files.is_seen(path) and not options.overwrite:
        raise InputError(
            f"{printable(str(path))} exists: --overwrite replaces it, --name or -o name another"
        )
    return path


def _measured(options: Namespace) -> int:
    """Measure, and write the file on rank 0. Collective."""
    calibration = kernel_cache.load("hpczero.calibrate.calibration")
    from hpczero.comm.world import World

    with World.start() as world:
        host = re.sub(r"[^A-Za-z0-9_-]+", "-", world.hosts[0].partition(".")[0]).strip("-_")
        name = options.name or host or "here"
        first = world.rank == 0
        began = time.perf_counter()
        try:
            path = world.run_on_all(lambda: _target(options, name) if first else Path())
            measuring = calibration.Calibration(
                world, Path(options.folder), options.seconds, _report if first else _say_nothing
            )
            measuring.run()
            text = _text(world, measuring.findings) if first else ""
            world.run_on_all(lambda: _write(path, text) if first else None)
        except InputError as error:
            if first:
                print(f"hpczero: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        if first:
            findings = measuring.findings
            seconds = round(time.perf_counter() - began, 1)
            _print(options, path, text, {"seconds": seconds, "findings": asdict(findings)})
    return 0


def _report(part: str) -> None:
    print(log_line("measure", {"what": part}), file=sys.stderr, flush=True)


def _say_nothing(part: str) -> None:
    """Leave the word to rank 0."""


def _text(world: Any, findings: Findings) -> str:
    machine = findings.machine
    ranks = format_count(machine.ranks, "rank")
    nodes = format_count(machine.nodes, "node")
    threads = format_count(machine.threads, "thread")
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    hosts = list(dict.fromkeys(world.hosts))
    shown = join_words(hosts[:4]) + (" and others" if len(hosts) > 4 else "")
    packages = [name for name in ("torch", "numba") if env.package_version(name)]
    versions = ", ".join(f"{name} {env.package_version(name)}" for name in packages)
    sheet = _sheet(machine.device)
    sources = [
        f"measured by hpczero calibrate on {now}: {ranks} of {threads} on {nodes}, {shown}",
        f"hpczero {env.VERSION}, {versions}, {world.library}",
    ]
    if sheet:
        sources.append(f"peaks and bandwidth of {sheet.name}: its data sheet, by clusters/")
    description = f"{shown}: {nodes} of {machine.devices} x {machine.device}, measured"
    return cluster_file.text(findings, Origin(description, sources, sheet))


def _sheet(device: str) -> Device | None:
    """Return the device of a shipped cluster whose name is part of this one's."""
    for folder_name in names() if device else ():
        known = find(folder_name).cluster.device
        if known.kind == "cuda" and known.name in device:
            return known
    return None


def _write(path: Path, text: str) -> None:
    """Write the file in one piece, if it says a cluster."""
    Cluster.model_validate(tomllib.loads(text))
    try:
        if path.parent == _FOLDER:
            safe_files.make_folders(_FOLDER)
        safe_files.write_text(path, text)
    except OSError as error:
        raise InputError(f"{printable(str(path))} cannot be written: {error.strerror}") from error


def _print(options: Namespace, path: Path, text: str, more: Mapping[str, object]) -> None:
    named = Named(path.stem, str(path), Cluster.model_validate(tomllib.loads(text)))
    if options.json:
        data = {"cluster": path.stem, "file": str(path), "numbers": named.cluster.model_dump()}
        print(json.dumps(data | dict(more), indent=2))
        return
    show: Callable[[str], str] = for_terminal
    print("\n".join(map(show, in_lines(named))))
    called = path.stem if path.parent == _FOLDER else path
    print(for_terminal(f"written: {path} (hpczero cluster show {called})"))
