"""A plan in lines for people, and as data."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from hpczero.planner.allocation import Allocation
from hpczero.planner.bill import Bill
from hpczero.planner.cluster import Named
from hpczero.planner.layouts import Layout
from hpczero.planner.memory import states_of_a_parameter
from hpczero.planner.room import Account
from hpczero.planner.search import Found, Machine, Planned
from hpczero.planner.trade import Difference
from hpczero.spec.rules import AXES
from hpczero.spec.schema import Spec
from hpczero.text import format_count, format_memory, format_number

_CALLED = {"device": "a device", "host": "a node", "all": "a node", "files": "files"}
_SHOWN = 6  # causes and kinds of a difference


def of_nodes(nodes: Allocation) -> str:
    ranks = format_count(nodes.ranks_per_node, "rank")
    return f"{format_count(nodes.count, 'node')} of {ranks}"


def words(layout: Layout) -> str:
    """Return a layout in short: its axes, then what it gives up for memory."""
    sequence = " with sequences" if layout.sequence_parallel else ""
    chunks = f" x {layout.chunks} chunks" if layout.chunks > 1 else ""
    schedule = f" {layout.schedule}" if layout.pipeline > 1 and layout.chunks == 1 else chunks
    parts = [
        f"tensor {layout.tensor}{sequence}",
        f"pipeline {layout.pipeline}{schedule}",
        f"ZeRO {layout.stage}" + _division(layout) + " shared" * (layout.node_shared is True),
        f"micro-batch {layout.micro_batch}",
        *_order(layout),
        *_saved(layout),
    ]
    return ", ".join(parts)


def _division(layout: Layout) -> str:
    words = {"all": "", "node": " inside nodes"}
    return words.get(str(layout.shard_ranks), f" among {layout.shard_ranks}")


def _order(layout: Layout) -> list[str]:
    """Return the order of the axes, innermost first, where it is not the usual one."""
    alone = {axis for axis in ("tensor", "pipeline") if getattr(layout, axis) == 1}
    order = [axis for axis in layout.order.split(",") if axis not in alone]
    usual = [axis for axis in AXES if axis not in alone]
    return [] if order in (usual, ["auto"]) else [f"order {'-'.join(order)}"]


def _saved(layout: Layout) -> list[str]:
    again = layout.recompute
    if layout.recompute_every > 1 and again != "none":
        again += f" of every {layout.recompute_every}"
    place, _, _ = layout.offload.partition(":")
    saved = {
        f"recompute {again}": again != "none",
        "inputs cut": layout.partition_activations,
        "activations to the host": layout.offload_activations == "cpu",
        "loss by pieces": bool(layout.loss_chunk),
        f"states to {place}": place != "none",
    }
    return [text for text, done in saved.items() if done]


def heading(spec: Spec, named: Named, found: Sequence[Found]) -> Iterator[str]:
    cluster = named.cluster
    yield f"{spec.name} on {named.name}: nodes of {cluster.node.devices} x {cluster.device.name}"
    for one in found:
        counts = one.counts
        yield (
            f"  {of_nodes(one.nodes)}: {counts.all:,} layouts; {counts.slower:,} are slower, "
            f"{counts.too_large:,} do not fit, {counts.needless:,} give up memory that they need "
            f"not, {counts.timed:,} timed"
        )
    unknown = [
        what
        for what, size in (
            ("a node", cluster.node.memory_gb),
            ("a device", cluster.device.memory_gb or cluster.device.kind == "cpu"),
        )
        if not size
    ]
    if unknown:
        yield f"note: the memory of {' and '.join(unknown)} is not known: nothing is too large"


def table(rows: Sequence[tuple[Planned, Bill]]) -> Iterator[str]:
    """Yield a line for each layout, the fastest first."""
    if not rows:
        return
    accounts = rows[0][0].fit.accounts
    names = "".join(f"{_CALLED[account.name]:>10}" for account in accounts[:2])
    head = f"  s a step  tokens/s  used{names}   days  node-hours  jobs  layout"
    yield ""
    yield f"{'':>3}{head}"
    for number, (planned, cost) in enumerate(rows, start=1):
        sizes = "".join(f"{_size(account):>10}" for account in planned.fit.accounts[:2])
        time = planned.time
        axes = planned.spec.parallel
        data = planned.nodes.ranks // prod((axes.tensor, axes.pipeline))
        yield (
            f"{number:>3}  {time.seconds:>8.4g}{format_number(time.tokens_per_second):>10}"
            f"{time.utilisation:>6.1%}{sizes}{cost.days:>7.1f}{cost.node_hours:>12,.0f}"
            f"{cost.jobs:>6,}  data {data}, {words(planned.layout)}"
        )
    if any(planned.fit.verdict != "fits" for planned, _ in rows):
        yield "~ too close to call: what the allocator loses may be more than what is left"
    yield from causes(rows[0][0])


def causes(planned: Planned) -> Iterator[str]:
    """Yield the largest causes of a step's time, and what would shrink them."""
    yield ""
    yield "the first one's step:"
    for _, share, sentence in planned.time.largest():
        yield f"  {share:>4.0%} {sentence}"


