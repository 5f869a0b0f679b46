"""`hpczero doctor`: every rank says what it sees, rank 0 judges and prints."""

import argparse
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict

from hpczero import env, kernel_cache
from hpczero.comm import mpi_library
from hpczero.doctor import facts
from hpczero.doctor.facts import Report
from hpczero.doctor.findings import FAIL, OK, WARN, Finding, judge
from hpczero.errors import InputError

_START_LIMIT = 60  # seconds that an MPI may take to start in one process
_WIDTH = 110


def doctor(options: argparse.Namespace) -> int:
    report = facts.report()
    if options.prebuild:
        _prebuild(report)
    reports = (
        _together(report, options.clean)
        if report.under_a_launcher
        else [_alone(report, options.clean)]
    )
    if reports is None:  # another rank prints
        return 0
    found = judge(reports)
    worst = max((finding.verdict for finding in found), key=(OK, WARN, FAIL).index)
    if options.json:
        data = {
            "verdict": worst,
            "findings": [asdict(finding) for finding in found],
            "ranks": [facts.as_json(report) for report in reports],
        }
        print(json.dumps(data, indent=2))
    else:
        print("\n".join(_text(found)))
    return int(worst == FAIL)


def _prebuild(report: Report) -> None:
    """The first process to come there fills the cache of its computer."""
    missing = [name for name in ("torch", "mpi4py", "numba") if not report.packages[name]]
    if missing:
        raise InputError(
            f"kernels cannot be compiled without {' and '.join(missing)}: {env.install('train')}"
        )
    began = time.monotonic()
    kernel_cache.load("hpczero.train.run")
    if report.gpus:
        import torch

        torch.cuda.set_device(0)
        kernel_cache.of_gpu(torch.cuda.get_device_capability())
    if all(rank == 0 for rank, _ in report.launched.values()):
        seconds = time.monotonic() - began
        print(
            f"hpczero: {report.host}: the kernels are compiled ({seconds:.1f} s), in {env.numba_cache()}",
            file=sys.stderr,
            flush=True,
        )


def _alone(report: Report, clean: bool) -> Report:
    """MPI is started in a child: one that aborts here (login nodes) leaves the other findings."""
    if report.packages["mpi4py"]:
        try:
            asked = subprocess.run(
                env.python_command("hpczero.comm.mpi_library"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_START_LIMIT,
                check=False,
            )
            answer = asked.stdout.strip().splitlines()
            if asked.returncode == 0 and answer:
                report.library = mpi_library.Library(**json.loads(answer[-1]))
            else:
                report.library_error = (
                    _last_words(asked.stderr) or f"it ended with status {asked.returncode}"
                )
        except subprocess.TimeoutExpired:
            report.library_error = f"it did not start within {_START_LIMIT} s"
    facts.look_for_stale_segments(report, clean)
    return report


def _together(report: Report, clean: bool) -> list[Report] | None:
    """The reports of all ranks, on the first one."""
    launched_rank = next(iter(report.launched.values()))[0]
    if launched_rank == 0:
        facts.look_for_stale_segments(report, clean)
    if not report.packages["mpi4py"]:
        return [report] if launched_rank == 0 else None
    try:
        from hpczero.comm.world import World
    except ImportError:  # no torch: the launcher's first rank speaks for all
        report.library = mpi_library.facts()
        report.size = next(iter(report.launched.values()))[1]
        return [report] if launched_rank == 0 else None

    try:
        world = World.start()
    except (
        SystemExit
    ):  # a rank that believes itself alone by mistake: the launcher's first one speaks
        return None
    except (InputError, RuntimeError, ImportError) as error:
        report.library_error = str(error)
        if isinstance(error, InputError):
            report.library = mpi_library.facts()
        return [report] if launched_rank == 0 else None
    with world:
        report.library = mpi_library.facts()
        report.rank, report.size, report.node = (
            world.rank,
            world.size,
            world.node_of_rank[world.rank],
        )
        if world.local_rank == 0 and world.rank > 0:  # the other nodes'
            facts.look_for_stale_segments(report, clean)
        world.broadcast_object(world.gather_objects(0))  # together: everybody has arrived
        now = time.time()
        report.skew = now - float(world.broadcast_object(now))
        collected = world.gather_objects(facts.as_json(report))
    return [facts.from_json(data) for data in collected] if collected is not None else None


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])


def _text(found: list[Finding]) -> Iterator[str]:
    topic = ""
    for finding in found:
        if finding.topic != topic:
            if topic:
                yield ""
            topic = finding.topic
            yield topic
        first, *more = (
            part
            for line in finding.what.split("\n")
            for part in textwrap.wrap(line, _WIDTH, break_on_hyphens=False) or [""]
        )
        yield f"  {finding.verdict:<4}  {first}"
        yield from (f"        {line}" for line in more)
        if finding.fix:
            yield f"        fix: {finding.fix}"
    count = {
        verdict: sum(finding.verdict == verdict for finding in found) for verdict in (WARN, FAIL)
    }
    yield ""
    yield (
        "nothing to complain about"
        if not any(count.values())
        else f"{count[FAIL]} FAIL, {count[WARN]} WARN"
    )
