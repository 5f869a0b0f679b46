"""`hpczero submit`: a run as a chain of jobs in the queue.

Protocol:
1. The spec is checked, the job planned. A run that is finished, running, or has jobs in the queue is not submitted again.
   From here to the end `<run>/batch/lock` is held: of two who submit the run at once, one is refused.
2. The folder `<run>/batch/<time>-<id>/` gets the resolved spec, the script and a record that says: not complete.
3. The jobs are submitted one after the other, each behind the one before it (`afterany`); under PBS the first is held until all are there, since
   a job that has ended can be depended on no more. The record is written again after each.
4. Every job carries a tag made of the id. Where the scheduler's answer is lost, the tag is looked for in the queue, a moment later, before the job
   is submitted once more, and it is never submitted while nobody knows.
5. What cannot be completed, or is interrupted, is taken back: the jobs that are in the queue are cancelled.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hpczero import env
from hpczero.batch import command, pbs, scheduler, sites, submission
from hpczero.batch.command import Queued, Transient
from hpczero.batch.job import BatchJob, Here, plan, refuse_launcher
from hpczero.batch.render import render
from hpczero.batch.submission import Submission
from hpczero.data.supply import look
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock, living_holder
from hpczero.safe_files import make_folder, own_folder, write_text
from hpczero.spec import site_profile
from hpczero.spec.load import load, to_toml
from hpczero.spec.reference import toml_value
from hpczero.spec.schema import Batch, Spec
from hpczero.text import counted, listed, shown
from hpczero.train import run_directory

_PROBED, _PROBED_BEFORE = 5, 3  # steps of a probe, and of them before the save
_BETWEEN = (2.0, 5.0, 15.0, 15.0)  # seconds after an attempt that nobody answered


def submit(options: Namespace) -> int:
    spec = load(
        options.spec, [*options.overrides, *(_probing(options) if options.probe else [])]
    ).spec
    run = run_directory.path_of(spec)
    if "$" in str(run):
        raise InputError(
            f"output = {shown(spec.output)}: this leads to {run}, and what follows the $ is not set here"
        )
    if done := run_directory.finished(spec):
        print(f"{run}: all {done['steps']} steps are done; nothing to submit")
        return 0
    run_directory.refuse_another(spec)
    supply = look(spec, must_be_here=not options.dry_run)
    job = plan(spec, Here.now(), ())
    record = Submission.new(
        run, job.scheduler, job.site, job.nodes, job.ranks, job.walltime, spec.batch.chain
    )
    arguments = ("run", str(record.path / "spec.toml"))
    first = (*arguments, "--set", f"train.steps={_PROBED_BEFORE}") if options.probe else ()
    job = replace(
        job,
        arguments=arguments,
        first=first,
        run=str(run),
        submission=str(record.path),
        tag=record.tag(0),
    )
    script = render(job)
    print(f"hpczero: data.source = {shown(spec.data.source)}: {supply.in_words()}", file=sys.stderr)
    for line in site_profile.left_out():
        print(f"hpczero: {line}", file=sys.stderr)
    if options.dry_run:
        print(script, end="")
        print(f"hpczero: {_said(record, job)}; nothing was submitted", file=sys.stderr)
        return 0
    _ready(job)
    with _claimed(run) as lock:
        _refuse_if_under_way(run)
        _write(record, spec, job, script)
        record = Chain(record, lock.beat).submit()
    submission.remember(run)
    numbers = listed([f"{number}" for number in record.jobs])
    print(
        f"submitted as job {numbers}: {_said(record, job)}\n  hpczero status {run}\n  hpczero logs -f {run}"
    )
    return wait(record) if options.wait else 0


def _probing(options: Namespace) -> list[str]:
    """What makes a probe of a job: the same layout for a few steps, with a save and a restore, as a run of its own, where short jobs begin soon."""
    spec = load(options.spec, options.overrides).spec
    settings: dict[str, object] = {
        "name": f"{spec.name[:77]}.probe-{datetime.now(UTC):%Y%m%dT%H%M%S}",
        "train.steps": _PROBED,
        "train.log_every": 1,
        "train.eval_every": 0,
        "schedule.warmup_steps": 0,
        "schedule.decay_steps": 0,
        "checkpoint.every": _PROBED_BEFORE,
        "checkpoint.resume": "auto",
        "checkpoint.weights_only": False,
        "batch.chain": 1,
        "batch.after": "",
        "batch.begin": "",
        "batch.walltime": "15m",
    }
    settings |= {f"batch.{key}": value for key, value in _soon(spec.batch).items()}
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]


def _soon(batch: Batch) -> dict[str, str]:
    """The keys of [batch] that lead to where short jobs begin soon, unless so many nodes are too many there."""
    where = sites.facts(batch.site)[2] if batch.site != "auto" else None
    if (
        where is None
        or sites.limit(where, where.probe.get("qos") or where.probe.get("queue", ""), batch.nodes)[
            1
        ]
    ):
        return {}
    return where.probe


def _said(record: Submission, job: BatchJob) -> str:
    times = f", {record.chain} jobs one after the other" if record.chain > 1 else ""
    return f"{job.site}: {counted(job.ranks, 'rank')} on {counted(job.nodes, 'node')} for {job.clock}{times}, {job.cost} each"


def _ready(job: BatchJob) -> None:
    """What the job needs is here."""
    program = scheduler.SCHEDULERS[job.scheduler].PROGRAM
    if not command.is_here(program):
        raise command.missing(program)
    handed = env.for_scheduler()
    missing = [name for name in job.batch.env_pass if not handed.get(name)]
    if missing:
        raise InputError(
            f"batch.env_pass names {listed(missing)}, which is not set here, or is the batch system's own: set it, or leave it out"
        )
    if job.scheduler == "pbs":
        _hand_over_by_pbs(job, {name: handed[name] for name in job.batch.env_pass})
    else:
        refuse_launcher(job)


def _hand_over_by_pbs(job: BatchJob, handed: Mapping[str, str]) -> None:
    """Refuse values that would arrive changed, and say that others can read what is handed over."""
    if changed := pbs.changed_values(handed):
        raise InputError(
            f"batch.env_pass: qsub would change the value of {listed(changed)}: quotes, backslashes "
            "and blanks at its end do not arrive as they are; "
            "set it by batch.env or a line of batch.setup"
        )
    if handed or job.batch.env_inherit:
        inherited = "the whole environment (batch.env_inherit)"
        what = inherited if job.batch.env_inherit else listed(list(handed))
        print(
            f"hpczero: PBS shows {what} to every user (qstat -xf): "
            'a secret belongs in a file of yours, as in batch.setup = ["export TOKEN=$(cat ~/.token)"]',
            file=sys.stderr,
        )


def _claimed(run: Path) -> RunLock:
    """For this process to submit the run, and no other."""
    try:
        own_folder(run)
        own_folder(run / "batch")
    except OSError as error:
        raise _unwritable(run, error) from error
    return RunLock(run / "batch")


def _refuse_if_under_way(run: Path) -> None:
    alive = living(run, now=True)
    if alive:
        jobs = listed([f"{one.number} ({one.state})" for one in alive])
        raise InputError(
            f"{run} has been submitted already: job {jobs}; hpczero status {run}, hpczero cancel {run}"
        )
    ended = {number for record in submission.of_run(run) for number in record.jobs}
    holder = living_holder(run)
    if holder and holder.job not in ended:
        raise InputError(f"{run} is in use by {holder}")


def living(run: Path, now: bool = False) -> list[Queued]:
    """The run's jobs that are in the queue or running."""
    return [job for jobs in living_under(run, now).values() for job in jobs]