def _size(account: Account) -> str:
    return ("~" if account.may_exceed else "") + format_memory(account.size)


def trade(
    bests: Sequence[tuple[Planned, Bill]], front: Sequence[tuple[Planned, Bill]]
) -> Iterator[str]:
    """Yield a line for each number of nodes; those on the Pareto front are marked."""
    kept = {planned.nodes.count for planned, _ in front}
    yield ""
    yield f"{'nodes':>7}{'s a step':>10}{'days':>8}{'node-hours':>12}{'jobs':>6}  layout"
    for planned, cost in bests:
        mark = "*" if planned.nodes.count in kept else " "
        yield (
            f"{mark}{planned.nodes.count:>6}{planned.time.seconds:>10.4g}{cost.days:>8.1f}"
            f"{cost.node_hours:>12,.0f}{cost.jobs:>6,}  {words(planned.layout)}"
        )
    yield "* no other number of nodes is both faster and cheaper"


def as_data(planned: Planned, cost: Bill) -> dict[str, Any]:
    time = planned.time
    return {
        "layout": planned.layout._asdict(),
        "verdict": planned.fit.verdict,
        "step_seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "utilisation": time.utilisation,
        "causes": dict(time.causes),
        "memory": {
            account.name: {"bytes": account.size, "available": account.available}
            for account in planned.fit.accounts
        },
        "days": cost.days,
        "node_hours": cost.node_hours,
        "jobs": cost.jobs,
    }


def difference(found: Difference) -> Iterator[str]:
    own, best = found.planned, found.best
    yield f"  {words(own.layout)}"
    yield f"  best: {words(best.layout)}"
    if found.exceeds:
        yield f"  does not fit: {found.exceeds}"
    times = f"{own.time.seconds:.4g} s a step, {best.time.seconds:.4g} s with the best"
    yield f"  time      {times}{': ' if found.seconds else ''}{_in_words(found.seconds, _seconds)}"
    account, other = own.fit.first, best.fit.first
    stage = f" (stage {found.stage} is the fullest)" if own.layout.pipeline > 1 else ""
    yield (
        f"  memory    {format_memory(account.size)} on {_CALLED[account.name]}{stage}, "
        f"{format_memory(other.size)} with the best"
    )
    if found.memory:
        yield f"            its fullest rank: {_in_words(found.memory, _bytes)}"


def _in_words(more: Mapping[str, Any], text: Any) -> str:
    return ", ".join(f"{what} {text(value)}" for what, value in list(more.items())[:_SHOWN])


def _seconds(value: float) -> str:
    return f"{value:+.3g} s"


def _bytes(value: int) -> str:
    return f"{'+' if value > 0 else '-'}{format_memory(abs(value))}"


def difference_as_data(found: Difference) -> dict[str, Any]:
    return {
        "layout": found.planned.layout._asdict(),
        "best": found.best.layout._asdict(),
        "verdict": found.planned.fit.verdict,
        "exceeds": found.exceeds,
        "step_seconds": found.planned.time.seconds,
        "best_step_seconds": found.best.time.seconds,
        "seconds_more": dict(found.seconds),
        "bytes_more": dict(found.memory),
        "fullest_stage": found.stage,
    }


def of_unknown_model(spec: Spec, machine: Machine, nodes: Sequence[Allocation]) -> Iterator[str]:
    """Yield what is known of a model without building it: its states, by their parameters."""
    yield (
        f"{spec.model.family} has to be built before its layers are known: no time, no layout and "
        "no activations are predicted for it"
    )
    train = spec.train
    tokens = train.global_batch * spec.seq_len
    yield f"  a step is {tokens:,} tokens, the training {train.steps * tokens:,}"
    yield "  bytes of states for each parameter, with all ranks on the data axis:"
    for one in nodes:
        yield f"  {of_nodes(one)}: {', '.join(_states(spec, machine, one))}"


def _states(spec: Spec, machine: Machine, nodes: Allocation) -> Iterator[str]:
    node = machine.cluster.hardware
    of_rank = node.gpu_memory_gb or node.memory_gb / nodes.ranks_per_node
    for stage in range(4):
        each = states_of_a_parameter(spec, stage, nodes.ranks)
        most = f" (at most {format_number(of_rank * 1e9 / each)} parameters)" if of_rank else ""
        yield f"ZeRO {stage} {each:.3g}{most}"
