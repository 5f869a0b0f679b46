"""`hpczero run`: from the spec to a trained model.

Everything that can be wrong with the input is found before anything is written, and found by all ranks together: they end with the same exit code and
rank 0 says the one message. From then on a failure belongs to the rank that meets it: it says so and ends the job.
"""

import argparse
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from hpczero import process_memory
from hpczero.comm.grid import Grid
from hpczero.comm.progress import Limits
from hpczero.comm.world import World
from hpczero.data.dataset import TokenSource, open_source
from hpczero.data.sampler import micro_batch_sizes
from hpczero.errors import InputError, Stopped
from hpczero.model import build, families
from hpczero.model.shapes import Layer
from hpczero.parallel.parallelize import UserModel, assemble, find
from hpczero.parallel.user_module import layers_of
from hpczero.planner.forecast import sharing_left_out
from hpczero.planner.memory import bucket_bytes, need, placement
from hpczero.planner.volumes import resolved
from hpczero.process_memory import keep_free_memory
from hpczero.spec import site_profile
from hpczero.spec.load import load
from hpczero.spec.rules import unavailable
from hpczero.spec.schema import Spec
from hpczero.text import loss
from hpczero.train import run_directory, setup
from hpczero.train.batches import Batches
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.console import choose
from hpczero.train.resume import identity_of, look_ahead
from hpczero.train.run_directory import RunDirectory
from hpczero.train.setup import select_device
from hpczero.train.summary import Earlier, LastJob, closing_words, of_run
from hpczero.train.tracing import NAME, Tracing
from hpczero.train.trainer import Outcome, Reporter, Trainer
from hpczero_kernels import dispatch, random

_OR = " or "


