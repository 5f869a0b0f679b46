"""The jobs whose scripts are kept in tests/unit/batch/golden.

`python -m tests.support.golden` writes the scripts again: read them before they are committed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpczero.batch.job import BatchJob, SubmitHost, plan, program
from hpczero.batch.render import render
from hpczero.batch.sites import all_names
from hpczero.spec.load import load, toml_value

FOLDER = Path(__file__).parents[1] / "unit" / "batch" / "golden"
HERE = SubmitHost(folder="/work/jobs", environment="/work/venv", schedulers=())
SPEC = "/work/jobs/spec.toml"
EVERYTHING: dict[str, Any] = {
    "nodes": 3,
    "ranks_per_node": 4,
    "cpus_per_rank": 6,
    "mem": "90G",
    "walltime": "1-12:30:00",
    "account": "proj_1",
    "queue": "long",
    "after": "4711",
    "begin": "now+1hour",
    "mail": "ada@example.org",
    "modules": ["gcc/13", "openmpi/5"],
    "venv": "/work/my venv",
    "setup": ["ulimit -s unlimited", 'echo "on $(hostname)"'],
    "env": {"OMP_PROC_BIND": "close", "NOTE": "it's $HOME"},
    "env_pass": ["WANDB_MODE", "HTTPS_PROXY"],
}
ON_SLURM = {
    "site": "generic/slurm",
    "qos": "high",
    "constraint": "gpu&ib",
    "reservation": "course",
    "exclude": "n[01-03]",
    "bind": "map_cpu:0,8",
    "launch_options": ["--mpi=pmi2"],
    "extra_directives": ["--exclusive", "--licenses=scratch:1"],
}
ON_PBS = {
    "site": "generic/pbs",
    "pbs_chunk": "system=fast",
    "pbs_place": "scatter:excl",
    "pbs_resources": ["filesystems=home:eagle"],
    "begin": "202601311200",
    "extra_directives": ["-k doe", "-r n"],
}
FEWEST = {"polaris/gpu": 10}  # nodes that a job has to have there
CASES: dict[str, dict[str, Any]] = {
    "generic-slurm-everything": {**EVERYTHING, **ON_SLURM},
    "generic-pbs-everything": {**EVERYTHING, **ON_PBS},
    "generic-slurm-mpirun": {
        "site": "generic/slurm",
        "launcher": "mpirun",
        "nodes": 2,
        "ranks_per_node": 2,
        "env_inherit": True,
    },
    "generic-slurm-gpus": {
        "site": "generic/slurm",
        "gpus_per_node": 4,
        "gpu_select": "wrapper",
        "launcher": "mpirun",
    },
    "generic-slurm-apptainer": {
        "site": "generic/slurm",
        "container": "apptainer:/images/a b.sif",
        "container_options": ["--nv"],
    },
    "submitted-slurm": {"site": "generic/slurm", "chain": 3, "max_stalled": 2, "nodes": 2},
    "submitted-pbs": {"site": "generic/pbs", "chain": 3, "nodes": 2},
    "submitted-slurm-own-program": {
        "site": "generic/slurm",
        "chain": 2,
        "command": ["python", "my train.py", "{spec}", "--note=it's $HOME", "{other}"],
    },
    "polaris-cores": {
        "site": "polaris/gpu",
        "nodes": 10,
        "account": "proj1",
        "bind": "cores",
        "gpu_select": "visible",
    },
    "perlmutter-shifter": {
        "site": "perlmutter/gpu",
        "account": "m1_g",
        "container": "shifter:docker:nersc/pytorch:24.08",
    },
}


def cases() -> dict[str, dict[str, Any]]:
    sites = {
        name.replace("/", "-"): {"site": name, "nodes": FEWEST.get(name, 2)} for name in all_names()
    }
    return {
        name: batch | ({} if name.startswith("generic") else {"account": "proj1"})
        for name, batch in sites.items()
    } | CASES


def submitted(
    batch: dict[str, Any],
    folder: Path,
    run: str = "/work/jobs/runs/a-run",
    books: str = "/work/jobs/runs/a-run/batch/1-ab",
) -> str:
    """Render the script of a submitted job, which also writes its record."""
    return render(replace(_job(batch, folder), run=run, submission=books, tag="hpczero:ab:0"))


def script(batch: dict[str, Any], folder: Path) -> str:
    return render(_job(batch, folder))


def kept(case: str, batch: dict[str, Any], folder: Path) -> str:
    return submitted(batch, folder) if case.startswith("submitted-") else script(batch, folder)


def _job(batch: dict[str, Any], folder: Path) -> BatchJob:
    """Plan a job with these keys, over the folder's base.toml if there is one.

    The spec is read from a file, so that the site's profile counts.
    """
    extends = ['extends = "base.toml"'] if (folder / "base.toml").exists() else []
    keys = [f"batch.{key} = {toml_value(value)}" for key, value in batch.items()]
    lines = [*extends, 'name = "a-run-with-a-long-name"', "train.global_batch = 48", *keys]
    (folder / "spec.toml").write_text("\n".join(lines))
    spec = load(folder / "spec.toml").spec
    return plan(spec, HERE, program(spec.batch, SPEC))


if __name__ == "__main__":
    import tempfile

    FOLDER.mkdir(exist_ok=True)
    for case, settings in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{case}.sh").write_text(kept(case, settings, Path(folder)))
