"""How long a job takes where its cluster is known: for `check`, `render`, `submit` and a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpczero.errors import InputError
from hpczero.model.families import known
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
    """The time of a job on its cluster."""

    spec: Spec
    cluster: str
    nodes: Allocation
    time: StepTime

    @cached_property
    def bill(self) -> Bill | None:
        """What the training takes in jobs of `batch.walltime`; None if one has no time to train."""
        walltime = parse_duration(self.spec.batch.walltime)
        if walltime <= OF_A_JOB:
            return None
        return Bill.of(self.spec.train.steps, self.time.seconds, self.nodes.count, walltime)

    def in_lines(self) -> Iterator[str]:
        time = self.time
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
        """Yield where the time that is asked for falls short."""
        batch = self.spec.batch
        if self.bill is None:
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
    """Return the time of a job; None where `batch.cluster` is empty, or the model not known.

    InputError if there is no such cluster, or if it has other devices than the job.
    """
    name = spec.batch.cluster
    if not name or not known(spec.model):
        return None
    named = cluster.find(name)
    kind = named.cluster.device.kind
    if kind != platform.device:
        raise InputError(
            f"batch.cluster = {toml_repr(name)}: its devices are "
            f"{'GPUs' if kind == 'cuda' else 'CPUs'}, and the job computes on "
            f"{'GPUs' if platform.on_gpus else 'CPUs'} (train.device)"
        )
    named.cluster.need_links(nodes.most, nodes.count)
    time = predict(spec, layers, nodes, named.cluster, platform)
    return Outlook(spec, named.name, nodes, time)
