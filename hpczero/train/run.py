"""`hpczero run`: from the spec to a trained model.

All ranks check the input together, before anything is written: they end with the same exit code,
and rank 0 prints the one message. A later failure belongs to the rank that meets it: it says so and
ends the job.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

from hpczero.checkpoint.tokenizer_of_run import TOKENIZER
from hpczero.comm import node_file
from hpczero.comm.world import World
from hpczero.data.dataset import open_source
from hpczero.data.plain_tokens import UNKNOWN
from hpczero.data.token_source import NO_TOKENIZER
from hpczero.errors import InputError, Stopped
from hpczero.model import build, families
from hpczero.model.shapes import Layer
from hpczero.parallel.parallelize import UserModel, assemble, make_user_model
from hpczero.parallel.step import StepRunner
from hpczero.parallel.user_module import layers_of, trained_parameters
from hpczero.spec.load import load
from hpczero.spec.rules import unavailable
from hpczero.spec.rules_of_optimizers import without_parameters
from hpczero.spec.schema import Spec
from hpczero.text import format_loss
from hpczero.train import preflight, process, run_directory, setup
from hpczero.train.batches import Batches
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.console import choose_output
from hpczero.train.energy_meter import EnergyMeter
from hpczero.train.memory_account import MemoryAccount, expect
from hpczero.train.mixed_data import as_recorded, identity_of_data, refuse_early_end
from hpczero.train.resume import identity_of, look_ahead
from hpczero.train.run_directory import RunDirectory
from hpczero.train.run_report import (
    as_noted,
    report_end,
    report_layout,
    report_start,
    summary_of,
    validation_of,
)
from hpczero.train.summary import (
    Earlier,
    LastJob,
    closing_words,
    ending_words,
    kernels_of_ranks,
    measured_step,
    of_run,
)
from hpczero.train.tracing import Tracing
from hpczero.train.trainer import Outcome, Reporter, Trainer
from hpczero.train.training_job import TrainingJob
from hpczero_kernels import dispatch, random


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
    if user_model:
        _refuse_patterns_without_parameters(spec, user_model)
    layers = _layers(spec, user_model)
    carried_out = spec
    if layers:
        module = user_model.module if user_model else None
        carried_out = preflight.fit_to_memory(world, spec, layers, module)
    identity = identity_of_data(source)
    world.run_on_all(lambda: look_ahead(spec, identity) if first else None)
    directory = world.run_on_all(
        lambda: RunDirectory.claim(spec, options.resume, options.fresh) if first else None
    )
    started.watch(spec.comm.timeout_s, run_directory.path_of(spec) / node_file.FOLDER)
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


def _refuse_patterns_without_parameters(spec: Spec, user_model: UserModel) -> None:
    names = list(trained_parameters(user_model.module))
    if missing := without_parameters(spec.optimizer, names):
        raise InputError("; ".join(missing))


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
    spec, world, grid = job.spec, job.world, job.grid
    report_start(job, reporter)
    energy = _energy(job, reporter)
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
    predicted = report_layout(reporter, job, batches, parameters) if reporter else None
    checkpoints = Checkpoints(spec, world, grid, engine, _identity(job))
    first, earlier = _load_or_initialize(checkpoints, reporter)
    source = as_recorded(job.source, checkpoints.identity)
    world.run_on_all(lambda: refuse_early_end(source, spec))
    batches = replace(batches, source=source)
    standing = partial(_standing, runner, checkpoints, world)
    account = MemoryAccount(world, engine, meter.expected, standing)
    trainer = Trainer(spec, world, runner, batches, reporter, checkpoints, account, energy)
    meter.start()
    outcome = trainer.train(first)
    measured = meter.stop(standing(), account.most)
    trace = tracing.conclude() if tracing else None
    engine.close()
    losses = outcome.first_loss, outcome.final_loss
    steps = outcome.steps - first
    last_job = LastJob(first, steps, trainer.step_tokens, meter.seconds, world.size, *losses)
    figures = of_run(last_job, earlier, validation_of(outcome))
    summary = summary_of(job, outcome, figures, parameters)
    summary |= {"wall_seconds": time.perf_counter() - began} | measured
    summary["kernels"] = kernels_of_ranks(world.gather_objects(dispatch.choices()) or [])
    summary |= {"trace": trace} if trace else {}
    if reporter:
        summary |= as_noted(reporter.directory, summary["tokens"])
        summary["step"] = measured_step(reporter.directory.step_seconds, predicted)
        report_end(reporter, outcome, summary)
    return outcome, summary


def _energy(job: TrainingJob, reporter: Reporter | None) -> EnergyMeter:
    """Measure energy from now on. Collective."""

    def warn(what: str) -> None:
        if reporter:
            reporter.event("WARN", what=what)

    folder = reporter.directory.path if reporter else None
    return EnergyMeter(job.world, job.spec.train.log_every, folder, warn)


def _identity(job: TrainingJob) -> dict[str, str]:
    rule = random.RULE if families.known(job.spec.model) else 0
    identity = identity_of(identity_of_data(job.source), rule)
    data = job.source.describe()
    is_known = data["tokenizer"] not in (NO_TOKENIZER, UNKNOWN)
    return identity | ({TOKENIZER: data["tokenizer"]} if is_known else {})


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
        if resumed.path or earlier.lost:
            changed = {"changed": "; ".join(resumed.changed)} if resumed.changed else {}
            facts = changed | earlier.lost
            path = str(resumed.path or "")
            reporter.event("resume", step=resumed.step, path=path, **facts)
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
