"""`submit` refuses a job whose ranks srun would start each for itself."""

import sys
from pathlib import Path

import pytest

from hpczero.cli import main

SPEC = 'name = "a-run"\noutput = "runs"\nbatch = {{ site = "generic/slurm", venv = "{venv}" }}\n'
CONFIG = "Configuration data as of 2026-01-05T10:00:00\nMpiDefault              = {default}\n"


class Site:
    """A login node: what Slurm's programs say, and a virtual environment with an MPI."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.environment = folder, folder / "venv"
        (folder / "bin").mkdir()
        (folder / "spec.toml").write_text(SPEC.format(venv=self.environment))
        self.program("sbatch", "print(17)")
        self.program("srun", "print('MPI plugin types are...\\n\\tnone\\n\\tpmi2')")
        self.says("none")

    def program(self, name: str, code: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!{sys.executable}\n{code}\n")
        path.chmod(0o755)

    def says(self, default: str) -> None:
        self.program("scontrol", f"print({CONFIG.format(default=default)!r})")

    def has(self, package: str) -> None:
        folder = (
            self.environment / "lib" / "python3.11" / "site-packages" / f"{package}-5.dist-info"
        )
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 5\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    monkeypatch.chdir(tmp_path)
    return Site(tmp_path)


def submits(*options: str) -> int:
    return main(
        ["submit", "spec.toml", *(word for option in options for word in ("--set", option))]
    )


def test_what_srun_cannot_start_is_refused_before_it_waits(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.has("mpich")
    assert submits() == 2
    said = capsys.readouterr().err
    assert 'batch.launch_options = ["--mpi=pmi2"], or batch.launcher = "mpirun"' in said
    assert "that is MPICH (PyPI's mpich)" in said
    assert not (site.folder / "runs").exists()


def test_a_plugin_that_this_slurm_lacks_is_not_advised(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.has("openmpi")
    assert submits() == 2
    said = capsys.readouterr().err
    assert said.endswith('by "none" here: batch.launcher = "mpirun"\n')
    site.program("srun", "print('MPI plugin types are...\\n\\tnone\\n\\tpmix')")
    assert submits() == 2
    assert '"mpirun", or batch.launch_options = ["--mpi=pmix"] where' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "default", "option"),
    [
        ("mpich", "pmi2", "batch.nodes=1"),
        ("openmpi", "pmix_v4", "batch.nodes=1"),
        ("numpy", "none", "batch.nodes=1"),
        ("mpich", "none", 'batch.launch_options=["--mpi=pmi2"]'),
        ("mpich", "none", "batch.launcher=mpirun"),
        ("mpich", "none", "batch.container=apptainer:image.sif"),
        ("mpich", "none", 'batch.env={SLURM_MPI_TYPE="pmi2"}'),
        ("mpich", "none", 'batch.setup=["export SLURM_MPI_TYPE=pmi2"]'),
        ("mpich", "none", 'batch.venv=""'),
    ],
)
def test_what_fits_or_is_not_known_is_submitted(
    site: Site, capsys: pytest.CaptureFixture[str], package: str, default: str, option: str
) -> None:
    site.has(package)
    site.says(default)
    assert submits(option) == 0
    assert "srun" not in capsys.readouterr().err


def test_a_module_may_know_better(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.has("mpich")
    assert submits('batch.modules=["mpich"]') == 0
    assert "unless a module changes it, srun cannot start" in capsys.readouterr().err


def test_a_slurm_that_does_not_say_is_believed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.has("mpich")
    site.program("scontrol", "import sys; sys.exit('slurm_load_ctl_conf error')")
    assert submits() == 0
    assert "srun" not in capsys.readouterr().err
