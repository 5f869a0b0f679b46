"""`hpczero plan --svg`: a step of the best layout; of several numbers of nodes the trade."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hpczero.cli import main
from hpczero.commands.plan_picture import spans
from hpczero.model.families import layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.drawings import COLOURS
from hpczero.planner.platform import Platform
from hpczero.planner.step_time import StepTime, predict
from hpczero.spec.schema import Model, Parallel, Spec, Train, Zero

NAME = "{http://www.w3.org/2000/svg}"
SPEC = """
name = "small"
[model]
layers = 8
hidden = 768
heads = 12
seq_len = 512
vocab = 8192
[train]
steps = 1000
global_batch = 32
micro_batch = 4
[zero]
stage = 1
"""
FEW = ("--pin", "parallel.tensor", "--pin", "zero.offload", "--pin", "train.micro_batch")
FEW += ("--pin", "zero.stage", "--set", "memory.recompute=none")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def plan(*arguments: str, nodes: str = "1") -> int:
    where = ("--cluster", "dgx-h100", "--nodes", nodes)
    return main(["plan", "spec.toml", *where, *FEW, *arguments])


def texts(drawing: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in drawing.iter(f"{NAME}text")]


@pytest.mark.parametrize("stages", [1, 4])
def test_a_step_has_a_row_for_each_stage(
    here: Path, stages: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--set", f"parallel.pipeline={stages}")
    assert plan("--svg", "step.svg", *settings) == 0
    assert capsys.readouterr().out.endswith("wrote step.svg\n")
    drawing = ElementTree.fromstring((here / "step.svg").read_text())
    said = texts(drawing)
    assert [text for text in said if text.startswith("stage ")] == [
        f"stage {number}" for number in range(stages)
    ]
    title = next(text for text in said if text.startswith("small on 1 node of 8 ranks of dgx-h100"))
    assert f"pipeline {stages}" in title
    drawn = [one for one in drawing.iter(f"{NAME}rect") if one.get("width") != "12"]
    rows = {one.get("y") for one in drawn if one.get("fill") == COLOURS["optimizer"]}
    assert len(rows) == stages
    tips = ["".join(one.itertext()) for one in drawn]
    assert sum("forward of micro-batch 0 in chunk 0" in tip for tip in tips) == stages


def test_the_trade_has_a_dot_for_each_number_of_nodes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_grid = ("--set", "parallel.pipeline=1")
    assert plan("--svg", "trade.svg", "--json", *one_grid, nodes="1-2") == 0
    out, err = capsys.readouterr()
    assert out.startswith("{"), "the data alone"
    assert err == "wrote trade.svg\n"
    drawing = ElementTree.fromstring((here / "trade.svg").read_text())
    assert len(list(drawing.iter(f"{NAME}circle"))) == 2
    said = texts(drawing)
    assert {"1 node", "2 nodes", "node-hours", "small on dgx-h100"} <= set(said)


def test_a_file_that_exists_is_left_as_it_is(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "step.svg").write_text("mine")
    one_grid = ("--set", "parallel.pipeline=1")
    assert plan("--svg", "step.svg", *one_grid) == 2
    err = capsys.readouterr().err
    assert err == "hpczero: step.svg exists already and is left as it is: name another file\n"
    assert (here / "step.svg").read_text() == "mine"
    assert plan("--svg", "no/folder/step.svg", *one_grid) == 2
    assert "no/folder/step.svg cannot be written: No such file" in capsys.readouterr().err


LAYOUTS = [
    ("1f1b", 1, 1, 0),
    ("1f1b", 4, 1, 1),
    ("gpipe", 2, 1, 2),
    ("interleaved", 2, 2, 3),
    ("1f1b", 8, 1, 3),
]


def time_of(schedule: str, stages: int, chunks: int, zero: int, cluster: str) -> StepTime:
    model = Model(layers=8, hidden=1024, heads=16, seq_len=1024, vocab=8192)
    spec = Spec(
        model=model,
        train=Train(global_batch=48, micro_batch=2),
        parallel=Parallel(pipeline=stages, chunks=chunks, schedule=schedule),
        zero=Zero(stage=zero),
    )
    of = find(cluster).cluster
    platform = Platform(of.device.kind, native=of.device.kind == "cuda")
    return predict(spec, layers(model), Allocation(16, 8), of, platform)


@pytest.mark.parametrize(("schedule", "stages", "chunks", "zero"), LAYOUTS)
@pytest.mark.parametrize("cluster", ["dgx-h100", "epyc-7763"])
def test_spans_follow_each_other_and_end_with_the_step(
    schedule: str, stages: int, chunks: int, zero: int, cluster: str
) -> None:
    time = time_of(schedule, stages, chunks, zero, cluster)
    rows = spans(time)
    assert len(rows) == stages
    for row in rows:
        assert row[0].begin >= 0
        for one, after in pairwise(row):
            assert one.begin < one.end <= after.begin + 1e-12
        assert row[-1].end == pytest.approx(time.seconds, rel=1e-9)
        kinds = [one.kind for one in row]
        assert kinds.count("forward") == kinds.count("backward") > 0
        assert kinds[-2:] == ["optimizer", "other"]
        (update,) = (one for one in row if one.kind == "optimizer")
        assert update.end - update.begin == pytest.approx(time.causes["optimizer"])
    sent = [one.end - one.begin for row in rows for one in row if one.kind == "communication"]
    assert len(sent) == stages
    assert all(each <= time.causes["data"] * (1 + 1e-9) for each in sent)
