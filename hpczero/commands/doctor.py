"""`hpczero doctor`: every rank reports what it sees; rank 0 judges and prints."""

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
    clean = options.clean
    reports = _of_all_ranks(report, clean) if report.under_a_launcher else [_alone(report, clean)]
    if reports is None:  # another rank prints
        return 0
    findings = judge(reports)
    worst = max((finding.verdict for finding in findings), key=(OK, WARN, FAIL).index)
    if options.json:
        data = {
            "verdict": worst,
            "findings": [asdict(finding) for finding in findings],
            "ranks": [asdict(report) for report in reports],
        }
        print(json.dumps(data, indent=2))
    else:
        print("\n".join(_text(findings)))
    return int(worst == FAIL)


def _prebuild(report: Report) -> None:
    """Compile the kernels; the first process on a computer fills its cache."""
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
        kernel_cache.load_gpu_kernels(torch.cuda.get_device_capability())
    if all(rank == 0 for rank, _ in report.launched.values()):
        seconds = time.monotonic() - began
        print(
            f"hpczero: {report.host}: the kernels are compiled ({seconds:.1f} s), "
            f"in {env.numba_cache()}",
            file=sys.stderr,
            flush=True,
        )


def _alone(report: Report, clean: bool) -> Report:
    """Start MPI in a child process: where it aborts (login nodes), the other findings remain."""
    if report.packages["mpi4py"]:
        try:
            child = subprocess.run(
                env.python_command("hpczero.comm.mpi_library"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_START_LIMIT,
                check=False,
            )
            answer = child.stdout.strip().splitlines()
            if child.returncode == 0 and answer:
                report.library = mpi_library.Library(**json.loads(answer[-1]))
            else:
                error = _last_lines(child.stderr)
                report.library_error = error or f"it ended with status {child.returncode}"
        except subprocess.TimeoutExpired:
            report.library_error = f"it did not start within {_START_LIMIT} s"
    facts.look_for_stale_segments(report, clean)
    return report


def _of_all_ranks(report: Report, clean: bool) -> list[Report] | None:
    """Return the reports of all ranks on the rank that prints, None on the others; collective."""
    launched_rank = next(iter(report.launched.values()))[0]
    if launched_rank == 0:
        facts.look_for_stale_segments(report, clean)
    if not report.packages["mpi4py"]:
        return [report] if launched_rank == 0 else None
    try:
        from hpczero.comm.world import World
    except ImportError:  # no torch: the launcher's first rank reports for all
        report.library = mpi_library.facts()
        report.size = next(iter(report.launched.values()))[1]
        return [report] if launched_rank == 0 else None

    try:
        world = World.start()
    except SystemExit:  # a rank that takes itself for alone: the launcher's first one prints
        return None
    except (InputError, RuntimeError, ImportError) as error:
        report.library_error = str(error)
        if isinstance(error, InputError):
            report.library = mpi_library.facts()
        return [report] if launched_rank == 0 else None
    with world:
        report.library = mpi_library.facts()
        report.rank = world.rank
        report.size = world.size
        report.node = world.node_of_rank[world.rank]
        if world.local_rank == 0 and world.rank > 0:  # the other nodes' segments
            facts.look_for_stale_segments(report, clean)
        world.all_gather_objects(0)  # a barrier: the clocks are read after it
        now = time.time()
        report.skew = now - float(world.broadcast_object(now))
        collected = world.gather_objects(asdict(report))
    return [facts.from_json(data) for data in collected] if collected is not None else None


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])


def _text(findings: list[Finding]) -> Iterator[str]:
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            if topic:
                yield ""
            topic = finding.topic
            yield topic
        first, *more = (
            row
            for line in finding.what.split("\n")
            for row in textwrap.wrap(line, _WIDTH, break_on_hyphens=False) or [""]
        )
        yield f"  {finding.verdict:<4}  {first}"
        yield from (f"        {line}" for line in more)
        if finding.fix:
            yield f"        fix: {finding.fix}"
    verdicts = [finding.verdict for finding in findings]
    count = f"{verdicts.count(FAIL)} FAIL, {verdicts.count(WARN)} WARN"
    yield ""
    yield count if {FAIL, WARN} & set(verdicts) else "nothing to complain about"
