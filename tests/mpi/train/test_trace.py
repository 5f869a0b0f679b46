"""One trace of all ranks, in one time, that says what happened and changes nothing."""

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.comm import nodes
from hpczero.comm.grid import Grid
from hpczero.comm.trace import (
    ADVANCE,
    OPERATION,
    SPAN,
    WAIT,
    Event,
    EventKind,
    Recording,
    Trace,
    events,
)
from hpczero.comm.world import World
from hpczero.spec.schema import Data, Model, Spec, Train, Zero
from hpczero.train import trace_file
from hpczero.train.tracing import Tracing
from tests.support.training import Record, train

pytestmark = pytest.mark.mpi

FAR = 10**12  # ns between the clocks of two ranks


def spec_of(folder: Path, stage: int = 1, shared: bool = True) -> Spec:
    return Spec(
        name="traced",
        output=str(folder),
        model=Model(layers=2, hidden=24, heads=3, seq_len=16, vocab=61),
        data=Data(source="synthetic"),
        train=Train(
            steps=3,
            global_batch=6,
            micro_batch=2,
            precision="fp32",
            eval_batches=1,
            eval_every=2,
            trace=True,
        ),
        zero=Zero(stage=stage, node_shared=shared),
    )


@dataclass
class Traced:
    record: Record
    ranks: dict[int, list[Event]]
    facts: dict[str, Any]
    said: dict[str, Any] | None


@pytest.fixture
def folder(world: World | None, tmp_path: Path) -> Path | None:
    """One for all ranks, with the run's folder in it."""
    if world is None:
        return None
    shared = Path(world.broadcast_object(str(tmp_path)))
    (shared / "traced").mkdir(exist_ok=True)
    return shared


