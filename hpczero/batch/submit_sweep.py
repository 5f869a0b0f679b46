"""`hpczero submit` of a sweep: those of its runs that are neither done nor in the queue.

Each run has the folder, the record and the script that it would have if it were submitted alone, so
that a run that failed can be submitted again by itself.

1. All runs are planned; what is wrong with any of them is told before anything is written.
2. `<run>/batch/lock` of each is held; those with a job in the queue are left out.
3. Runs that ask for the same job, without a chain, become one array, whose tasks start the runs'
   scripts. Others are submitted one after the other, each a job or a chain of its own. If that
   fails midway, those before stay: to submit the sweep again is to submit the rest.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from hpczero import env
from hpczero.batch import submission
from hpczero.batch import submit as of_run
from hpczero.batch.job import BatchJob, print_notes, supply_of
from hpczero.batch.render import render
from hpczero.batch.submission import ArraySubmission, Submission
from hpczero.batch.submit import Chain
from hpczero.errors import InputError
from hpczero.lock import RunLock
from hpczero.safe_files import make_folder, make_own_folder, write_text
from hpczero.spec.load import LoadedSweep, load_sweep
from hpczero.spec.schema import Spec
from hpczero.text import first_few, format_count, printable
from hpczero.train import run_directory


def submit(options: Namespace) -> int:
    """Submit the runs of a sweep, or the one run of a spec."""
    sweep = load_sweep(options.spec, options.overrides)
    if sweep is None:
        return of_run.submit(options)
    if options.probe:
        raise InputError(
            "--probe tries one run, and this is a sweep: add --set sweep.run=NAME "
            f"(hpczero check {options.spec} lists them)"
        )
    folder = folder_of(sweep)
    unfinished = [
        (run.name, loaded.spec)
        for run, loaded in sweep.runs
        if not run_directory.finished(loaded.spec)
    ]
    _say_left_out(len(sweep.runs) - len(unfinished), "finished")
    if not unfinished:
        print(f"{folder}: all runs are finished; nothing to submit")
        return 0
    plans = _planned(unfinished, options)
    _refuse_at_once(sweep, plans)
    if options.dry_run:
        _print_script(sweep, plans)
        return 0
    of_run.refuse_unready(plans[0].job)
    with ExitStack() as locks:
        held = [locks.enter_context(of_run.claimed(plan.record.run)) for plan in plans]
        left = _not_in_queue(plans)
        _submit(sweep, left, held)
    if left:
        print(f"  hpczero status {printable(options.spec)}")
    return of_run.wait([plan.record.run for plan in plans]) if options.wait else 0


def folder_of(sweep: LoadedSweep) -> Path:
    """Return the folder of the runs' folders; InputError if it is a run itself."""
    folder = Path(env.expand(sweep.output)).absolute()
    of_run.refuse_unset(sweep.output, folder)
    if (folder / "spec.toml").exists():
        raise InputError(
            f"{folder} is a run itself, and the runs of the sweep {sweep.name} would lie in it: "
            "give the spec another name"
        )
    return folder


@dataclass(frozen=True)
class _Plan:
    name: str
    spec: Spec
    record: Submission
    job: BatchJob
    overrides: tuple[str, ...]

    @property
    def directives(self) -> BatchJob:
        """The job without what differs between any two runs."""
        return replace(self.job, name="", program=(), run="", submission="", tag="")


def _planned(runs: Sequence[tuple[str, Spec]], options: Namespace) -> list[_Plan]:
    """Return the plan of each run; InputError names the runs that have something wrong."""
    plans = []
    wrong: dict[str, list[str]] = {}
    said: set[str] = set()
    for name, spec in runs:
        try:
            run_directory.refuse_another(spec)
            supply = supply_of(spec, must_be_here=not options.dry_run)
            overrides = (*options.overrides, f"sweep.run={name}")
            run = run_directory.path_of(spec)
            record, job = of_run.planned(spec, run, False, overrides)
        except InputError as error:
            wrong.setdefault(str(error), []).append(name)
            continue
        said.update(supply)
        plans.append(_Plan(name, spec, record, job, overrides))
    if wrong:
        lines = [f"{first_few(names)}: {text}" for text, names in wrong.items()]
        raise InputError("\n  ".join(["nothing was submitted:", *lines]))
    print_notes(plans[0].spec, plans[0].job, sorted(said))
    return plans


def _say_left_out(count: int, why: str) -> None:
    if count:
        print(f"hpczero: left out: {format_count(count, 'run')} {why}", file=sys.stderr)


