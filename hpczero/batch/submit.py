"""`hpczero submit`: a run as a chain of jobs in the queue.

Protocol:
1. The spec is checked, the job planned. A run that is finished, running, or has jobs in the queue
   is not submitted again. From here to the end `<run>/batch/lock` is held: of two who submit the
   run at once, one is refused.
2. The folder `<run>/batch/<time>-<id>/` gets the resolved spec, the script and a record that says:
   not complete.
3. The jobs are submitted one after the other, each behind the one before it (`afterany`). The
   record is written again after each. Under PBS the first job is held until all are there: no job
   can depend on one that has ended.
4. Every job carries a tag made of the id. If the scheduler's answer is lost, the tag is looked for
   in the queue a moment later, before the job is submitted once more; while its fate is unknown it
   is never submitted.
5. A submission that fails or is interrupted is undone: the jobs in the queue are cancelled.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from hpczero import env
from hpczero.batch import command, scheduler, sites, submission
from hpczero.batch.command import QueuedJob, Transient
from hpczero.batch.job import (
    BatchJob,
    SubmitHost,
    plan,
    print_notes,
    program,
    refuse_launcher,
    supply_of,
)
from hpczero.batch.render import render
from hpczero.batch.submission import ArraySubmission, Submission
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock, living_holder
from hpczero.safe_files import make_folder, make_own_folder, write_text
from hpczero.spec.keys import flat
from hpczero.spec.load import from_dict, load, to_toml, tree_of
from hpczero.spec.schema import Batch, Spec
from hpczero.text import join_words, toml_repr
from hpczero.train import run_directory

_PROBED = 5  # steps of a probe
_NOT_FINISHED = "the jobs ended before the run was finished"
_PROBED_BEFORE = 3  # of them before the save
_BETWEEN = (2.0, 5.0, 15.0, 15.0)  # seconds to wait after an attempt without an answer


def submit(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    return submit_run(_probe_of(spec) if options.probe else spec, options, options.overrides)


def submit_run(spec: Spec, options: Namespace, overrides: Sequence[str] = ()) -> int:
    """Submit the run of a spec; `overrides`: values of it that its program gets as words."""
    run = run_directory.path_of(spec)
    refuse_unset(spec.output, run)
    if done := run_directory.finished(spec):
        print(f"{run}: all {done['steps']} steps are done; nothing to submit")
        return 0
    run_directory.refuse_another(spec)
    supply = supply_of(spec, must_be_here=not options.dry_run)
    record, job = planned(spec, run, options.probe, overrides)
    script = render(job)
    print_notes(spec, job, supply)
    times = f", {record.chain} jobs one after the other" if record.chain > 1 else ""
    summary = f"{job.site}: {job.size} for {job.clock}{times}, {job.cost} each"
    if options.dry_run:
        print(script, end="")
        print(f"hpczero: {summary}; nothing was submitted", file=sys.stderr)
        return 0
    refuse_unready(job)
    with claimed(run) as lock:
        if why := in_progress(run, living([run], now=True)):
            raise InputError(why)
        write(record, spec, job, script)
        jobs = Chain(record, lock.beat).submit().jobs
    submission.remember([run])
    print(f"submitted as job {join_words(list(jobs))}: {summary}")
    print(f"  hpczero status {run}\n  hpczero logs -f {run}")
    return wait([run]) if options.wait else 0


def refuse_unset(output: str, folder: Path) -> None:
    """Raise InputError if the folder of the output has a variable that is not set."""
    if "$" in str(folder):
        raise InputError(
            f"output = {toml_repr(output)}: this leads to {folder}, "
            "and what follows the $ is not set here"
        )


def planned(
    spec: Spec, run: Path, probe: bool, overrides: Sequence[str]
) -> tuple[Submission, BatchJob]:
    """Return the record of the submission and its job.

    The overrides are in the spec that the job reads. A program of the user's own reads it if its
    command names it.
    """
    job = plan(spec, SubmitHost.now(), ())
    record = Submission.new(
        run, job.scheduler, job.site, job.nodes, job.ranks, job.walltime, spec.batch.chain
    )
    return record, as_recorded(job, spec.batch, record, probe, overrides)


def as_recorded(
    job: BatchJob, batch: Batch, record: Submission, probe: bool, overrides: Sequence[str]
) -> BatchJob:
    """Return the job with its program, which reads the spec that lies beside its record."""
    path = str(record.path / "spec.toml")
    reads_it = not batch.command or any("{spec}" in word for word in batch.command)
    words = program(batch, path, () if reads_it else overrides)
    first = program(batch, path, [f"train.steps={_PROBED_BEFORE}"]) if probe else ()
    return replace(
        job,
        program=words,
        first=first,
        run=str(record.run),
        submission=str(record.path),
        tag=record.tag(0),
    )


def _probe_of(spec: Spec) -> Spec:
    """Return the spec of the job's probe, a run of its own.

    It runs the same layout for a few steps, with a save and a restore, where short jobs begin soon.
    """
    if spec.batch.command:
        raise InputError(
            "--probe shortens a run of hpczero run, and batch.command is a program of your own: "
            "give a spec with fewer steps, another name and a short batch.walltime"
        )
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
    values = flat(spec) | settings
    return from_dict(tree_of(values)).spec


def _soon(batch: Batch) -> dict[str, str]:
    """Return the site's keys of [batch] for short jobs; none if so many nodes are refused there."""
    if batch.site == "auto":
        return {}
    _, _, partition = sites.facts(batch.site)
    probe = partition.probe
    _, refusal = sites.limit(partition, probe.get("qos") or probe.get("queue", ""), batch.nodes)
    return {} if refusal else probe


