"""The job specs that come with hpczero have the grid and the size that they claim, and a script."""

import re

import pytest

from hpczero.batch.job import SubmitHost, plan
from hpczero.batch.render import render
from hpczero.cli import main
from hpczero.comm.grid import Grid
from hpczero.model.families import layers, parameter_count
from hpczero.planner.memory import needs_on_grid
from hpczero.planner.platform import Platform, as_run, device_of
from hpczero.planner.volumes import resolved
from hpczero.spec.load import load
from tests.support.launch import CHECKOUT

FOLDER = CHECKOUT / "jobspecs"
ALL = sorted(path.stem for path in FOLDER.glob("*.toml"))
COMMAND = re.compile(
    r"^# +hpczero check (jobspecs/([\w.-]+)\.toml --ranks (\d+) --ranks-per-node (\d+))$",
    re.MULTILINE,
)
HERE = SubmitHost("/work", "/work/venv", ("slurm",))
# name -> billions of parameters, ranks, GiB of a rank's device
CLAIMS = {
    "gpt2-1.5b": (1.56, 8, 40),
    "gpt-7b-h100": (6.66, 8, 80),
    "gpt-7b-gh200": (6.66, 16, 96),
    "llama-8b-h100": (8.03, 8, 80),
    "llama-8b-a100": (8.03, 32, 40),
    "llama-70b-h100": (70.6, 128, 80),
    "gpt-1.3b-16k": (1.35, 8, 80),
    "gpt-cpu": (0.086, 16, 64),
    "bigbird-4096": (0.128, 8, 40),
    "bert-large": (0.336, 64, 40),
    "t5-11b": (11.3, 64, 80),
    "bert-large-512": (0.336, 64, 40),
    "megatron-8.3b": (8.3, 512, 32),
    "turing-nlg-17b": (17.2, 256, 32),
    "gpt-100b": (101, 400, 32),
    "gpt-170b": (171, 400, 32),
    "gpt-1t": (1008, 800, 32),
}


def test_the_promised_ones_are_there() -> None:
    assert set(ALL) == {*CLAIMS, "quickstart", "example-slurm", "example-pbs"}


@pytest.mark.parametrize("name", sorted(set(ALL) - {"quickstart"}))
def test_the_check_that_it_names_passes_for_what_it_asks(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((words, itself, ranks, per_node),) = COMMAND.findall((FOLDER / f"{name}.toml").read_text())
    assert itself == name
    assert main(["check", *words.replace("jobspecs", str(FOLDER)).split()]) == 0
    said = capsys.readouterr().out
    assert "note:" not in said
    spec = load(FOLDER / f"{name}.toml").spec
    assert spec.name == name
    job = plan(spec, HERE, ("run", "spec.toml"))
    assert (job.ranks, job.ranks_per_node) == (int(ranks), int(per_node))
    assert render(job).startswith("#!/bin/bash -l\n")


@pytest.mark.parametrize("name", CLAIMS)
def test_it_has_the_size_that_it_claims(name: str) -> None:
    spec = load(FOLDER / f"{name}.toml").spec
    assert parameter_count(spec.model) / 1e9 == pytest.approx(CLAIMS[name][0], rel=0.01)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "gpt-1t" else ()) for name in CLAIMS],
)
def test_it_fits_its_devices(name: str) -> None:
    _, ranks, gib = CLAIMS[name]
    spec = load(FOLDER / f"{name}.toml").spec
    job = plan(spec, HERE, ("run", "spec.toml"))
    nodes = [rank // job.ranks_per_node for rank in range(job.ranks)]
    platform = Platform(device_of(spec, 0))
    spec = as_run(spec, platform.device)
    grid = Grid.build(resolved(spec, nodes), nodes)
    needs = needs_on_grid(spec, layers(spec.model), grid, platform)
    assert job.ranks == ranks
    assert platform.on_gpus == (name != "gpt-cpu")
    account = "device" if platform.on_gpus else "all"
    fullest = max(sum(need.fullest(account).values()) for need in needs.values())
    assert fullest <= gib * 2**30


def test_the_trillion_is_cut_as_it_says() -> None:
    spec = load(FOLDER / "gpt-1t.toml").spec
    assert (spec.parallel.tensor, spec.parallel.pipeline) == (16, 50)