def run(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    with (
        World.start() as world
    ):  # an error that one rank meets alone is said, and ends the job, here
        try:
            job, directory = _prepare(world, options)
        except InputError as error:
            if world.rank == 0:
                print(f"hpczero: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        return _train(job, directory, options.progress, began) if job else 0


@dataclass(frozen=True)
class TrainingJob:
    """What all ranks have agreed on before anything is written."""

    spec: Spec
    world: World
    grid: Grid
    source: TokenSource
    threads: int
    layers: list[Layer] | None  # of the whole model; None: not known
    found: UserModel | None  # what model.family = "package.module:factory" has made
    no_room_for_copy: bool  # of the states: a checkpoint is saved while training waits


def _prepare(
    world: World, options: argparse.Namespace
) -> tuple[TrainingJob | None, RunDirectory | None]:
    """Everything up to the claim of the run directory (rank 0 has it); no job if the run is finished already."""
    first = world.rank == 0
    setup.remove_stale_segments(world)
    text = world.run_on_all(
        lambda: load(options.spec, options.overrides).spec.model_dump_json() if first else ""
    )
    spec = Spec.model_validate_json(world.broadcast_object(text))
    whole, world = (
        world,
        world.part(
            range(world.size),
            spec.comm.ranks_per_node,
            Limits(staging=bucket_bytes(spec.zero, "cpu")),
        ),
    )
    setup.use_kernels(world)
    keep_free_memory()
    spec = select_device(world, spec)
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    missing = unavailable(spec)
    if missing:
        raise InputError("; ".join(missing))
    if not families.known(spec.model):
        world.run_on_all(lambda: build.factory_of(spec.model))  # before data is built
    source = world.run_on_all(lambda: open_source(spec, world.broadcast_object, first))
    done = world.broadcast_object(
        world.run_on_all(
            lambda: run_directory.finished(spec) if first and not options.fresh else None
        )
    )
    if done:
        if first:
            print(
                f"{run_directory.path_of(spec)}: all {done['steps']} steps are done (final loss {loss(done['final_loss'])}); --fresh starts anew"
            )
        return None, None
    found = None if families.known(spec.model) else find(spec, world, grid)
    layers, fits = _layers(spec, found), spec
    if layers:
        given = (
            sum(own.nbytes for own in found.module.parameters() if not own.is_meta) if found else 0
        )
        fits = setup.fitting(world, spec, layers, given)
    world.run_on_all(
        lambda: look_ahead(spec, identity_of(source.describe()["fingerprint"])) if first else None
    )
    directory = world.run_on_all(
        lambda: RunDirectory.claim(spec, options.resume, options.fresh) if first else None
    )
    whole.watch(spec.comm.timeout_s, run_directory.path_of(spec) / "watch")
    return TrainingJob(
        fits,
        world,
        grid,
        source,
        setup.use_threads(world),
        layers,
        found,
        no_room_for_copy=fits is not spec,
    ), directory


def _layers(spec: Spec, found: UserModel | None) -> list[Layer] | None:
    if found is None:
        return families.layers(spec.model)
    return [layer for _, layer in layers_of(found.module)] if found.stage is None else None


def _train(job: TrainingJob, directory: RunDirectory | None, progress: str, began: float) -> int:
    train = job.spec.train
    voice = (
        Reporter(choose(progress, train.steps, train.log_every), directory) if directory else None
    )
    try:
        outcome, summary = _carry_out(job, voice, began)
    finally:
        if voice:
            voice.close()
    if voice:
        print(
            "\n".join(closing_words(summary, _what(job, summary)) + _how_it_ended(job, outcome)),
            flush=True,
        )
    stopped = outcome.state == "stopped" and outcome.saved == outcome.steps
    return Stopped.exit_code if stopped else 0 if outcome.state == "finished" else 1


def _carry_out(
    job: TrainingJob, voice: Reporter | None, began: float
) -> tuple[Outcome, dict[str, Any]]:
    spec, world = job.spec, job.world
    packages = setup.packages()
    places = world.gather_objects(
        {
            "rank": world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "node": world.node,
            "device": world.device.name,
        }
    )
    if voice:
        voice.output.event(
            "start",
            run=str(voice.directory.path),
            ranks=world.size,
            hosts=len(set(world.hosts)),
            mpi=world.library,
        )
        voice.directory.event(
            "start", ranks=places, packages=packages, git=setup.git_state(), mpi=world.library
        )
    batches = Batches(
        spec, job.source, job.grid.coordinate(world.rank, "data"), job.grid.size("data")
    )
    part = placement(spec, job.grid, world.rank)
    platform = setup.platform_of(world, spec)
    needed = need(spec, job.layers, part, platform) if job.layers else None
    if voice and job.found:
        what = "activations are not known" if needed else "what the stages need is not known"
        voice.event(
            "WARN",
            what=f"whether {spec.model.family} fits was not judged{' to the end' if needed else ''}: {what}",
        )
    if voice:
        for what in filter(None, [sharing_left_out(spec.zero, job.grid), *site_profile.left_out()]):
            voice.event("WARN", what=what)
    if voice and job.no_room_for_copy:
        voice.event(
            "WARN",
            what="no room for a copy of the states: training waits while a checkpoint is saved",
        )
    tracing = Tracing(spec, world, job.grid) if spec.train.trace else None
    before = process_memory.held_on_nodes(world)
    way = assemble(
        spec,
        world,
        job.grid,
        accumulates=len(batches.parts()) > 1,
        threads=job.threads,
        found=job.found,
        bare=True,
    )
    engine = way.engine
    parameters = (
        families.parameter_count(spec.model)
        if families.known(spec.model)
        else engine.parameter_count()
    )
    if voice:
        _say_layout(voice, job, batches, parameters)
    identity = identity_of(
        job.source.describe()["fingerprint"], random.RULE if families.known(spec.model) else 0
    )
    checkpoints = Checkpoints(spec, world, job.grid, engine, identity)
    first, earlier = _begin_again(checkpoints, voice)
    trainer = Trainer(spec, world, way, batches, voice, checkpoints)
    began_training, cpu_before = time.perf_counter(), time.process_time()
    outcome = trainer.train(first)
    seconds = time.perf_counter() - began_training
    measured = process_memory.growth(before, process_memory.held_on_nodes(world))
    held = way.memory() | {
        "communication": world.buffered,
        "checkpoint copy": checkpoints.saver.copied,
    }
    of_ranks = {
        "memory": process_memory.summary(
            world, needed.rank if needed else {}, part.part_of_rank(held), measured
        ),
        "comm": world.gather_objects(world.ledger.as_dict()),
        "cores_used": world.gather_objects((time.process_time() - cpu_before) / seconds),
    }
    traced = tracing.conclude() if tracing else None
    engine.close()
    tokens = spec.train.global_batch * spec.model.seq_len
    last_job = LastJob(
        first,
        outcome.steps - first,
        tokens,
        seconds,
        world.size,
        outcome.first_loss,
        outcome.final_loss,
    )
    summary = _summary(job, outcome, of_run(last_job, earlier, _validation(outcome)), parameters)
    summary |= {"wall_seconds": time.perf_counter() - began} | of_ranks
    kernels = world.gather_objects(dispatch.choices())
    if voice:
        summary["kernels"] = _kernels_of_all(kernels or [])
        if several := [
            f"{what}: {names}" for what, names in summary["kernels"].items() if _OR in names
        ]:
            voice.event("WARN", what="the ranks do not all have the same kernels", kernels=several)
        if traced:
            summary["trace"] = traced
            _say_trace(voice, traced)
        voice.directory.summary(summary)
        voice.event(
            "stop",
            state=outcome.state,
            step=outcome.steps,
            reason=outcome.reason or "all steps done",
            loss=outcome.final_loss,
        )
    return outcome, summary


def _begin_again(checkpoints: Checkpoints, voice: Reporter | None) -> tuple[int, Earlier]:
    """Loads the checkpoint to begin from, or makes the initial values; how many steps are done, and what rank 0 knows of them."""
    resumed = checkpoints.resume()
    if resumed.path:
        checkpoints.refresh_weights()
    elif families.known(checkpoints.spec.model):
        checkpoints.engine.renew(lambda unit: unit.fill_owned(checkpoints.engine.initial_values))
    earlier = Earlier()
    if voice:
        own = resumed.path and resumed.path.parent == voice.directory.path / "checkpoints"
        if own and (missing := voice.directory.missing_before(resumed.step + 1)):
            voice.event("WARN", what=missing)
        earlier = voice.directory.keep_metrics_before(resumed.step + 1)
        for warning in resumed.warnings:
            voice.event("WARN", what=warning)
        if resumed.path:
            changed = {"changed": "; ".join(resumed.changed)} if resumed.changed else {}
            voice.event("resume", step=resumed.step, path=str(resumed.path), **changed)
    return resumed.step, earlier


def _say_layout(voice: Reporter, job: TrainingJob, batches: Batches, parameters: int) -> None:
    train = job.spec.train
    count, smallest, largest = micro_batch_sizes(
        train.global_batch, train.micro_batch, batches.data_ranks
    )
    voice.event(
        "layout",
        grid={axis: job.grid.size(axis) for axis in job.grid.axes},
        nodes=len(set(job.world.node_of_rank)),
        zero=job.spec.zero.stage,
        threads_per_rank=job.threads,
        **_on_gpus(job.world),
        parameters=parameters,
        precision=train.precision,
        micro_batches=f"{count}x{largest}"
        if smallest == largest
        else f"{count}x{smallest}-{largest}",
        data=job.source.describe()["path"],
    )


def _on_gpus(world: World) -> dict[str, str]:
    return (
        {"device": world.device.name, "collectives": world.backend}
        if world.device.kind != "cpu" or world.backend != "mpi"
        else {}
    )


def _kernels_of_all(of_ranks: list[dict[str, str]]) -> dict[str, str]:
    """What any rank used; the stages of a pipeline use different operations."""
    found: dict[str, set[str]] = {}
    for choices in of_ranks:
        for what, name in choices.items():
            found.setdefault(what, set()).add(name)
    return {what: _OR.join(sorted(names)) for what, names in sorted(found.items())}


def _say_trace(voice: Reporter, traced: dict[str, Any]) -> None:
    if problem := traced.get("problem"):
        voice.event("WARN", what=problem)
        return
    left_out = {
        kind: traced[kind]
        for kind in ("steps_left_out", "ranks_left_out", "events_left_out")
        if traced[kind]
    }
    voice.event(
        "trace",
        file=str(voice.directory.path / NAME),
        steps=traced["steps"],
        events=traced["events"],
        **left_out,
    )


def _validation(outcome: Outcome) -> dict[str, Any] | None:
    return (
        outcome.validation.facts() | {"validation_step": outcome.validated}
        if outcome.validation
        else None
    )


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


def _what(job: TrainingJob, summary: dict[str, Any]) -> str:
    family = (
        job.spec.model.family.upper() if families.known(job.spec.model) else job.spec.model.family
    )
    return f"{job.spec.name}, a {family} of {summary['parameters']:,} parameters"


def _how_it_ended(job: TrainingJob, outcome: Outcome) -> list[str]:
    words = [
        f"run:        {run_directory.path_of(job.spec)} (metrics.jsonl, events.jsonl, summary.json)"
    ]
    if outcome.final_loss is None:
        words.append(
            f"nothing was left to do: {outcome.steps} steps are done, and train.steps = {job.spec.train.steps}"
        )
    if outcome.state == "stopped":
        again = (
            "started again, it goes on there"
            if outcome.saved == outcome.steps
            else "no checkpoint was saved there"
        )
        words.append(
            f"stopped by {outcome.reason} after step {outcome.steps} of {job.spec.train.steps}: {again}"
        )
    if outcome.state == "failed":
        words.append(f"failed: {outcome.reason}")
    return words
