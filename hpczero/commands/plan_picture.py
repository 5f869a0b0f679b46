"""The pictures of a plan as SVG: a step of a layout, and the trade between numbers of nodes."""

from collections.abc import Sequence

from hpczero.commands.plan_report import of_nodes, words
from hpczero.planner import drawings
from hpczero.planner.bill import Bill
from hpczero.planner.drawings import Choice
from hpczero.planner.search import Planned
from hpczero.planner.step_time import StepTime
from hpczero.svg import Span

_HOUR = 3600


def step(planned: Planned, cluster: str) -> str:
    """Return the step of a layout: what each stage does when, then what follows for all of them."""
    title = f"{planned.spec.name} on {of_nodes(planned.nodes)} of {cluster}: "
    title += f"{planned.time.seconds:.3g} s a step, {words(planned.layout)}"
    return drawings.step(spans(planned.time), title)


def spans(time: StepTime) -> list[list[Span]]:
    """Return the spans of each stage; gathers that a step begins with are drawn at its end."""
    stages = [
        [Span(one.begin, one.end, one.action.kind, str(one.action)) for one in intervals]
        for intervals in time.intervals()
    ]
    end = max(spans[-1].end for spans in stages)
    after = max(0.0, time.seconds - end)
    sent = min(after, time.causes["data"])
    updated = min(after - sent, time.causes["optimizer"])
    begin = end
    for kind, seconds in (
        ("communication", sent),
        ("optimizer", updated),
        ("other", after - sent - updated),
    ):
        if seconds > 0:
            for spans in stages:
                spans.append(Span(begin, begin + seconds, kind, f"{kind}: {seconds:.3g} s"))
        begin += seconds
    return stages


def trade(bests: Sequence[tuple[Planned, Bill]], title: str) -> str:
    choices = [
        Choice(planned.nodes.count, cost.seconds / _HOUR, cost.node_hours, words(planned.layout))
        for planned, cost in bests
    ]
    return drawings.trade(choices, title)
