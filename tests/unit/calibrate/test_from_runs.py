"""Rates that the trace of a run shows: found again from a trace that was made of known ones."""

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpczero.calibrate.from_runs import _links, text
from hpczero.calibrate.traced_run import read
from hpczero.comm.trace import OPERATION, SPAN, WAIT, Event, EventKind
from hpczero.errors import InputError
from hpczero.model.families import family, parameter_count
from hpczero.planner.cluster import Cluster, find
from hpczero.spec.load import load
from hpczero.train import trace_file
from tests.support.launch import hpczero, launch

SPEC = """
name = "traced"
[model]
layers = 2
hidden = 64
heads = 4
seq_len = 32
[data]
source = "synthetic"
[train]
steps = 5
global_batch = 8
precision = "fp32"
"""
FORWARD, BACKWARD, UPDATE, BESIDE = 100_000_000, 200_000_000, 10_000_000, 5_000_000  # ns
LATENCY, NS_A_BYTE = 20_000, 0.5
SIZES = (4096, 1 << 18, 1 << 22)


def events(rank: int) -> Iterator[Event]:
    """Yield steps 1 to 4; rank 1 comes late to every collective, for which rank 0 waits."""
    at = 0
    for step in range(1, 5):
        begin = at
        for name, duration in (("forward", FORWARD), ("backward", BACKWARD)):
            yield Event(EventKind(SPAN, name), at, at + duration)
            at += duration
        for number, size in enumerate(SIZES):
            taken = LATENCY + round(NS_A_BYTE * size)
            late = 3_000_000 if rank == 0 else 0
            what = EventKind(OPERATION, "reduce_scatter", "data")
            yield Event(what, at, at + late + taken, size, 10 * step + number)
            yield Event(EventKind(WAIT, "reduce_scatter", "data"), at, at + late + taken)
            at += late + taken
        yield Event(EventKind(SPAN, "optimizer step"), at, at + UPDATE)
        at += UPDATE + BESIDE
        yield Event(EventKind(SPAN, "step"), begin, at, number=step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "traced"
    folder.mkdir()
    (folder / "spec.toml").write_text(SPEC)
    places = [
        {"rank": rank, "host": "a", "pid": 1, "node": 0, "device": "the CPU"} for rank in (1, 0)
    ]
    lines = [{"event": "start", "ranks": places}, {"event": "layout", "threads_per_rank": 4}]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ranks = [trace_file.Rank(rank, f"rank {rank}", list(events(rank))) for rank in range(2)]
    trace_file.write(folder / "trace.json.gz", ranks, {}, 0)
    return folder


def test_the_rates_of_a_run(run: Path) -> None:
    found = read(run)
    spec = load(str(run / "spec.toml")).spec
    operations = 8 * sum(family(spec.model).operations(spec.model, 32))
    assert found.rate == pytest.approx(operations / 2 / 0.3, rel=0.01)
    assert found.bandwidth == pytest.approx(parameter_count(spec.model) / 2 * 28 / 0.01, rel=0.01)
    assert found.step_seconds == pytest.approx(0.005, rel=0.01)
    assert (found.ranks, found.ranks_on_node, found.threads) == (2, 2, 4)
    assert found.steps == "2-4"
    assert not found.between
    for size, seconds in found.inside["reduce_scatter"]:
        assert seconds == pytest.approx((LATENCY + NS_A_BYTE * size) / 1e9, rel=0.01)


def test_an_update_of_replicas_is_of_the_same_shards(run: Path) -> None:
    """Two ranks with a copy each update all that one would, at any stage."""
    whole = run.with_name("whole")
    shutil.copytree(run, whole)
    spec = SPEC + "[zero]\nshard_ranks = 1\nstage = {}\n"
    for stage in (0, 1):
        (whole / "spec.toml").write_text(spec.format(stage))
        assert read(whole).bandwidth == pytest.approx(2 * read(run).bandwidth)


def test_a_file_without_a_base_has_what_the_run_shows(run: Path) -> None:
    cluster = Cluster.model_validate(tomllib.loads(text([run], None)))
    products = cluster.products("fp32")
    assert products.peak_tflops * products.reached == pytest.approx(
        read(run).rate / 4 / 1e12, rel=0.01
    )
    assert cluster.node.devices == 8
    assert cluster.node.link_gb_s == pytest.approx(2, rel=0.02)
    assert cluster.node.link_us == pytest.approx(20, rel=0.2)
    assert "network" not in cluster.model_fields_set
    assert any("traced" in source for source in cluster.sources)


def test_a_base_keeps_what_the_run_does_not_show(run: Path) -> None:
    base = find("epyc-7763").cluster
    cluster = Cluster.model_validate(tomllib.loads(text([run], base)))
    assert cluster.network == base.network
    assert cluster.products("fp32").peak_tflops == base.products("fp32").peak_tflops
    assert cluster.products("fp32").reached < base.products("fp32").reached
    assert cluster.device.bandwidth_gb_s == base.device.bandwidth_gb_s
    assert cluster.sources[: len(base.sources)] == base.sources


def test_what_is_no_traced_run_is_said(run: Path) -> None:
    with pytest.raises(InputError, match="the base's devices are cuda, the runs' cpu"):
        text([run], find("dgx-h100").cluster)
    (run / "trace.json.gz").write_bytes(b"no trace")
    with pytest.raises(InputError, match="is no trace of a run"):
        read(run)
    (run / "trace.json.gz").unlink()
    with pytest.raises(InputError, match=r"train\.trace = true"):
        read(run)


def test_events_that_say_nothing_are_refused(run: Path) -> None:
    (run / "events.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="does not say how the run started"):
        read(run)


def test_the_verb_writes_a_file_once(run: Path, tmp_path: Path) -> None:
    command = hpczero("calibrate", "--from", str(run), "--name", "seen")
    done = launch(command, 60, tmp_path)
    assert (done.code, done.err) == (0, "")
    path = tmp_path / "clusters" / "seen.toml"
    assert done.out.endswith("written: clusters/seen.toml (hpczero cluster show seen)\n")
    path.write_text(path.read_text() + "# mine\n")
    again = launch(command, 60, tmp_path)
    assert (again.code, again.err.count("hpczero: ")) == (2, 1)
    assert "--overwrite" in again.err
    assert path.read_text().endswith("# mine\n")
    assert launch([*command, "--overwrite", "--json"], 60, tmp_path).code == 0
    assert "# mine" not in path.read_text()


def test_links_of_a_node_s_ranks_that_send_at_once() -> None:
    """Four ranks of 1 GB/s have 4 GB/s of one adapter; what they take says nothing of one alone."""
    points = [(size, 1e-5 + size / 1e9) for size in (1e6, 4e6, 16e6)]
    run: Any = SimpleNamespace(ranks_on_node=4, inside={}, between={"all_reduce": points})
    tree: dict[str, Any] = {"network": {"adapter_gb_s": 1.0}}  # of a base that names no adapters
    _links(tree, [run])
    assert tree["network"]["adapter_gb_s"] == pytest.approx(4, rel=0.01)
    assert tree["network"]["operations"] == {}
    run.ranks_on_node = 1
    _links(tree, [run])
    assert tree["network"]["adapter_gb_s"] == pytest.approx(1, rel=0.01)
    assert tree["network"]["operations"]["all_reduce"]["gb_s"] == pytest.approx(1, rel=0.01)


def test_operations_that_wait_say_nothing_of_links() -> None:
    points = [(size, 5e-3 + size / 1e13) for size in (1e6, 4e6, 16e6)]
    run: Any = SimpleNamespace(ranks_on_node=1, inside={"all_gather": points}, between={})
    tree: dict[str, Any] = {"node": {}}
    _links(tree, [run])
    assert tree == {"node": {}}
