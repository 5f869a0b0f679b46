"""`hpczero plan --explain RUN`: where a run and what was predicted of it part."""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from hpczero import safe_files
from hpczero.batch import sites
from hpczero.calibrate.replay import replay
from hpczero.calibrate.run_trace import TRACE, RunTrace, start_of, whole_lines
from hpczero.commands.jobs import run_named
from hpczero.errors import InputError, for_terminal
from hpczero.model.families import known, layers
from hpczero.planner import cluster
from hpczero.planner.allocation import Allocation
from hpczero.planner.outlook import hold_against
from hpczero.planner.step_costs import CAUSES
from hpczero.planner.step_time import StepTime, predict
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from hpczero.text import format_count, format_memory, printable
from hpczero.train.run_directory import is_of_memory

# causes that a trace does not tell apart, and those that metrics do not
_COMPUTING = ("compute", "attention", "memory", "launch")
_COMMUNICATION = ("tensor", "bubble", "messages", "data")
_TOLD = 0.001  # of a step: a smaller row is left out


@dataclass(frozen=True)
class Explained:
    """A run's step by cause, predicted and measured, and the memory of its fullest rank by kind."""

    run: Path
    spec: Spec
    cluster: str
    nodes: Allocation
    seconds: float  # of the median step
    steps: int
    time: StepTime
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    traced: bool
    memory: Mapping[str, Any] | None  # a line of memory.jsonl

    @property
    def off(self) -> float:
        return self.time.seconds / self.seconds - 1


def explain(options: Namespace) -> int:
    found = _explained(run_named(options.explain), options.cluster)
    if options.json:
        print(json.dumps(_as_data(found), indent=2))
    else:
        print(for_terminal("\n".join(_in_lines(found))))
    return 0


def _explained(run: Path, named: str | None) -> Explained:
    spec = load(str(run / "spec.toml")).spec
    name = named or spec.batch.cluster
    if not name:
        raise InputError(
            f"{printable(str(run))} names no cluster (batch.cluster), which --cluster would; "
            "hpczero calibrate makes one of the machine that it ran on"
        )
    of = cluster.find(name)
    start = start_of(run)
    nodes = Allocation(len(start.nodes), max(Counter(start.nodes).values()))
    metrics = whole_lines(run / "metrics.jsonl")
    seconds = [value for value in _figures(metrics, "step_seconds") if value > 0]
    if not seconds:
        raise InputError(f"{printable(str(run))} has no step in metrics.jsonl")
    time = _predicted(spec, of, nodes, "cpu" if start.device == "the CPU" else "cuda")
    traced = safe_files.is_seen(run / TRACE)
    if traced:
        measured = replay(RunTrace.read(run)).causes
        together = {"computing": _COMPUTING}
    else:
        measured = _of_metrics(metrics)
        together = {"computing": _COMPUTING, "communication": _COMMUNICATION}
    of_memory = filter(is_of_memory, whole_lines(run / "memory.jsonl"))
    return Explained(
        run,
        spec,
        of.name,
        nodes,
        median(seconds),
        len(seconds),
        time,
        _together(time.causes, together),
        _together(measured, together),
        traced,
        max(of_memory, key=lambda line: int(line["held"]), default=None),
    )


def _predicted(spec: Spec, of: cluster.Named, nodes: Allocation, device: str) -> StepTime:
    """Return the time of a step on the devices that the run had; InputError if there is none."""
    train = spec.train.model_copy(update={"device": device})
    spec = spec.model_copy(update={"train": train})
    platform = sites.platform(spec, gpus=0)
    try:
        hold_against(of.cluster, spec, nodes, platform)
    except InputError as error:
        raise InputError(f"{printable(of.name)}: {error}") from None
    known_layers = layers(spec.model) if known(spec.model) else []
    return predict(spec, known_layers, nodes, of.cluster, platform)


def _of_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
    names = {"compute_seconds": "compute", "comm_seconds": "data", "data_seconds": "overhead"}
    return {cause: median(_figures(metrics, name) or [0.0]) for name, cause in names.items()}


def _figures(lines: list[dict[str, Any]], name: str) -> list[float]:
    """Return what the lines have under a name; what is no number is left out."""
    values = [line.get(name) for line in lines]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return [number for number in numbers if isfinite(number)]


def _together(
    causes: Mapping[str, float], groups: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    """Return the causes with those of a group added up, in the order of CAUSES."""
    group_of = {cause: name for name, members in groups.items() for cause in members}
    found: dict[str, float] = {}
    for cause in CAUSES:
        name = group_of.get(cause, cause)
        found[name] = found.get(name, 0.0) + causes.get(cause, 0.0)
    return found


def _in_lines(found: Explained) -> Iterator[str]:
    ranks, nodes = format_count(found.nodes.ranks, "rank"), format_count(found.nodes.count, "node")
    yield f"{printable(found.run.name)}: {ranks} on {nodes}, held against {found.cluster}"
    yield (
        f"  a step     {found.seconds:.4g} s in the median of {found.steps:,}, "
        f"{found.time.seconds:.4g} s predicted ({found.off:+.1%})"
    )
    yield ""
    yield f"  {'':<16}{'predicted':>12}{'measured':>12}{'too long':>12}"
    for cause, predicted in found.predicted.items():
        measured = found.measured.get(cause, 0.0)
        if max(predicted, measured) > _TOLD * found.seconds:
            yield (
                f"  {cause:<16}{predicted:>10.4g} s{measured:>10.4g} s"
                f"{predicted - measured:>+10.3g} s"
            )
    if not found.traced:
        yield "  a run with train.trace = true tells communication apart, and what it waits for"
    yield from _of_memory(found.memory)


def _of_memory(line: Mapping[str, Any] | None) -> Iterator[str]:
    if not line or not line["held"] or not line["predicted"]:
        return
    predicted, measured = line["predicted"], line.get("measured")
    measured = measured if isinstance(measured, dict) else {}
    total = sum(predicted.values())
    yield ""
    yield (
        f"  memory     {format_memory(line['held'])} on rank {line['rank']} at step "
        f"{line['step']:,}, {format_memory(total)} predicted ({total / line['held'] - 1:+.1%})"
    )
    for kind in sorted({*predicted, *measured}, key=lambda kind: -predicted.get(kind, 0)):
        own, other = predicted.get(kind, 0), measured.get(kind, 0)
        if max(own, other) > _TOLD * line["held"]:
            difference = f"{'+' if own >= other else '-'}{format_memory(abs(own - other))}"
            yield (
                f"  {kind:<22}{format_memory(own):>12}{format_memory(other):>12}{difference:>12}"
            )


def _as_data(found: Explained) -> dict[str, Any]:
    return {
        "run": str(found.run),
        "cluster": found.cluster,
        "ranks": found.nodes.ranks,
        "nodes": found.nodes.count,
        "step_seconds": found.seconds,
        "steps": found.steps,
        "predicted_seconds": found.time.seconds,
        "predicted": dict(found.predicted),
        "measured": dict(found.measured),
        "traced": found.traced,
        "memory": dict(found.memory) if found.memory else None,
    }
