"""`hpczero plan` as a user calls it: what it prints, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpczero.cli import main
from hpczero.planner.advice import CALLED
from hpczero.planner.layouts import TABLES
from hpczero.spec.load import load
from tests.support.launch import hpczero, launch

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
micro_batch = 3
[batch]
walltime = "1h"
[zero]
stage = 1
"""
FEW = ("--pin", "parallel.tensor", "--pin", "parallel.pipeline", "--pin", "zero.offload")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def plan(*arguments: str, nodes: str = "1", cluster: str = "dgx-h100") -> int:
    return main(["plan", "spec.toml", "--cluster", cluster, "--nodes", nodes, *arguments])


def data(capsys: pytest.CaptureFixture[str], *arguments: str, **where: str) -> Any:
    assert plan("--json", *arguments, **where) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*FEW, "--top", "4") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "small on dgx-h100: nodes of 8 x H100-SXM5-80GB"
    assert "layouts" in lines[1]
    assert [line.split()[0] for line in lines[4:8]] == ["1", "2", "3", "4"]
    for word in ("s a step", "tokens/s", "used", "a device", "days", "node-hours", "jobs"):
        assert word in lines[3]
    assert max(map(len, lines)) < 200


@pytest.mark.usefixtures("here")
def test_rows_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    (nodes,) = data(capsys, *FEW)["nodes"]
    rows = nodes["layouts"]
    assert (nodes["nodes"], nodes["ranks"]) == (1, 8)
    assert [row["step_seconds"] for row in rows] == sorted(row["step_seconds"] for row in rows)
    for row in rows:
        assert row["layout"].keys() == TABLES.keys()
        assert sum(row["causes"].values()) == pytest.approx(row["step_seconds"])
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(32 * 512)
        assert row["memory"]["device"]["bytes"] <= row["memory"]["device"]["available"]
        assert 0 < row["utilisation"] < 1


@pytest.mark.usefixtures("here")
def test_the_trade_between_numbers_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    counts = [one["nodes"] for one in data(capsys, *FEW, nodes="1-3")["nodes"]]
    assert counts == [1, 2, 3]
    assert plan(*FEW, nodes="1-3") == 0
    out = capsys.readouterr().out
    assert "\n*     1 " in out, "fewest node-hours"
    assert "* no other number of nodes is both faster and cheaper" in out


def test_what_is_written_is_what_was_planned(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data(capsys, "--write", "best.toml", nodes="2")
    (best, *_) = found["nodes"][0]["layouts"]
    written = load("best.toml").spec
    values = {key: getattr(getattr(written, table), key) for key, table in TABLES.items()}
    assert values == best["layout"]
    assert (written.batch.nodes, written.batch.gpus_per_node) == (2, 8)
    assert (written.train.device, written.train.global_batch) == ("auto", 32)
    check = ["check", "best.toml", "--ranks", "16", "--ranks-per-node", "8", "--json"]
    assert main(check) == 0
    memory = json.loads(capsys.readouterr().out)["layout"]["memory"]
    device = best["memory"]["device"]["bytes"]
    kernels = memory["kernels"]
    assert not kernels or sum(memory["device"]["rank"].values()) == device
    assert sum(memory["host"]["node"].values()) == best["memory"]["host"]["bytes"]
    assert plan("--write", "best.toml", *FEW) == 2
    assert "exists already and is left as it is" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_set_and_pin_keep_values(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *FEW, "--set", "zero.stage=3", "--pin", "train.micro_batch")
    layouts = [row["layout"] for row in found["nodes"][0]["layouts"]]
    assert {one["stage"] for one in layouts} == {3}
    assert {one["micro_batch"] for one in layouts} == {3}
    assert {one["tensor"] for one in layouts} == {1}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("1", "best: tensor 1"),
        ("spec", "micro-batch 3"),
        ("tensor=4,zero.stage=0", "  tensor 4, pipeline 1, ZeRO 0"),
        ("recompute=block", "recompute block"),
        ("pipeline=2;order=data,pipeline,tensor", "pipeline 2 1f1b"),
    ],
)
def test_why(layout: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*FEW, "--why", layout) == 0
    out = capsys.readouterr().out
    assert said in out
    assert "  time " in out
    assert "  memory " in out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--why", "tensor=3"], "tensor(3) does not divide the 8 ranks given"),
        (["--why", "tensor=32"], "parallel.tensor = 32 is more than model.heads = 12"),
        (["--why", "stage=7"], "zero.stage = 7: must be 0, 1, 2 or 3"),
        (["--why", "colour=red"], "a row of the table, spec, or keys as in tensor=4,stage=3"),
        (["--why", "0"], "the table has rows 1 to"),
        (["--top", "0"], "--top 0: at least one layout"),
        (["--pin", "train.steps"], "--pin train.steps is no key of a layout"),
        (["--pin", "zero.stag"], "zero.stag"),
        (["--set", "train.device=cpu"], 'train.device = "cpu", and the devices of dgx-h100 are'),
        (["--set", "batch.walltime=9m"], "more walltime"),
        (["--set", "parallel.tensor=5"], "no layout can exist on 1 node of 8 ranks"),
        (["--set", "comm.backend=gloo"], 'comm.backend = "gloo" carries tensors on cpu'),
        (
            ["--set", "optimizer.name=muon", "--set", 'optimizer.not_muon=["mlp"]'],
            "optimizer.not_muon: 'mlp' matches no parameter",
        ),
        (["--ranks-per-node", "0"], "--ranks-per-node 0: from 1 to"),
    ],
)
def test_one_message_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*FEW, *arguments) == 2
    err = capsys.readouterr().err
    assert err.count("hpczero: ") == 1
    assert said in err