def refuse_unready(job: BatchJob) -> None:
    """Raise HpczeroError unless the scheduler, the variables and a fitting launcher are here."""
    kind = scheduler.SCHEDULERS[job.scheduler]
    if not command.is_here(kind.PROGRAM):
        raise command.missing(kind.PROGRAM)
    handed = env.scheduler_environment()
    missing = [name for name in job.batch.env_pass if not handed.get(name)]
    if missing:
        raise InputError(
            f"batch.env_pass names {join_words(missing)}, which is not set here, "
            "or is the batch system's own: set it, or leave it out"
        )
    passed = {name: handed[name] for name in job.batch.env_pass}
    kind.check_hand_over(passed, job.batch.env_inherit)
    refuse_launcher(job)


def claimed(run: Path) -> RunLock:
    """Lock the run, so that no other process submits it."""
    try:
        make_own_folder(run)
        make_own_folder(run / "batch")
    except OSError as error:
        raise unwritable(run, error) from error
    return RunLock(run / "batch")


def in_progress(run: Path, alive: Sequence[QueuedJob]) -> str:
    """Return who works on the run, or will; "" if nobody does. `alive`: jobs in the queue."""
    records = submission.of_run(run)
    numbers = {number for record in records for number in record.jobs}
    its = [job for job in alive if job.number in numbers or any(map(_owner(job), records))]
    if its:
        jobs = join_words([f"{job.number} ({job.state})" for job in its])
        return (
            f"{run} has been submitted already: job {jobs}; "
            f"hpczero status {run}, hpczero cancel {run}"
        )
    holder = living_holder(run)
    return f"{run} is in use by {holder}" if holder and holder.job not in numbers else ""


def _owner(job: QueuedJob) -> Callable[[Submission], bool]:
    return lambda record: record.owns(job)


def living(runs: Sequence[Path], now: bool = False) -> list[QueuedJob]:
    """Return the runs' jobs that are in the queue or running."""
    return [job for jobs in living_by_scheduler(runs, now).values() for job in jobs]


def living_by_scheduler(runs: Sequence[Path], now: bool = False) -> dict[str, list[QueuedJob]]:
    """Return scheduler -> the runs' jobs in its queue or running.

    Included are jobs that are not in a record, and known by their tag only.
    """
    alive: dict[str, list[QueuedJob]] = {}
    records = [record for run in runs for record in submission.of_run(run)]
    for name in sorted({record.scheduler for record in records}):
        there = [record for record in records if record.scheduler == name]
        numbers = [number for record in there for number in record.jobs]
        known = scheduler.jobs(name, numbers, now)
        covered = scheduler.SCHEDULERS[name].LISTS_ALL or all(record.complete for record in there)
        if not covered:
            known = [*known, *scheduler.jobs(name, [], now=True)]
        of_run = {
            job.number: job
            for job in known
            if job.number in numbers or any(record.owns(job) for record in there)
        }
        alive[name] = [job for job in of_run.values() if job.is_alive]
    return alive


