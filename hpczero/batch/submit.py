"""`hpczero submit`: a run as a chain of jobs in the queue.

Protocol:
1. The spec is checked, the job planned. A run that is finished, running, or has jobs in the queue is not submitted again.
2. The folder `<run>/batch/<time>-<id>/` gets the resolved spec, the script and a record that says: not complete.
3. The jobs are submitted one after the other, each behind the one before it (`afterany`); under PBS the first is held until all are there, since
   a job that has ended can be depended on no more. The record is written again after each.
4. Every job carries a tag made of the id. Where the scheduler's answer is lost, the tag is looked for in the queue before the job is
   submitted once more, and it is never submitted while nobody knows.
5. What cannot be completed is taken back: the jobs that are in the queue are cancelled.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hpczero import env
from hpczero.batch import command, scheduler, sites, submission
from hpczero.batch.job import Here, Job, plan
from hpczero.batch.queued import Queued, Transient
from hpczero.batch.render import render
from hpczero.batch.submission import Submission
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import Holder
from hpczero.spec.load import load, to_toml
from hpczero.spec.schema import Spec
from hpczero.spec.show import listed
from hpczero.train import rundir

_PROBED, _PROBED_BEFORE = 5, 3  # steps of a probe, and of them before the save
_ATTEMPTS = 4
_BETWEEN = (2.0, 5.0, 15.0)  # seconds before another attempt


def submit(options: Namespace) -> int:
    spec = load(options.spec, [*options.overrides, *(_probing(options) if options.probe else [])]).spec
    run = rundir.path_of(spec)
    if done := rundir.finished(spec):
        print(f"{run}: all {done['steps']} steps are done; nothing to submit")
        return 0
    rundir.refuse_another(spec)
    job = plan(spec, Here.now(), ())
    record = Submission.new(run, job.scheduler, job.site, job.nodes, job.ranks, job.walltime, spec.batch.chain)
    arguments = ("run", str(record.path / "spec.toml"))
    first = (*arguments, "--set", f"train.steps={_PROBED_BEFORE}") if options.probe else ()
    job = replace(job, arguments=arguments, first=first, run=str(run), submission=str(record.path), tag=record.tag(0))
    script = render(job)
    if options.dry_run:
        print(script, end="")
        print(f"hpczero: {_said(record, job)}; nothing was submitted", file=sys.stderr)
        return 0
    _ready(job, run)
    _write(record, spec, job, script)
    record = Chain(record).submit()
    submission.remember(run)
    numbers = listed([f"{number}" for number in record.jobs])
    print(f"submitted as job {numbers}: {_said(record, job)}\n  hpczero status {run}\n  hpczero logs -f {run}")
    return wait(record) if options.wait else 0


def _probing(options: Namespace) -> list[str]:
    """What makes a probe of a job: the same layout for a few steps, with a save and a restore, under another name, where short jobs begin soon."""
    spec = load(options.spec, options.overrides).spec
    site = spec.batch.site
    where = sites.facts(site)[2].probe if site != "auto" else {}
    settings: dict[str, object] = {
        "name": f"{spec.name[:93]}.probe",
        "train.steps": _PROBED,
        "train.log_every": 1,
        "train.eval_every": 0,
        "schedule.warmup_steps": 0,
        "schedule.decay_steps": 0,
        "checkpoint.every": _PROBED_BEFORE,
        "batch.chain": 1,
        "batch.walltime": "15m",
    }
    settings |= {f"batch.{key}": value for key, value in where.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def _said(record: Submission, job: Job) -> str:
    times = f", {record.chain} jobs one after the other" if record.chain > 1 else ""
    return f"{job.site}: {job.ranks:,} ranks on {job.nodes:,} nodes for {job.clock}{times}, {job.cost} each"


def _ready(job: Job, run: Path) -> None:
    """InputError if the run is under way, or something that the job needs is missing here."""
    program = scheduler.SCHEDULERS[job.scheduler].PROGRAM
    if not command.is_here(program):
        raise command.missing(program)
    missing = [name for name in job.batch.env_pass if env.variable(name) is None]
    if missing:
        raise InputError(f"batch.env_pass names {listed(missing)}, which is not set here: set it, or leave it out")
    holder = _holder(run)
    if holder:
        raise InputError(f"{run} is in use by {holder}")
    alive = living(run, now=True)
    if alive:
        jobs = listed([f"{one.number} ({one.state})" for one in alive])
        raise InputError(f"{run} has been submitted already: job {jobs}; hpczero status {run}, hpczero cancel {run}")


def _holder(run: Path) -> Holder | None:
    try:
        path = run / "lock"
        holder = Holder.parse(path.read_text(encoding="utf-8"))
        return holder if holder and holder.lives(time.time() - path.stat().st_mtime) else None
    except OSError:
        return None


def living(run: Path, now: bool = False) -> list[Queued]:
    """The run's jobs that are in the queue or running: those that are written down, and those that are known by their tag only."""
    records = submission.of_run(run)
    found: dict[str, Queued] = {}
    for name in sorted({record.scheduler for record in records}):
        own = [record for record in records if record.scheduler == name]
        numbers = [number for record in own for number in record.jobs]
        known = scheduler.jobs(name, numbers, now)
        if not all(record.complete for record in own) and name == "pbs":
            known = [*known, *scheduler.jobs(name, [], now=True)]
        tags = tuple(f"hpczero:{record.id}:" for record in own)
        found |= {job.number: job for job in known if job.lives and (job.number in numbers or job.tag.startswith(tags))}
    return list(found.values())


