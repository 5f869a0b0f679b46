"""`hpczero plan --explain RUN`: a run beside what is predicted of it; what says too little."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpczero.batch.sites import platform
from hpczero.calibrate.replay import replay
from hpczero.cli import main
from hpczero.model.families import layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.composed import Pipeline
from hpczero.planner.step_costs import CAUSES
from hpczero.planner.step_time import predict
from hpczero.spec.load import to_toml
from hpczero.spec.schema import Spec
from hpczero.train import trace_file
from tests.support.traced_steps import Known, traced

OF = Pipeline("1f1b", 2, 1, 4)
KNOWN = Known([20_000_000] * 2, [40_000_000] * 2, [900_000], waits={"data": 3_000_000})
TRACE = traced(OF, KNOWN)
SPEC = TRACE.spec
MEMORY = {"weights": 600_000_000, "activations": 250_000_000, "data": 10_000}
HELD = {"weights": 600_000_000, "activations": 350_000_000, "data": 20_000, "other": 70_000_000}


def written(path: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    path.write_text("\n".join(map(json.dumps, lines)) + end)


def memory_line(step: int, held: int) -> dict[str, Any]:
    of_rank = {"step": step, "rank": 1, "host": "a", "held": held}
    return of_rank | {"predicted": MEMORY, "measured": HELD}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of two ranks, whose steps took 0.2, 0.4 and 0.3 s."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "traced"
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(to_toml(SPEC))
    places = [{"rank": rank, "host": "a", "node": 0, "device": "the CPU"} for rank in range(2)]
    layout = {"event": "layout", "threads_per_rank": 1}
    written(folder / "events.jsonl", {"event": "start", "ranks": places}, layout)
    parts = {"compute_seconds": 0.125, "comm_seconds": 0.0625, "data_seconds": 0.03125}
    steps = [{"step": n, "step_seconds": s} | parts for n, s in enumerate((0.2, 0.4, 0.3), 1)]
    written(folder / "metrics.jsonl", *steps)
    written(folder / "memory.jsonl", memory_line(2, 10**9), memory_line(3, 900_000_000))
    return folder


def explained(*arguments: str, cluster: str = "epyc-7763") -> int:
    return main(["plan", "--explain", "traced", "--cluster", cluster, *arguments])


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert explained("--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def add_trace(run: Path) -> None:
    ranks = [trace_file.Rank(rank, f"rank {rank}", of) for rank, of in TRACE.events.items()]
    trace_file.write(run / "trace.json.gz", ranks, {}, 0)


def predicted(spec: Spec = SPEC) -> dict[str, float]:
    cluster = find("epyc-7763").cluster
    of = platform(spec, gpus=0)
    return predict(spec, layers(spec.model), Allocation(2, 2), cluster, of).causes


@pytest.mark.usefixtures("run")
def test_a_run_without_a_trace_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys)
    causes = predicted()
    assert (found["cluster"], found["ranks"], found["nodes"]) == ("epyc-7763", 2, 1)
    assert (found["step_seconds"], found["steps"], found["traced"]) == (0.3, 3, False)
    assert found["predicted_seconds"] == pytest.approx(sum(causes.values()))
    computing = sum(causes[name] for name in ("compute", "attention", "memory", "launch"))
    sending = sum(causes[name] for name in ("tensor", "bubble", "messages", "data"))
    assert found["predicted"]["computing"] == pytest.approx(computing)
    assert found["predicted"]["communication"] == pytest.approx(sending)
    assert found["predicted"]["optimizer"] == causes["optimizer"]
    measured = {name: seconds for name, seconds in found["measured"].items() if seconds}
    assert measured == {"computing": 0.125, "communication": 0.0625, "overhead": 0.03125}
    assert found["memory"] == memory_line(2, 10**9)


def test_a_traced_run_as_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_trace(run)
    found = data(capsys)
    again = replay(TRACE)
    assert found["traced"] is True
    assert found["measured"].keys() == found["predicted"].keys() == rows()
    assert sum(found["measured"].values()) == pytest.approx(again.measured, rel=1e-6)
    assert found["measured"]["computing"] == pytest.approx(again.causes["compute"])
    for cause in ("data", "bubble", "messages", "optimizer", "overhead"):
        assert found["measured"][cause] == pytest.approx(again.causes[cause]) != 0


def rows() -> set[str]:
    return set(CAUSES) - {"compute", "attention", "memory", "launch"} | {"computing"}


def test_what_people_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys)
    assert explained() == 0
    out = capsys.readouterr().out
    first, step, *_ = out.splitlines()
    assert first == "traced: 2 ranks on 1 node, held against epyc-7763"
    off = found["predicted_seconds"] / 0.3 - 1
    said = f"{found['predicted_seconds']:.4g} s predicted ({off:+.1%})"
    assert step == f"  a step     0.3 s in the median of 3, {said}"
    row = next(line for line in out.splitlines() if line.startswith("  communication"))
    mine, other, difference = map(float, re.findall(r"([-+\d.e]+) s", row))
    assert mine == pytest.approx(found["predicted"]["communication"], rel=1e-3)
    assert (other, difference) == (0.0625, pytest.approx(mine - other, rel=1e-2))
    assert "train.trace = true tells communication apart" in out
    assert "1.0 GB on rank 1 at step 2, 850.0 MB predicted (-15.0%)" in out
    assert re.search(r"  activations +250\.0 MB +350\.0 MB +-100\.0 MB\n", out)
    assert re.search(r"  other +0\.0 MB +70\.0 MB +-70\.0 MB\n", out)
    assert "  data " not in out, "too small to tell"
    add_trace(run)
    assert explained() == 0
    out = capsys.readouterr().out
    assert "train.trace" not in out
    assert re.search(r"\n  bubble +", out)


def test_lines_that_say_nothing_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = data(capsys)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 4, "step_seconds": "long"}\n{"step": 5}\n')
        file.write(
            '{"step": 6, "step_seconds": null}\n{"step": 7, "step_seconds": NaN}\n{"step": 8'
        )
    with (run / "memory.jsonl").open("a") as file:
        file.write('{"step": 9, "held": "much"}\n{"step": 9, "rank": 0, "host": "a", "held": 99')
    assert data(capsys) == before
    (run / "memory.jsonl").unlink()
    found = data(capsys)
    assert found == before | {"memory": None}
    assert explained() == 0
    assert "memory" not in capsys.readouterr().out


def test_memory_that_nothing_was_predicted_of_is_left_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(run / "memory.jsonl", memory_line(2, 10**9) | {"predicted": {}})
    assert explained() == 0
    assert "  memory " not in capsys.readouterr().out


def test_the_spec_may_name_the_cluster(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = SPEC.batch.model_copy(update={"cluster": "epyc-7763", "gpus_per_node": 4})
    (run / "spec.toml").write_text(to_toml(SPEC.model_copy(update={"batch": batch})))
    assert main(["plan", "--explain", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == "epyc-7763"
    computed = sum(predicted().values())
    assert found["predicted_seconds"] == pytest.approx(computed), "on CPUs, as it ran"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "--explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("hpczero: ")) == ("", 1)
    return err


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["traced"], "runs/traced names no cluster (batch.cluster), which --cluster would"),
        (["other", "--cluster", "epyc-7763"], "other: there is no such run"),
        (["traced", "--cluster", "summit"], 'there is no cluster "summit"'),
        (["traced", "--cluster", "dgx-h100"], "dgx-h100: it has GPUs, and the job computes on CPU"),
    ],
)
def test_one_message_says_what_is_missing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *arguments)


@pytest.mark.parametrize("name", ["metrics.jsonl", "spec.toml", "events.jsonl"])
def test_a_file_that_is_missing_is_named(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink()
    assert name in refusal(capsys, "traced", "--cluster", "epyc-7763")


@pytest.mark.parametrize("text", ["", '{"step": 1, "step_sec', '{"step": 1}\n'])
def test_a_run_without_a_step_is_refused(
    run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_text(text)
    said = refusal(capsys, "traced", "--cluster", "epyc-7763")
    assert "runs/traced has no step in metrics.jsonl" in said


def test_a_model_that_has_to_be_built_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = SPEC.model.model_copy(update={"family": "mine.models:build"})
    (run / "spec.toml").write_text(to_toml(SPEC.model_copy(update={"model": mine})))
    said = refusal(capsys, "traced", "--cluster", "epyc-7763")
    assert "mine.models:build has to be built before" in said
