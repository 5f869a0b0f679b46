"""How long a job takes where its cluster is known: for `check`, `render`, `submit` and a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpczero.errors import InputError
from hpczero.model.shapes import Layer
from hpczero.planner import cluster
from hpczero.planner.allocation import Allocation
from hpczero.planner.bill import OF_A_JOB, Bill
from hpczero.planner.platform import Platform
from hpczero.planner.step_time import StepTime, predict
from hpczero.spec.schema import Spec
from hpczero.text import format_count, format_duration, format_number, parse_duration, toml_repr


@dataclass(frozen=True)
class Outlook:
    """The time of a job on its cluster; None, and the `problem`, where it cannot be predicted."""

    spec: Spec
    cluster: str
    nodes: Allocation
    time: StepTime | None = None
    problem: str = ""

    @cached_property
    def bill(self) -> Bill | None:
        """What the training takes in jobs of `batch.walltime`; None if one has no time to train."""
        walltime = parse_duration(self.spec.batch.walltime)
        if walltime <= OF_A_JOB or not self.time:
            return None
        return Bill.of(self.spec.train.steps, self.time.seconds, self.nodes.count, walltime)

    def in_lines(self) -> Iterator[str]:
        if not (time := self.time):
            return
        yield (
            f"{time.seconds:.3g} s a step, {format_number(time.tokens_per_second)} tokens/s, "
            f"{time.utilisation:.1%} of the peak (predicted for {self.cluster})"
        )
        for _, share, sentence in time.largest():
            yield f"{share:>4.0%} {sentence}"
        if self.bill:
            yield (
                f"the training: {self.bill.days:.3g} days, {self.bill.node_hours:,.4g} node-hours, "
                f"{format_count(self.bill.jobs, 'job')} of {self.spec.batch.walltime}"
            )

    def warnings(self) -> Iterator[str]:
        """Yield where the time that is asked for falls short, or why none is predicted."""
        batch = self.spec.batch
        if self.problem:
            name = toml_repr(batch.cluster)
            yield f"no time is predicted for batch.cluster = {name}: {self.problem}"
        elif self.bill is None:
            yield (
                f"batch.walltime = {toml_repr(batch.walltime)}: a job needs about "
                f"{format_duration(OF_A_JOB)} to start, to read a checkpoint and to write one"
            )
        elif self.bill.jobs > batch.chain:
            count = self.bill.jobs
            enough = f"batch.chain = {count:,}" if count <= 1000 else "more walltime or nodes"
            yield (
                f"the training takes about {format_count(count, 'job')} of {batch.walltime}, and "
                f"batch.chain is {batch.chain:,}: {enough} would finish it"
            )

    def as_data(self) -> dict[str, Any]:
        if not self.time:
            return {"cluster": self.cluster, "problem": self.problem}
        bill = self.bill
        return {
            "cluster": self.cluster,
            "step_seconds": self.time.seconds,
            "tokens_per_second": self.time.tokens_per_second,
            "utilisation": self.time.utilisation,
            "causes": self.time.causes,
            "days": bill.days if bill else None,
            "node_hours": bill.node_hours if bill else None,
            "jobs": bill.jobs if bill else None,
        }


def outlook(
    spec: Spec, layers: Sequence[Layer], nodes: Allocation, platform: Platform
) -> Outlook | None:
    """Return the time of a job; None where `batch.cluster` is empty.

    InputError if there is no such cluster.
    """
    if not spec.batch.cluster:
        return None
    named = cluster.find(spec.batch.cluster)
    gpus = spec.batch.gpus_per_node or named.cluster.node.devices
    if platform.device == "cuda" and nodes.most > gpus:
        named = replace(named, cluster=named.cluster.with_devices(gpus))
    there_are = named.cluster.nodes
    try:
        if 0 < there_are < nodes.count:
            is_there = format_count(there_are, "node")
            raise InputError(f"it has {is_there}, and the job takes {nodes.count:,}")
        hold_against(named.cluster, spec, nodes, platform)
        time = predict(spec, layers, nodes, named.cluster, platform)
    except InputError as error:
        return Outlook(spec, named.name, nodes, problem=str(error))
    return Outlook(spec, named.name, nodes, time)


def hold_against(of: cluster.Cluster, spec: Spec, nodes: Allocation, platform: Platform) -> None:
    """Refuse a cluster that has not the devices, links and files of the job (InputError)."""
    if of.device.kind != platform.device:
        its, the_job_s = ("GPUs", "CPUs") if of.device.kind == "cuda" else ("CPUs", "GPUs")
        raise InputError(f"it has {its}, and the job computes on {the_job_s}")
    of.need_links(nodes.most, nodes.count)
    of.need_files(spec.zero.folder)
