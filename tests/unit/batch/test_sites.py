"""Profiles of sites: where they lie, what they give a spec, what the verbs print, and new ones."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpczero.batch import pbs, slurm
from hpczero.batch.sites import Partition, all_names, facts, hardware
from hpczero.errors import InputError
from hpczero.planner.needs import Hardware
from hpczero.spec.load import load, to_toml
from hpczero.spec.schema import Batch
from tests.support.launch import BLOCKER, HEAVY

MOON = """
description = "the moon"
hosts = ["crater*"]
[spec.batch]
scheduler = "slurm"
queue = "light"
modules = ["dust"]
env = { A = "site", B = "site" }
[partitions.near]
cpus = 8
[partitions.far.spec.batch]
queue = "dark"
"""


@pytest.fixture
def moon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "moon.toml").write_text(MOON)
    return tmp_path


def spec(folder: Path, text: str) -> Path:
    (folder / "spec.toml").write_text(text)
    return folder / "spec.toml"


def test_the_profile_holds_where_the_spec_says_nothing(moon: Path) -> None:
    loaded = load(
        spec(moon, 'batch = { site = "moon/far", modules = ["air"], env = { A = "mine" } }')
    )
    batch = loaded.spec.batch
    assert (batch.scheduler, batch.queue, batch.modules, batch.env) == (
        "slurm",
        "dark",
        ("air",),
        {"A": "mine", "B": "site"},
    )
    assert loaded.sources["batch.queue"].text == "sites/moon.toml:12"
    assert loaded.sources["batch.modules"].text == f"{moon}/spec.toml:1"
    assert load(spec(moon, ""), ["batch.site=moon"]).spec.batch.queue == "light"


def test_a_site_is_known_by_its_host_name_or_a_variable(
    moon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "crater17")
    loaded = load(spec(moon, ""))
    assert loaded.spec.batch.site == "moon/near"
    assert loaded.sources["batch.site"].text == "the host name (sites/moon.toml)"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert load(spec(moon, "")).spec.batch.site == "auto"
    monkeypatch.setenv("NERSC_HOST", "perlmutter")
    assert load(spec(moon, "")).spec.batch.site == "perlmutter/gpu"


def test_a_profile_may_say_where_runs_lie(moon: Path) -> None:
    (moon / "sites" / "moon.toml").write_text(
        MOON + '[spec]\noutput = "$SCRATCH/runs"\n[spec.paths]\ncache = "$SCRATCH/cache"\n'
    )
    spec_of_moon = load(spec(moon, 'batch.site = "moon"')).spec
    assert (spec_of_moon.output, spec_of_moon.paths.cache) == ("$SCRATCH/runs", "$SCRATCH/cache")
    shown = hpczero(moon, "site", "show", "moon")
    assert '    output = "$SCRATCH/runs"' in shown.stdout.splitlines(), shown.stderr
    (moon / "sites" / "moon.toml").write_text(MOON + '[spec]\nname = "theirs"\n')
    with pytest.raises(InputError, match=r"\[spec\] says name"):
        load(moon / "spec.toml")


def test_folders_of_profiles_come_one_after_the_other(
    moon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("settings/hpczero/sites", "more"):
        (moon / name).mkdir(parents=True)
        for site in ("moon", "mars", name.partition("/")[0]):
            (moon / name / f"{site}.toml").write_text(f'description = "{name}"\n[partitions.x]\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(moon / "settings"))
    monkeypatch.setenv("HPCZERO_SITES", f"{moon}/nowhere:{moon}/more")
    descriptions = {
        name: facts(name)[1].description for name in ("moon", "mars", "settings", "more")
    }
    assert descriptions == {
        "moon": "the moon",
        "mars": "settings/hpczero/sites",
        "settings": "settings/hpczero/sites",
        "more": "more",
    }
    assert "generic/slurm" in all_names()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("description = 'x'", "needs a table [partitions.<name>]"),
        ("[partitions.x]\n", "description: Field required"),
        (
            "description = 'x'\n[partitions.x]\ncpu = 4\n",
            "partitions.x.cpu: Extra inputs are not permitted",
        ),
        (
            "description = 'x'\n[partitions.x]\n[spec.model]\nlayers = 3\n",
            "[spec] says model.layers",
        ),
        (
            "description = 'x'\n[partitions.x.spec.batch]\nquue = 'a'\n",
            "[partitions.x.spec] says batch.quue",
        ),
        ("description = 'x'\n[partitions.x.spec.batch]\nnodes = 0\n", "batch.nodes = 0: must be"),
        ("description = \n", "moon.toml:1: not valid TOML"),
    ],
)
def test_a_profile_that_is_none_is_named(moon: Path, text: str, said: str) -> None:
    (moon / "sites" / "moon.toml").write_text(text)
    path = spec(moon, 'batch.site = "moon"')
    with pytest.raises(InputError) as refused:  # the first may take what the second refuses
        assert [load(path), facts("moon")]
    assert said in str(refused.value)
    assert "sites/moon.toml" in str(refused.value)


def test_a_resolved_copy_needs_no_profile(moon: Path) -> None:
    resolved = load(spec(moon, 'batch.site = "moon/far"')).spec
    (moon / "sites" / "moon.toml").unlink()
    with pytest.raises(InputError, match="no site"):
        load(moon / "spec.toml")
    assert load(spec(moon, to_toml(resolved))).spec == resolved


def test_a_site_may_extend_the_templates(moon: Path) -> None:
    template = (
        '{% extends "slurm.sh.j2" %}\n'
        "{% block launch %}\necho {{ job.name | quote }}\n{{ super() }}{% endblock %}\n"
    )
    (moon / "sites" / "moon.sh.j2").write_text(template)
    (moon / "sites" / "moon.toml").write_text('template = "moon.sh.j2"\n' + MOON)
    rendered = hpczero(moon, "render", str(spec(moon, 'name = "tide"\nbatch.site = "moon"')))
    assert rendered.returncode == 0, rendered.stderr
    assert "\necho tide\nsrun --kill-on-bad-exit=1 --nodes=1 " in rendered.stdout
    (moon / "sites" / "moon.sh.j2").write_text(template.replace("job.name", "job.nmae"))
    rendered = hpczero(moon, "render", "spec.toml")
    assert (rendered.returncode, rendered.stdout) == (2, "")
    assert "the template moon.sh.j2 of the site moon/near: " in rendered.stderr
    assert "nmae" in rendered.stderr


def hpczero(
    folder: Path, *arguments: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command as on a login node: without the packages of training."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    } | ({"PATH": path} if path is not None else {})
    command = [sys.executable, "-c", BLOCKER.format(blocked=list(HEAVY)), *arguments]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_verbs_on_a_login_node(moon: Path) -> None:
    listed = hpczero(moon, "site", "list")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "moon/near" in listed.stdout
    assert "the moon: 8 CPUs" in listed.stdout
    rows = {row["site"]: row for row in json.loads(hpczero(moon, "site", "list", "--json").stdout)}
    assert (rows["generic/slurm"]["support"], rows["frontier/batch"]["support"]) == (
        "tested",
        "rendered-only",
    )
    shown = hpczero(moon, "site", "show", "frontier")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert '    batch.constraint = "nvme"' in shown.stdout.splitlines()
    assert "6h for up to 183 nodes in batch" in shown.stdout
    assert "3h for 10 to 24 nodes in prod" in hpczero(moon, "site", "show", "polaris").stdout
    assert (
        json.loads(hpczero(moon, "site", "show", "moon/far", "--json").stdout)["spec"]["batch"][
            "queue"
        ]
        == "dark"
    )
    assert hpczero(moon, "site", "show", "venus").returncode == 2


def test_a_script_is_rendered_where_no_scheduler_is(moon: Path) -> None:
    rendered = hpczero(
        moon,
        "render",
        str(spec(moon, 'batch.site = "generic/pbs"')),
        "-o",
        "job.sh",
        path="/nonexistent",
    )
    assert (rendered.returncode, rendered.stdout) == (0, "")
    assert (
        rendered.stderr.splitlines()[0]
        == "hpczero: generic/pbs: 1 rank on 1 node, at most 1 node-hours"
    )
    assert "#PBS -l walltime=01:00:00" in (moon / "job.sh").read_text().splitlines()
    several = hpczero(moon, "render", "spec.toml", "--set", "batch.chain=3", path="/nonexistent")
    assert several.stderr.splitlines()[2].startswith(
        "hpczero: batch.chain = 3: it is hpczero submit that "
    )
    unknown = hpczero(moon, "render", str(spec(moon, "")), path="/nonexistent")
    assert unknown.returncode == 2
    assert 'batch.scheduler = "slurm" or "pbs"' in unknown.stderr


SINFO = """short|4|7900|(null)|30:00|2
gpu|64|257000|gpu:a100:4(S:0-3)|1-12:00:00|10
gpu|64|515000|gpu:a100:4(S:0-3)|1-12:00:00|5
gpu|32|515000|gpu:a100:2,craynetwork:1|1-12:00:00|1
free*|8|16000|(null)|infinite|3
"""
QSTAT = """Queue: workq
    queue_type = Execution
    total_jobs = 3
    resources_max.walltime = 24:00:00
    resources_max.nodect = 64
    enabled = True
    started = True