@pytest.mark.usefixtures("here")
def test_unknown_cluster_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for where, said in (
        ({"cluster": "summit"}, 'there is no cluster "summit"'),
        ({"nodes": "0"}, "from 1 to"),
        ({"nodes": "900000"}, "are more than 1,000,000 ranks"),
    ):
        assert plan(**where) == 2
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "SPEC, the job's file is missing: hpczero plan SPEC --cluster C --nodes N"),
        (["--cluster", "dgx-h100", "--nodes", "1"], "SPEC, the job's file is missing"),
        (["spec.toml", "--cluster", "dgx-h100"], "--nodes is missing: hpczero plan SPEC"),
        (["spec.toml", "--nodes", "1"], "which cluster is it planned for? --cluster or batch."),
    ],
)
def test_what_is_missing_is_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("hpczero: ")) == ("", 1)
    assert said in err


@pytest.mark.usefixtures("here")
def test_the_spec_may_name_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    few = (*FEW, "--pin", "train.micro_batch", "--nodes", "1", "--json")
    found = []
    for arguments in (["--cluster", "dgx-h100"], ["--set", "batch.cluster=dgx-h100"]):
        assert main(["plan", "spec.toml", *arguments, *few]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["cluster"] == "dgx-h100"


@pytest.mark.usefixtures("here")
def test_the_largest_causes_of_the_first_one(capsys: pytest.CaptureFixture[str]) -> None:
    (nodes,) = data(capsys, *FEW)["nodes"]
    causes = nodes["layouts"][0]["causes"]
    assert plan(*FEW) == 0
    _, _, said = capsys.readouterr().out.partition("\nthe first one's step:\n")
    lines = said.splitlines()
    assert len(lines) == 3
    largest = sorted(causes, key=lambda cause: -causes[cause])[:3]
    for line, cause in zip(lines, largest, strict=True):
        share = causes[cause] / sum(causes.values())
        assert line.partition(": less with ")[0] == f"  {share:>4.0%} {CALLED[cause]}"


@pytest.mark.usefixtures("here")
def test_a_model_that_has_to_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--set", "model.family=mine.models:build", nodes="1-2") == 0
    out = capsys.readouterr().out
    assert "mine.models:build has to be built before its layers are known" in out
    assert "a step is 16,384 tokens" in out
    assert "2 nodes of 8 ranks: ZeRO 0 16 (at most 5.31G parameters), ZeRO 1 4.75" in out


def test_nothing_fits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (here / "spec.toml").read_text().replace("hidden = 768", "hidden = 400000")
    (here / "spec.toml").write_text(text)
    assert plan(*FEW) == 2
    err = capsys.readouterr().err
    assert "no layout fits surely into 1 node of 8 ranks of dgx-h100" in err


def test_nodes_without_gpus(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--ranks-per-node", "4", "--set", "parallel.pipeline=1")
    rows = data(capsys, *arguments, cluster="epyc-7763")["nodes"][0]["layouts"]
    assert {"all"} <= rows[0]["memory"].keys()
    assert {row["layout"]["offload"] for row in rows} == {"none"}


def test_a_login_node_needs_neither_torch_nor_mpi(here: Path) -> None:
    done = launch(
        hpczero("plan", "spec.toml", "--cluster", "dgx-h100", "--nodes", "1", *FEW), 120, here
    )
    assert (done.code, done.err) == (0, "")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--why", "1", "--write", "new.toml"), "--write: a plan without --why"),
        (("--svg", "one", "--write", "one"), "--svg one: name a file of its own"),
        (("--write", "spec.toml"), "spec.toml exists already"),
        (("--write", ""), "name a file of its own"),
        (("--explain", "runs/a"), "leave others out"),
    ],
)
def test_no_option_is_ignored(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*FEW, *options) == 2
    assert said in capsys.readouterr().err


def test_what_is_written_names_the_cluster_and_real_nodes(here: Path) -> None:
    text = SPEC.replace("[batch]", '[comm]\nranks_per_node = 4\n[batch]\ncluster = "alps-gh200"')
    (here / "spec.toml").write_text(text)
    assert plan(*FEW, "--ranks-per-node", "8", "--write", "new.toml") == 0
    written = load("new.toml").spec
    assert written.batch.cluster == "dgx-h100"
    assert (written.batch.ranks_per_node, written.comm.ranks_per_node) == (8, 0)


@pytest.mark.usefixtures("here")
def test_states_on_the_host_may_be_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    """Their update is hidden, that of the device is not: no other layout is faster."""
    pins = ("--set", "parallel.tensor=1", "--set", "parallel.pipeline=1", "--set", "zero.stage=1")
    (nodes,) = data(capsys, *pins, "--set", "train.global_batch=256", cluster="alps-gh200")["nodes"]
    fastest = nodes["layouts"][0]["step_seconds"]
    for place in ("none", "cpu"):
        (with_it,) = data(
            capsys, *pins, "--set", "train.global_batch=256", "--set", f"zero.offload={place}",
            cluster="alps-gh200",
        )["nodes"]  # fmt: skip
        assert fastest <= with_it["layouts"][0]["step_seconds"]


def test_a_broken_cluster_does_not_hide_the_others(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "clusters").mkdir()
    (here / "clusters" / "broken.toml").write_text("description = 1")
    assert main(["cluster", "list"]) == 0
    said = capsys.readouterr()
    assert "broken.toml is no cluster" in said.err
    assert "dgx-h100" in said.out