def living_under(run: Path, now: bool = False) -> dict[str, list[Queued]]:
    """Scheduler -> the run's jobs in its queue or running: those that are written down, and those that are known by their tag only."""
    records = submission.of_run(run)
    found: dict[str, list[Queued]] = {}
    for name in sorted({record.scheduler for record in records}):
        own = [record for record in records if record.scheduler == name]
        numbers = [number for record in own for number in record.jobs]
        known = scheduler.jobs(name, numbers, now)
        if not all(record.complete for record in own) and name == "pbs":
            known = [*known, *scheduler.jobs(name, [], now=True)]
        of_run = {
            job.number: job
            for job in known
            if job.number in numbers or any(record.owns(job.tag) for record in own)
        }
        found[name] = [job for job in of_run.values() if job.lives]
    return found


def still_living(run: Path) -> bool:
    """For those who wait: a scheduler that does not answer for a while has not ended the jobs."""
    try:
        return bool(living(run))
    except (Transient, command.NoAnswer):
        return True


def _write(record: Submission, spec: Spec, job: BatchJob, script: str) -> None:
    """The spec with the folder and the site as they were found here: a compute node may find others."""
    placed = spec.model_copy(
        update={
            "output": str(record.run.parent),
            "batch": spec.batch.model_copy(update={"site": job.site}),
        }
    )
    try:
        make_folder(record.path)
        write_text(record.path / "spec.toml", to_toml(placed))
        write_text(record.path / "job.sh", script)
    except OSError as error:
        raise _unwritable(record.path, error) from error
    record.write()


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write in {path}: {error.strerror}; set output to a folder that you may write in"
    )


