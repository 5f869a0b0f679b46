"""`hpczero run`: from the spec to a trained model.

All ranks check the input together, before anything is written: they end with the same exit code,
and rank 0 prints the one message. A later failure belongs to the rank that meets it: it says so and
ends the job.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpczero.checkpoint.tokenizer_of_run import TOKENIZER
from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.dataset import TokenSource, open_source
from hpczero.data.samples import micro_batch_sizes
from hpczero.errors import InputError, Stopped
from hpczero.model import build, families
from hpczero.model.shapes import Layer
from hpczero.parallel.parallelize import UserModel, assemble, make_user_model
from hpczero.parallel.step import StepRunner
from hpczero.parallel.user_module import layers_of
from hpczero.planner.allocation import Allocation
from hpczero.planner.forecast import left_out
from hpczero.planner.outlook import Outlook, outlook
from hpczero.spec import site_profile
from hpczero.spec.load import load
from hpczero.spec.rules import unavailable
from hpczero.spec.schema import Spec
from hpczero.text import format_loss, format_span
from hpczero.train import preflight, process, run_directory, setup
from hpczero.train.batches import Batches
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.console import choose_output
from hpczero.train.memory_account import MemoryAccount, expect
from hpczero.train.resume import identity_of, look_ahead
from hpczero.train.run_directory import RunDirectory
from hpczero.train.summary import (
    Earlier,
    LastJob,
    closing_words,
    ending_words,
    fullest,
    kernels_of_ranks,
    measured_step,
    mixed_kernels,
    of_run,
)
from hpczero.train.tracing import NAME, Tracing
from hpczero.train.trainer import Outcome, Reporter, Trainer
from hpczero_kernels import dispatch, random


@dataclass(frozen=True)
class TrainingJob:
    """The facts that all ranks have agreed on before anything is written."""

    spec: Spec
    asked: Spec  # in which some keys leave to the run what `spec` has
    world: World
    grid: Grid
    source: TokenSource
    threads: int
    layers: list[Layer] | None  # of the whole model; None: not known
    user_model: UserModel | None  # made by model.family = "package.module:factory"


def run(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    with World.start() as world:  # reports an error that one rank meets alone, and ends the job
        try:
            prepared = _prepare(world, options)
        except InputError as error:
            if world.rank == 0:
                print(f"hpczero: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        return _train(*prepared, options.progress, began) if prepared else 0


# -- before anything is written --------------------------------------------------------------------


def _prepare(
    started: World, options: argparse.Namespace
) -> tuple[TrainingJob, RunDirectory | None] | None:
    """Check the input and claim the run directory, which rank 0 gets; None if the run is finished.

    Collective; InputError on all ranks.
    """
    first = started.rank == 0
    setup.remove_stale_segments(started)
    spec = setup.agree_on_spec(started, lambda: load(options.spec, options.overrides).spec)
    world = setup.training_world(started, spec)
    spec, grid = setup.prepare(world, spec)
    if missing := unavailable(spec):
        raise InputError("; ".join(missing))
    preflight.check_folder(world, spec)
    if not families.known(spec.model):
        world.run_on_all(lambda: build.factory_of(spec.model))  # before data is built
    source = world.run_on_all(lambda: open_source(spec, world.broadcast_object, first))
    if _is_finished(world, spec, options.fresh):
        return None
    user_model = None if families.known(spec.model) else make_user_model(spec, world, grid)
    layers = _layers(spec, user_model)
    carried_out = spec
    if layers:
        module = user_model.module if user_model else None
        carried_out = preflight.fit_to_memory(world, spec, layers, module)
    identity = identity_of(source.describe()["fingerprint"])
    world.run_on_all(lambda: look_ahead(spec, identity) if first else None)
    directory = world.run_on_all(
        lambda: RunDirectory.claim(spec, options.resume, options.fresh) if first else None
    )
    started.watch(spec.comm.timeout_s, run_directory.path_of(spec) / "watch")
    threads = setup.share_cores(world, grid.sharing_layers(world.rank))
    job = TrainingJob(carried_out, spec, world, grid, source, threads, layers, user_model)
    return job, directory


def _is_finished(world: World, spec: Spec, fresh: bool) -> bool:
    """Return True, and say so, if all steps of the run are done. Collective; rank 0 looks."""
    done = world.broadcast_object(
        world.run_on_all(lambda: None if world.rank or fresh else run_directory.finished(spec))
    )
    if done and world.rank == 0:
        loss = format_loss(done["final_loss"])
        result = f"all {done['steps']} steps are done (final loss {loss})"
        print(f"{run_directory.path_of(spec)}: {result}; --fresh starts anew")
    return bool(done)


def _layers(spec: Spec, user_model: UserModel | None) -> list[Layer] | None:
    if user_model is None:
        return families.layers(spec.model)
    if user_model.stage is None:
        return [layer for _, layer in layers_of(user_model.module)]
    return None


# -- the training ----------------------------------------------------------------------------------


def _train(job: TrainingJob, directory: RunDirectory | None, progress: str, began: float) -> int:
    train = job.spec.train
    reporter = None
    if directory:
        reporter = Reporter(choose_output(progress, train.steps, train.log_every), directory)
    try:
        outcome, summary = _carry_out(job, reporter, began)
    finally:
        if reporter:
            reporter.close()
    saved = outcome.saved == outcome.steps
    if reporter:
        family = job.spec.model.family
        family = family.upper() if families.known(job.spec.model) else family
        model = f"a {family} of {summary['parameters']:,} parameters"
        words = closing_words(summary, f"{job.spec.name}, {model}")
        words += ending_words(summary, reporter.directory.path, train.steps, saved)
        print("\n".join(words), flush=True)
    if outcome.state == "stopped" and saved:
        return Stopped.exit_code
    return 0 if outcome.state == "finished" else 1


def _carry_out(
    job: TrainingJob, reporter: Reporter | None, began: float
) -> tuple[Outcome, dict[str, Any]]:
    """Build the engine, train, and return the outcome and the summary. Collective."""
    spec = job.spec
    world = job.world
    grid = job.grid
    _report_start(job, reporter)
    batches = Batches(spec, job.source, grid.coordinate(world.rank, "data"), grid.size("data"))
    tracing = Tracing(spec, world, grid) if spec.train.trace else None
    meter = _Meter(job)
    runner = assemble(
        spec,
        world,
        grid,
        accumulates=len(batches.parts()) > 1,
        threads=job.threads,
        user_model=job.user_model,
        bare=True,
    )
    engine = runner.engine
    known = families.known(spec.model)
    parameters = families.parameter_count(spec.model) if known else engine.parameter_count()
    predicted = _report_layout(reporter, job, batches, parameters) if reporter else None
    data = job.source.describe()
    identity = identity_of(data["fingerprint"], random.RULE if known else 0)
    identity |= {TOKENIZER: data["tokenizer"]} if data["path"] != "synthetic" else {}
    checkpoints = Checkpoints(spec, world, grid, engine, identity)
    first, earlier = _load_or_initialize(checkpoints, reporter)
    standing = partial(_standing, runner, checkpoints, world)
    account = MemoryAccount(world, engine, meter.expected, standing)
    trainer = Trainer(spec, world, runner, batches, reporter, checkpoints, account)
    meter.start()
    outcome = trainer.train(first)
    measured = meter.stop(standing(), account.most)
    trace = tracing.conclude() if tracing else None
    engine.close()
    losses = outcome.first_loss, outcome.final_loss
    steps = outcome.steps - first
    last_job = LastJob(first, steps, trainer.step_tokens, meter.seconds, world.size, *losses)
    summary = _summary(job, outcome, of_run(last_job, earlier, _validation(outcome)), parameters)
    summary |= {"wall_seconds": time.perf_counter() - began} | measured
    summary["kernels"] = kernels_of_ranks(world.gather_objects(dispatch.choices()) or [])
    summary |= {"trace": trace} if trace else {}
    if reporter:
        summary["fullest"] = fullest(reporter.directory.fullest)
        summary["step"] = measured_step(reporter.directory.step_seconds, predicted)
        _report_end(reporter, outcome, summary)
    return outcome, summary


def _load_or_initialize(checkpoints: Checkpoints, reporter: Reporter | None) -> tuple[int, Earlier]:
    """Load the checkpoint to begin from, or make the initial values. Collective.

    Return how many steps are done, and what rank 0 knows of them.
    """
    resumed = checkpoints.resume()
    earlier = Earlier()
    if resumed.path:
        checkpoints.refresh_weights()
    elif families.known(checkpoints.spec.model):
        checkpoints.engine.begin_with_initial_values()
    if reporter:
        directory = reporter.directory
        of_this_run = resumed.path and resumed.path.parent == directory.path / "checkpoints"
        missing = directory.missing_before(resumed.step + 1) if of_this_run else ""
        earlier = directory.keep_metrics_before(resumed.step + 1)
        for warning in filter(None, (missing, *resumed.warnings)):
            reporter.event("WARN", what=warning)
        if resumed.path:
            changed = {"changed": "; ".join(resumed.changed)} if resumed.changed else {}
            reporter.event("resume", step=resumed.step, path=str(resumed.path), **changed)
    return resumed.step, earlier


def _standing(runner: StepRunner, checkpoints: Checkpoints, world: World) -> dict[str, int]:
    """Return the bytes that this rank has allocated from step to step, by kind."""
    copies = checkpoints.copy_bytes
    return runner.memory() | {"communication": world.buffered, "checkpoint copy": copies}


class _Meter:
    """Measures the time, cores and memory of the training, from before the engine is built."""

    def __init__(self, job: TrainingJob) -> None:
        """Collective, as `stop`."""
        self._world = job.world
        self.expected = expect(job.world, job.spec, job.grid, job.layers)
        self._held = process.held_on_nodes(self._world)

    def start(self) -> None:
        self._began = time.perf_counter()
        self._processor_seconds = time.process_time()

    def stop(self, allocated: dict[str, int], most: dict[str, int]) -> dict[str, Any]:
        """Return the figures of all ranks on rank 0.

        `allocated`: bytes of this rank, by kind; `most`: see `MemoryAccount`.
        """
        world = self._world
        self.seconds = time.perf_counter() - self._began
        growth = process.growth(self._held, process.held_on_nodes(world))
        of_rank = self.expected.placement.part_of_rank(allocated)
        memory = process.summary(world, self.expected.rank, of_rank, growth, most)
        ledgers = world.gather_objects(world.ledger.as_dict())
        cores = (time.process_time() - self._processor_seconds) / self.seconds
        return {"memory": memory, "comm": ledgers, "cores_used": world.gather_objects(cores)}


# -- events and summary ----------------------------------------------------------------------------


def _report_start(job: TrainingJob, reporter: Reporter | None) -> None:
    """Collective."""
    world = job.world
    ranks = setup.places_of_ranks(world)
    if reporter is None:
        return
    directory = reporter.directory
    mpi = world.library
    hosts = len(set(world.hosts))
    reporter.output.event("start", run=str(directory.path), ranks=world.size, hosts=hosts, mpi=mpi)
    packages = setup.packages()
    directory.event("start", ranks=ranks, packages=packages, git=setup.git_state(), mpi=mpi)
    if job.user_model:
        memory = f"the memory that {job.spec.model.family} needs"
        if job.layers:
            what = f"{memory} was checked without its activations, which are not known"
        else:
            what = f"{memory} was not checked: what the stages need is not known"
        reporter.event("WARN", what=what)
    for what in (*left_out(job.spec, job.grid), *site_profile.unusable()):
        reporter.event("WARN", what=what)
    if job.asked.checkpoint.asynchronous > job.spec.checkpoint.asynchronous:
        what = "no room for a copy of the states: training waits while a checkpoint is saved"
        reporter.event("WARN", what=what)
    if job.asked.memory.recompute == "auto":
        reporter.event("memory", recompute=job.spec.memory.recompute, decided="auto")


def _report_layout(
    reporter: Reporter, job: TrainingJob, batches: Batches, parameters: int
) -> Outlook | None:
    """Say how the job is laid out; return how long a step should take."""
    train = job.spec.train
    world = job.world
    count, smallest, largest = micro_batch_sizes(
        train.global_batch, train.micro_batch, batches.data_ranks
    )
    device = {}
    if world.device.kind != "cpu" or world.backend != "mpi":
        device = {"device": world.device.name, "collectives": world.backend}
    reporter.event(
        "layout",
        grid=job.grid.size_by_axis(job.spec.zero.shard_ranks),
        nodes=len(set(world.node_of_rank)),
        zero=job.spec.zero.stage,
        threads_per_rank=job.threads,
        **device,
        parameters=parameters,
        precision=train.precision,
        micro_batches=f"{count}x{format_span(smallest, largest)}",
        data=job.source.describe()["path"],
    )
    return _predicted(job, reporter)


def _predicted(job: TrainingJob, reporter: Reporter) -> Outlook | None:
    """Say how long a step should take, where that is predicted; nothing of it ends the run."""
    world, layers = job.world, job.layers
    most = max(Counter(world.node_of_rank).values())
    nodes, platform = Allocation(world.size, most), preflight.platform_of(world, job.spec)
    try:
        said = outlook(job.spec, layers, nodes, platform) if layers else None
    except InputError as error:
        reporter.event("WARN", what=str(error))
        return None
    if said and said.problem:
        reporter.event("WARN", what=next(said.warnings()))
    elif said and said.time:
        reporter.event("predicted", cluster=said.cluster, step_seconds=said.time.seconds)
    return said


def _report_end(reporter: Reporter, outcome: Outcome, summary: dict[str, Any]) -> None:
    if mixed := mixed_kernels(summary["kernels"]):
        what = "the ranks do not all have the same kernels"
        reporter.event("WARN", what=what, kernels=mixed)
    if "trace" in summary:
        _report_trace(reporter, summary["trace"])
    reporter.directory.summary(summary)
    reporter.event(
        "stop",
        state=outcome.state,
        step=outcome.steps,
        reason=outcome.reason or "all steps done",
        loss=outcome.final_loss,
    )


def _report_trace(reporter: Reporter, trace: dict[str, Any]) -> None:
    if problem := trace.get("problem"):
        reporter.event("WARN", what=problem)
        return
    path = str(reporter.directory.path / NAME)
    kinds = ("steps_left_out", "ranks_left_out", "events_left_out")
    left_out = {kind: trace[kind] for kind in kinds if trace[kind]}
    reporter.event("trace", file=path, steps=trace["steps"], events=trace["events"], **left_out)


def _validation(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.validation is None:
        return None
    return outcome.validation.facts() | {"validation_step": outcome.validated}


def _summary(
    job: TrainingJob, outcome: Outcome, figures: dict[str, Any], parameters: int
) -> dict[str, Any]:
    split = "train" if figures["validation_loss"] is None else "validation"
    return {
        "state": outcome.state,
        "reason": outcome.reason,
        "steps": outcome.steps,
        **figures,
        "unigram_entropy": job.source.unigram_entropy(split),
        "parameters": parameters,
        "ranks": job.world.size,
        "threads_per_rank": job.threads,
        "data": job.source.describe(),
    }