@pytest.fixture
def apart(world: World | None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ranks as if on computers of their own, with clocks that differ."""

    def part() -> None:
        assert world is not None
        true_time, skew = time.perf_counter_ns, world.rank * FAR
        monkeypatch.setattr(time, "perf_counter_ns", lambda: true_time() + skew)
        monkeypatch.setattr(nodes, "computer", lambda host: str(world.rank))

    return part


def trace_of(world: World, spec: Spec) -> Traced:
    tracing = Tracing(spec, world, Grid.build(spec.parallel, world.node_of_rank))
    record = train(world, spec)
    said = tracing.conclude()
    world.broadcast_object(0)  # the file is there
    path = Path(spec.output) / spec.name / "trace.json.gz"
    return Traced(
        record,
        trace_file.read(path),
        json.loads(gzip.decompress(path.read_bytes()))["otherData"],
        said,
    )


@pytest.mark.parametrize(("stage", "shared"), [(0, False), (1, True), (2, False), (3, False)])
def test_all_ranks_are_in_one_file(world: World, folder: Path, stage: int, shared: bool) -> None:
    traced = trace_of(world, spec_of(folder, stage, shared))
    assert sorted(traced.ranks) == list(range(world.size))
    assert (traced.facts["steps"], traced.facts["ranks"], traced.facts["steps_left_out"]) == (
        "1-3",
        world.size,
        "",
    )
    assert traced.facts["events"] == sum(map(len, traced.ranks.values()))
    for happened in traced.ranks.values():
        spans = [event.what.name for event in happened if event.what.kind == SPAN]
        micro_batches = max(1, -(-6 // (2 * world.size)))
        expected = [
            "step",
            "data",
            *["forward", "backward"] * micro_batches,
            "optimizer step",
            "loss agreement",
        ]
        assert spans == [*expected * 2, "evaluation", *expected, "evaluation"]
        assert not any(event.what.unfinished for event in happened)
    assert (traced.said is None) == (world.rank > 0)
    if traced.said:
        assert {"forward", "backward", "optimizer step", "other"} <= set(
            traced.said["mean_step"]["seconds"]
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_rank_does_lies_in_its_phases(world: World, folder: Path, stage: int) -> None:
    for happened in trace_of(world, spec_of(folder, stage, shared=False)).ranks.values():
        main = trace_file.main_track(happened)
        for number in (1, 2, 3):
            inside = trace_file.of_step(main, number)
            (step,) = [event for event in inside if event.what == EventKind(SPAN, "step")]
            assert sum(trace_file.exclusive_seconds(inside).values()) == pytest.approx(
                (step.end - step.begin) / 1e9
            )
        phases = [
            (event.begin, event.end)
            for event in main
            if event.what.kind == SPAN and event.what.name != "step"
        ]
        trained = max(end for _, end in phases)  # then the test itself reads the weights
        for event in main:
            if event.what.kind in (WAIT, ADVANCE) and event.begin < trained:
                assert any(begin <= event.begin and event.end <= end for begin, end in phases), (
                    event
                )


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_nobody_ends_a_collective_before_all_have_begun_it(
    world: World, folder: Path, apart: Callable[[], None], shared: bool, far: bool
) -> None:
    if far:
        apart()
    traced = trace_of(world, spec_of(folder, shared=shared))
    tolerance = round(2000 * traced.facts["clock_uncertainty_us"]) + 2
    assert tolerance < FAR / 1000
    found: dict[tuple[str, str, int], list[Event]] = {}
    for happened in traced.ranks.values():
        for event in happened:
            if event.what.kind == OPERATION:
                found.setdefault((event.what.axis, event.what.name, event.number), []).append(event)
    assert {axis for axis, _, _ in found} - {"data gathers"} == {"data", "world"}
    for key, operations in found.items():
        assert len(operations) == world.size, key
        if key[0] != "world":
            assert len({event.bytes for event in operations}) == 1, key
        if world.size > 1 and key[1] != "gather_objects":  # whoever has sent need not wait
            assert (
                max(event.begin for event in operations)
                <= min(event.end for event in operations) + tolerance
            ), (key, operations)


def test_sums_start_while_backward_goes_on(world: World, folder: Path) -> None:
    for happened in trace_of(world, spec_of(folder, shared=False)).ranks.values():
        for number in (1, 2, 3):
            during, all_of_them = trace_file.started_during(
                trace_file.of_step(happened, number), "reduce_scatter", "backward"
            )
            assert during == all_of_them > 2


def test_it_changes_nothing_and_ends(world: World, folder: Path) -> None:
    spec = spec_of(folder, stage=2)
    traced, plain = trace_of(world, spec), train(world, spec)
    assert type(world.trace) is Trace
    assert traced.record.losses == plain.losses
    assert all(
        torch.equal(traced.record.weights[name], plain.weights[name]) for name in plain.weights
    )


def test_how_far_clocks_are_apart(world: World, apart: Callable[[], None]) -> None:
    assert world.clock() == (0, 0)
    apart()
    found = world.clock()
    assert abs(found.ahead - world.rank * FAR) <= found.uncertainty + 1
    assert (found.uncertainty > 0) == (world.rank > 0)
    assert found.uncertainty < FAR / 1000


def test_both_ends_of_a_message_have_its_number(world: World) -> None:
    recording, group = Recording(), world.group("pipeline", range(world.size))
    world.record(recording)
    following, before = world.rank + 1, world.rank - 1
    with world.trace.step(1):
        for length in (4, 2) if world.size > 1 else ():
            works = (
                [group.start_send(torch.ones(length), following)] if following < world.size else []
            )
            works += [group.start_receive(torch.ones(length), before)] if before >= 0 else []
            for work in works:
                work.wait()
    world.record(Trace())
    seen = [
        event
        for step in recording.steps
        for event in events(step.rows, recording.whats)
        if event.what.axis == "pipeline"
    ]
    operations = {
        (event.what.name, event.what.peer, event.number, event.bytes)
        for event in seen
        if event.what.kind == OPERATION
    }
    numbers = world.numbers(range(world.size))
    sent = {
        ("send", numbers[following], number, size)
        for number, size in ((1, 16), (2, 8))
        if following < world.size
    }
    received = {("receive", numbers[before], number, 0) for number in (1, 2) if before >= 0}
    assert operations == (sent | received if world.size > 1 else set())