@dataclass
class Chain:
    """A submission under way."""

    record: Submission
    beat: Callable[[], None] = lambda: None  # says now and then that it still is
    sleep: Callable[[float], None] = time.sleep

    def submit(self) -> Submission:
        holds_first = self.record.scheduler == "pbs" and self.record.chain > 1
        try:
            for link in range(self.record.chain):
                after = self.record.jobs[-1] if self.record.jobs else ""
                self.record = self.record.with_job(
                    self._one(link, after, held=holds_first and link == 0)
                )
                self.record.write()
                self.beat()
            if holds_first:
                scheduler.release(self.record.scheduler, self.record.jobs[0])
        except BaseException:
            self._take_back()
            raise
        finally:
            scheduler.forget(self.record.scheduler)
        return self.record

    def _one(self, link: int, after: str, held: bool) -> str:
        kind = scheduler.SCHEDULERS[self.record.scheduler]
        words = kind.submission(
            self.record.path / "job.sh", self.record.path, self.record.tag(link), after, held
        )
        for attempt, pause in enumerate(_BETWEEN, 1):
            try:
                return str(kind.submit(words))
            except (Transient, command.NoAnswer) as error:
                print(f"hpczero: {error}; looking whether the job is in the queue", file=sys.stderr)
                self.sleep(pause)  # it may be on its way there
                if found := self._look_for(link, error):
                    return found
                if attempt == len(_BETWEEN):
                    raise
        raise AssertionError("the last attempt either returns or raises")

    def _look_for(self, link: int, error: HpczeroError) -> str:
        """The number of the job that was submitted though nobody said so; "" if it was not. Nothing is submitted while this is not known."""
        for pause in (*_BETWEEN[:-1], None):
            try:
                known = scheduler.jobs(self.record.scheduler, [], now=True)
            except (Transient, command.NoAnswer):
                if pause is not None:
                    self.sleep(pause)
                continue
            return next(
                (
                    job.number
                    for job in known
                    if job.number not in self.record.jobs and job.tag == self._tag(link)
                ),
                "",
            )
        unknown = (
            "and then the queue could not be read, so that nobody knows whether the job is in it"
        )
        raise HpczeroError(
            f"{error}; {unknown}. Look yourself, or say hpczero submit again: it looks first"
        ) from error

    def _tag(self, link: int) -> str:
        """The jobs of a PBS chain share a script, and so a tag: what is not yet written down is the one that is looked for."""
        return self.record.tag(0 if self.record.scheduler == "pbs" else link)

    def _take_back(self) -> None:
        """Also a job whose number was never heard of."""
        name, numbers = self.record.scheduler, list(self.record.jobs)
        try:
            known = scheduler.jobs(name, [], now=True)
            numbers += [
                job.number
                for job in known
                if job.lives and self.record.owns(job.tag) and job.number not in numbers
            ]
        except HpczeroError:  # what is written down can be cancelled without
            pass
        if numbers:
            try:
                scheduler.cancel(name, numbers)
            except HpczeroError as error:
                print(
                    f"hpczero: the jobs {listed(numbers)} are still in the queue: {error}",
                    file=sys.stderr,
                )


def wait(record: Submission) -> int:
    """Until no job of it is left: 0 if the run is finished."""
    while still_living(record.run):
        time.sleep(scheduler.ASK_EVERY)
    reason = record.over or "the jobs ended before the run was finished"
    print(f"{record.run}: {reason}")
    return 0 if reason == "the run is finished" else 1