def _is_array(plans: Sequence[_Plan]) -> bool:
    alike = all(plan.directives == plans[0].directives for plan in plans)
    return alike and len(plans) > 1 and plans[0].record.chain == 1


def _refuse_at_once(sweep: LoadedSweep, plans: Sequence[_Plan]) -> None:
    if sweep.at_once and len(plans) > 1 and not _is_array(plans):
        raise InputError(
            f"sweep.at_once = {sweep.at_once} is for an array of jobs, and these runs are jobs or "
            "chains of their own (batch.chain > 1, or runs that differ in what they ask for): "
            "leave it out"
        )


def _not_in_queue(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return the plans of runs that nobody works on; the scheduler is asked once."""
    alive = of_run.living([plan.record.run for plan in plans], now=True)
    left = [plan for plan in plans if not of_run.in_progress(plan.record.run, alive)]
    _say_left_out(len(plans) - len(left), "in the queue or running")
    return left


def _submit(sweep: LoadedSweep, plans: Sequence[_Plan], locks: Sequence[RunLock]) -> None:
    def beat() -> None:
        for lock in locks:
            lock.beat()

    if not plans:
        print(f"{folder_of(sweep)}: nothing is left to submit")
    elif _is_array(plans):
        array, job, plans = _array(sweep, plans)
        for plan in plans:
            of_run.write(plan.record, plan.spec, plan.job, render(plan.job))
        _write_script(array.path, render(job))
        jobs = Chain(array, beat).submit().jobs
        submission.remember([plan.record.run for plan in plans])
        print(f"submitted as job {jobs[0]}: {_summary(plans)}, as an array")
    else:
        _submit_each(plans, beat)


def _write_script(folder: Path, script: str) -> None:
    try:
        make_own_folder(folder.parent)
        make_folder(folder)
        write_text(folder / "job.sh", script)
    except OSError as error:
        raise of_run.unwritable(folder, error) from error


def _submit_each(plans: Sequence[_Plan], beat: Callable[[], None]) -> None:
    done: list[Path] = []
    try:
        for plan in plans:
            of_run.write(plan.record, plan.spec, plan.job, render(plan.job))
            jobs = Chain(plan.record, beat).submit().jobs
            done.append(plan.record.run)
            print(f"{plan.name}: submitted as job {first_few(list(jobs))}")
    finally:
        submission.remember(done)
        if len(done) < len(plans):
            rest = "the same command submits the rest"
            count = f"{len(done)} of {len(plans)} runs are in the queue"
            print(f"hpczero: {count}; {rest}", file=sys.stderr)
    print(f"submitted {_summary(plans)}")


def _array(
    sweep: LoadedSweep, plans: Sequence[_Plan]
) -> tuple[ArraySubmission, BatchJob, list[_Plan]]:
    """Return the array, the job of its script, and the plans of its tasks."""
    first = plans[0].record
    tasks = []
    for number, plan in enumerate(plans):
        path = plan.record.run / "batch" / first.path.name
        record = replace(plan.record, path=path, id=first.id, task=number)
        tasks.append(_as_task(plan, record))
    array = ArraySubmission(tuple(plan.record for plan in tasks))
    job = replace(
        plans[0].job,
        name=sweep.name,
        run=str(first.run.parent),
        submission=str(array.path),
        tag=array.tag(0),
        tasks=len(tasks),
        at_once=sweep.at_once,
        members=tuple(plan.name for plan in tasks),
    )
    return array, job, tasks


def _as_task(plan: _Plan, record: Submission) -> _Plan:
    """Return the plan with the record of a task, and the job that belongs to it."""
    job = of_run.as_recorded(plan.job, plan.spec.batch, record, False, plan.overrides)
    return replace(plan, record=record, job=replace(job, is_task=True))


def _print_script(sweep: LoadedSweep, plans: Sequence[_Plan]) -> None:
    if _is_array(plans):
        _, job, plans = _array(sweep, plans)
        print(render(job), end="")
        print(f"\n# {plans[0].job.submission}/job.sh, and such a script for each run:\n")
    print(render(plans[0].job), end="")
    print(f"hpczero: {_summary(plans)}; nothing was submitted", file=sys.stderr)


def _summary(plans: Sequence[_Plan]) -> str:
    job = plans[0].job
    chain = plans[0].record.chain
    times = f", {chain} jobs one after the other" if chain > 1 else ""
    runs = format_count(len(plans), "run")
    return f"{job.site}: {runs}, the first on {job.size} for {job.clock}{times}, {job.cost}"