def still_living(run: Path) -> bool:
    """For those who wait: a scheduler that does not answer for a while has not ended the jobs."""
    try:
        return bool(living(run))
    except (Transient, command.NoAnswer):
        return True


def _write(record: Submission, spec: Spec, job: Job, script: str) -> None:
    placed = spec.model_copy(update={"batch": spec.batch.model_copy(update={"site": job.site})})
    try:
        record.path.mkdir(parents=True)
        (record.path / "spec.toml").write_text(to_toml(placed), encoding="utf-8")
        (record.path / "job.sh").write_text(script, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write in {record.path}: {error.strerror}; set output to a folder that you may write in") from error
    record.write()


@dataclass
class Chain:
    """A submission under way."""

    record: Submission
    sleep: Callable[[float], None] = time.sleep

    def submit(self) -> Submission:
        holds_first = self.record.scheduler == "pbs" and self.record.chain > 1
        try:
            for link in range(self.record.chain):
                after = self.record.jobs[-1] if self.record.jobs else ""
                self.record = self.record.with_job(self._one(link, after, held=holds_first and link == 0))
                self.record.write()
            if holds_first:
                scheduler.release(self.record.scheduler, self.record.jobs[0])
        except HpczeroError:
            self._take_back()
            raise
        finally:
            scheduler.forget(self.record.scheduler)
        return self.record

    def _one(self, link: int, after: str, held: bool) -> str:
        kind = scheduler.SCHEDULERS[self.record.scheduler]
        words = kind.submission(self.record.path / "job.sh", self.record.path, self.record.tag(link), after, held)
        for attempt in range(_ATTEMPTS):
            try:
                return str(kind.submit(words))
            except (Transient, command.NoAnswer) as error:
                if found := self._look_for(link, error):
                    return found
                if attempt == _ATTEMPTS - 1:
                    raise
                print(f"hpczero: {error}; trying again", file=sys.stderr)
                self.sleep(_BETWEEN[attempt])
        raise AssertionError("the last attempt either returns or raises")

    def _look_for(self, link: int, error: HpczeroError) -> str:
        """The number of the job that was submitted though nobody said so; "" if it was not. Nothing is submitted while this is not known."""
        for attempt in range(_ATTEMPTS):
            try:
                known = scheduler.jobs(self.record.scheduler, [], now=True)
            except (Transient, command.NoAnswer):
                if attempt < _ATTEMPTS - 1:
                    self.sleep(_BETWEEN[attempt])
                continue
            return next((job.number for job in known if job.number not in self.record.jobs and job.tag == self._tag(link)), "")
        unknown = "and then the queue could not be read, so that nobody knows whether the job is in it"
        raise HpczeroError(f"{error}; {unknown}. Look yourself, or say hpczero submit again: it looks first") from error

    def _tag(self, link: int) -> str:
        """The jobs of a PBS chain share a script, and so a tag: what is not yet written down is the one that is looked for."""
        return self.record.tag(0 if self.record.scheduler == "pbs" else link)

    def _take_back(self) -> None:
        if self.record.jobs:
            try:
                scheduler.cancel(self.record.scheduler, self.record.jobs)
            except HpczeroError as error:
                print(f"hpczero: the jobs {listed(list(self.record.jobs))} are still in the queue: {error}", file=sys.stderr)


def wait(record: Submission) -> int:
    """Until no job of it is left: 0 if the run is finished."""
    while still_living(record.run):
        time.sleep(scheduler.ASK_EVERY)
    over = record.path / "over"
    reason = over.read_text(encoding="utf-8").strip() if over.exists() else "the jobs ended before the run was finished"
    print(f"{record.run}: {reason}")
    return 0 if reason == "the run is finished" else 1