Queue: route
    queue_type = Route
    enabled = True

Queue: closed
    queue_type = Execution
    enabled = False
"""


def test_what_schedulers_say_of_their_queues() -> None:
    found = slurm.queues(SINFO)
    assert found["short"] == {
        "cpus": 4,
        "memory_gb": 7,
        "gpus": 0,
        "nodes": 2,
        "walltime": "00:30:00",
    }
    assert found["gpu"] == {
        "cpus": 32,
        "memory_gb": 250,
        "gpus": 2,
        "nodes": 16,
        "walltime": "36:00:00",
    }
    assert found["free*"]["walltime"] == ""
    assert pbs.queues(QSTAT) == {"workq": {"nodes": 64, "walltime": "24:00:00"}}


def test_what_the_spec_asks_of_a_node_comes_before_what_its_partition_has() -> None:
    partition = Partition(memory_gb=512, gpus=4, gpu_memory_gb=40)
    asked = Batch(mem="100G", gpus_per_node=1)
    assert hardware(Batch(), partition) == Hardware(512, 4, 40)
    assert hardware(asked, partition) == Hardware(100, 1, 40)
    assert hardware(asked, Partition()) == Hardware(100, 1)


def test_a_new_profile_is_one(moon: Path) -> None:
    (moon / "bin").mkdir()
    program = moon / "bin" / "sinfo"
    program.write_text(f"#!{sys.executable}\nprint({SINFO!r}, end='')\n")
    program.chmod(0o755)
    made = hpczero(moon, "site", "new", "here", "-o", "sites/here.toml", path=str(moon / "bin"))
    assert (made.returncode, made.stderr) == (0, "")
    _, site, partition = facts("here/gpu")
    assert (site.description, partition.cpus, partition.gpus, partition.limits[0].walltime) == (
        "here",
        32,
        2,
        "36:00:00",
    )
    tree = tomllib.loads((moon / "sites" / "here.toml").read_text())
    assert tree["partitions"]["short"]["spec"]["batch"]["queue"] == "short"
    assert (
        hpczero(
            moon, "site", "new", "here", "-o", "sites/here.toml", path=str(moon / "bin")
        ).returncode
        == 2
    )
    nobody = hpczero(moon, "site", "new", "x", path="/nonexistent")
    assert nobody.returncode == 1
    assert "neither sinfo (Slurm) nor qstat (PBS)" in nobody.stderr


def test_a_sinfo_that_fails_does_not_hide_qstat(moon: Path) -> None:
    """Slurm's commands may be installed where PBS runs."""
    (moon / "bin").mkdir()
    odd = (Path(__file__).parent / "pbs" / "qstat-Qf-odd-queues.txt").read_text()
    for name, code in (
        ("sinfo", "sys.exit('sinfo: error: no controller')"),
        ("qstat", f"print({odd!r})"),
    ):
        program = moon / "bin" / name
        program.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
        program.chmod(0o755)
    made = hpczero(moon, "site", "new", "here", "-o", "sites/here.toml", path=str(moon / "bin"))
    assert (made.returncode, made.stderr) == (0, "")
    _, site, partition = facts("here/workq")
    assert (site.spec["batch"]["scheduler"], partition.limits[0].walltime) == ("pbs", "02:00:00")
    text = (moon / "sites" / "here.toml").read_text()
    assert "# left out: off (takes no jobs), route (hands jobs on to others), exec1 (" in text
    (moon / "bin" / "qstat").write_text(f"#!{sys.executable}\nimport sys\nsys.exit('down')\n")
    failed = hpczero(moon, "site", "new", "there", path=str(moon / "bin"))
    assert failed.returncode == 1
    assert "sinfo failed: sinfo: error: no controller; qstat failed: down" in failed.stderr