def still_living(runs: Sequence[Path]) -> bool:
    """Return True if the runs have living jobs, or if a scheduler does not answer for now."""
    try:
        return bool(living(runs))
    except (Transient, command.NoAnswer):
        return True


def write(record: Submission, spec: Spec, job: BatchJob, script: str) -> None:
    """Write the submission's folder.

    The spec names the folder and the site as they are here: a compute node may resolve others.
    """
    batch = spec.batch.model_copy(update={"site": job.site})
    placed = spec.model_copy(update={"output": str(record.run.parent), "batch": batch})
    try:
        make_folder(record.path)
        write_text(record.path / "spec.toml", to_toml(placed))
        write_text(record.path / "job.sh", script)
    except OSError as error:
        raise unwritable(record.path, error) from error
    record.write()


def unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write in {path}: {error.strerror}; set output to a folder that you may write in"
    )


@dataclass
class Chain:
    """A submission in progress."""

    record: Submission | ArraySubmission
    beat: Callable[[], None] = lambda: None  # refreshes the lock of the run
    sleep: Callable[[float], None] = time.sleep

    @property
    def kind(self) -> ModuleType:
        return scheduler.SCHEDULERS[self.record.scheduler]

    def submit(self) -> Submission | ArraySubmission:
        """Submit all jobs of the chain; on any failure cancel those that are in the queue."""
        holds_first = not self.kind.DEPENDS_ON_ENDED and self.record.chain > 1
        try:
            for link in range(self.record.chain):
                after = self.record.jobs[-1] if self.record.jobs else ""
                number = self._submit_one(link, after, held=holds_first and link == 0)
                self.record = self.record.with_job(number)
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

    def _submit_one(self, link: int, after: str, held: bool) -> str:
        words = self.record.command(link, after, held)
        for attempt, pause in enumerate(_BETWEEN, 1):
            try:
                return str(self.kind.submit(words))
            except (Transient, command.NoAnswer) as error:
                print(f"hpczero: {error}; looking whether the job is in the queue", file=sys.stderr)
                self.sleep(pause)  # it may be on its way there
                if number := self._number_in_queue(link, error):
                    return number
                if attempt == len(_BETWEEN):
                    raise
        raise AssertionError("the last attempt either returns or raises")

    def _number_in_queue(self, link: int, error: HpczeroError) -> str:
        """Return the number of a job whose submission had no answer; "" if it is not in the queue.

        Raise HpczeroError if this cannot be known: then nothing may be submitted.
        """
        tag = self._tag(link)
        for pause in (*_BETWEEN[:-1], None):
            try:
                known = scheduler.jobs(self.record.scheduler, [], now=True)
            except (Transient, command.NoAnswer):
                if pause is not None:
                    self.sleep(pause)
                continue
            tagged = [self.record.entered(job.number) for job in known if job.tag == tag]
            return next((number for number in tagged if number not in self.record.jobs), "")
        raise HpczeroError(
            f"{error}; and then the queue could not be read, so that nobody knows whether the job "
            "is in it. Look yourself, or say hpczero submit again: it looks first"
        ) from error

    def _tag(self, link: int) -> str:
        """Return the tag of a job of the chain.

        Those of a PBS chain share a script, and so a tag: the record tells them apart.
        """
        return self.record.tag(link if self.kind.TAGS_EACH_JOB else 0)

    def _take_back(self) -> None:
        """Cancel the jobs, also one whose number is known from the queue only."""
        name = self.record.scheduler
        numbers = list(self.record.jobs)
        try:
            known = scheduler.jobs(name, [], now=True)
            numbers += [
                job.number
                for job in known
                if job.is_alive and self.record.owns(job) and job.number not in numbers
            ]
        except HpczeroError:  # the jobs in the record are cancelled all the same
            pass
        if numbers:
            try:
                scheduler.cancel(name, numbers)
            except HpczeroError as error:
                print(
                    f"hpczero: the jobs {join_words(numbers)} are still in the queue: {error}",
                    file=sys.stderr,
                )


def wait(runs: Sequence[Path]) -> int:
    """Wait until none of the runs' jobs is left; return 0 if the runs are finished."""
    while still_living(runs):
        time.sleep(scheduler.ASK_EVERY)
    reasons = {}
    for run in runs:
        reasons[run] = submission.of_run(run)[-1].closed_reason or _NOT_FINISHED
        print(f"{run}: {reasons[run]}")
    return 0 if set(reasons.values()) == {"the run is finished"} else 1
