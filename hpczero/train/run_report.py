"""Events of `hpczero run`, and its summary."""

from collections import Counter
from typing import Any

from hpczero import env, processors
from hpczero.data.samples import micro_batch_sizes
from hpczero.errors import InputError
from hpczero.planner.allocation import Allocation
from hpczero.planner.forecast import left_out
from hpczero.planner.outlook import Outlook, outlook
from hpczero.runs import energy
from hpczero.runs.goodput import goodput_in
from hpczero.spec import site_profile
from hpczero.text import format_span
from hpczero.train import preflight, setup
from hpczero.train.batches import Batches
from hpczero.train.run_directory import RunDirectory
from hpczero.train.summary import fullest, mixed_kernels
from hpczero.train.tracing import NAME
from hpczero.train.trainer import Outcome, Reporter
from hpczero.train.training_job import TrainingJob


def report_start(job: TrainingJob, reporter: Reporter | None) -> None:
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
    began = setup.start_time()
    facts = {"packages": packages, "git": setup.git_state(), "mpi": mpi}
    directory.event("start", began=began, ranks=ranks, job=env.batch_job(), **facts)
    if job.user_model:
        memory = f"the memory that {job.spec.model.family} needs"
        if job.layers:
            what = f"{memory} was checked without its activations, which are not known"
        else:
            what = f"{memory} was not checked: what the stages need is not known"
        reporter.event("WARN", what=what)
    precision = job.spec.train.precision
    if world.device.kind == "cpu" and not processors.has_products(precision):
        what = f"this processor cannot multiply {precision} natively: fp32 is much faster here"
        reporter.event("hint", key="train.precision", what=what)
    for what in (*left_out(job.spec, job.grid), *site_profile.unusable()):
        reporter.event("WARN", what=what)
    if job.asked.checkpoint.asynchronous > job.spec.checkpoint.asynchronous:
        what = "no room for a copy of the states: training waits while a checkpoint is saved"
        reporter.event("WARN", what=what)
    if job.asked.memory.recompute == "auto":
        reporter.event("memory", recompute=job.spec.memory.recompute, decided="auto")


def report_layout(
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


def report_end(reporter: Reporter, outcome: Outcome, summary: dict[str, Any]) -> None:
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


def as_noted(directory: RunDirectory, tokens: int = 0) -> dict[str, Any]:
    """Return what the lines of the run's directory say of it, trained on so many tokens."""
    booked = goodput_in(directory.path)
    return {
        "fullest": fullest(directory.fullest),
        "goodput": booked.as_data() if booked else None,
        "energy": energy.read(directory.path, tokens).as_data(),
    }


def _report_trace(reporter: Reporter, trace: dict[str, Any]) -> None:
    if problem := trace.get("problem"):
        reporter.event("WARN", what=problem)
        return
    path = str(reporter.directory.path / NAME)
    kinds = ("steps_left_out", "ranks_left_out", "events_left_out")
    left_out = {kind: trace[kind] for kind in kinds if trace[kind]}
    reporter.event("trace", file=path, steps=trace["steps"], events=trace["events"], **left_out)


def validation_of(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.validation is None:
        return None
    return outcome.validation.facts() | {"validation_step": outcome.validated}


def summary_of(
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
