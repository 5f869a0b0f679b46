"""hpczero behaves the same as a wheel, as an editable install, in a folder (`pip install --target`)
and run from the checkout.

All of it in throw-away environments that hold nothing but the base install's requirements (no
torch, no mpi4py): links to the packages of the environment that runs the tests. So nothing is
downloaded, and a requirement that setup.cfg forgets is found.
"""

import configparser
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.launch import CHECKOUT

WAYS = ["wheel", "editable", "target", "checkout"]


@dataclass(frozen=True)
class Installation:
    """One way to have hpczero: how it is called, and where its files are expected."""

    program: list[str]
    python: Path
    package: Path
    share: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        return run([*self.program, *arguments], folder, self.variables)


def run(
    command: Sequence[str | Path], folder: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command in a bare environment: no user's pip settings, no PYTHONPATH but the given one."""
    bare = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=bare | (variables or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def succeed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"{result.args}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return what a copy of the checkout does without; its folder `runs` is no package's."""
    patterns = ".*", "build", "dist", "*.egg-info", "__pycache__", "tests"
    own_runs = {"runs"} if Path(folder) == CHECKOUT else set()
    return shutil.ignore_patterns(*patterns)(folder, names) | (own_runs & set(names))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing behind in the true one."""
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    shutil.copytree(
        CHECKOUT,
        copy,
        ignore=_left_out,
    )
    return copy


def build(kind: str, checkout: Path, folder: Path) -> Path:
    """Run the hook that pip asks setuptools for: build_wheel, build_editable or build_sdist."""
    call = (
        f"import sys; from setuptools import build_meta; print('\\n' + "
        f"build_meta.{kind}(sys.argv[1]))"
    )
    name = succeed(run([sys.executable, "-c", call, folder], checkout)).splitlines()[-1]
    return folder / name


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", checkout, tmp_path_factory.mktemp("wheel"))


def listed_requirements() -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    return setup["options"]["install_requires"].split()


def base_requirements() -> set[str]:
    """The distributions that the base install needs, directly and through others."""
    wanted, found = listed_requirements(), set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name not in found and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            found.add(requirement.name)
            wanted += importlib.metadata.requires(requirement.name) or []
    return found


@pytest.fixture(scope="module")
def requirements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path that holds the base install's requirements and nothing else."""
    folder = tmp_path_factory.mktemp("requirements")
    for name in base_requirements():
        distribution = importlib.metadata.distribution(name)
        for entry in {
            file.parts[0]
            for file in distribution.files or []
            if file.parts[0] not in ("..", "__pycache__")
        }:
            (folder / entry).symlink_to(str(distribution.locate_file(entry)))
    return folder


def environment(folder: Path, *paths: Path) -> Path:
    """A new virtual environment that also finds the packages in these folders; its Python."""
    succeed(run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent))
    site_packages = (
        folder
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    (site_packages / "more.pth").write_text("".join(f"{path}\n" for path in paths))
    return folder / "bin" / "python"


def pip_install(python: Path, *arguments: str | Path) -> None:
    succeed(
        run(
            [
                sys.executable,
                "-m",
                "pip",
                "--python",
                python,
                "install",
                "-q",
                "--no-index",
                *arguments,
            ],
            python.parents[2],
        )
    )


@pytest.fixture(scope="module", params=WAYS)
def installation(
    request: pytest.FixtureRequest,
    checkout: Path,
    wheel: Path,
    requirements: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Installation:
    folder = tmp_path_factory.mktemp(request.param)
    python = environment(folder / "venv", requirements)
    module = [str(python), "-m", "hpczero"]
    if request.param == "wheel":
        pip_install(python, "--no-deps", wheel)
        package = next((folder / "venv").glob("lib/*/site-packages"))
        return Installation(
            [str(python.parent / "hpczero")], python, package, folder / "venv" / "share" / "hpczero"
        )
    if request.param == "editable":
        pip_install(python, "--no-deps", build("build_editable", checkout, folder))
        return Installation([str(python.parent / "hpczero")], python, checkout, checkout)
    if request.param == "target":
        pip_install(python, "--no-deps", "--target", folder / "target", wheel)
        return Installation(
            module,
            python,
            folder / "target",
            folder / "target" / "share" / "hpczero",
            {"PYTHONPATH": str(folder / "target")},
        )
    return Installation(module, python, checkout, checkout, {"PYTHONPATH": str(checkout)})


WHERE = "import json, hpczero, hpczero_kernels as k; from hpczero.env import shared_folder as s; "
WHERE += (
    "print(json.dumps([hpczero.__file__, k.__file__, str(s('jobspecs')), str(s('templates'))]))"
)


def test_its_files_are_found(installation: Installation, tmp_path: Path) -> None:
    package, kernels, jobspecs, templates = json.loads(
        succeed(run([installation.python, "-c", WHERE], tmp_path, installation.variables))
    )
    inside = "numba_cuda" if (installation.package / "numba_cuda").is_dir() else ""
    assert Path(package) == installation.package / "hpczero" / "__init__.py"
    assert Path(kernels) == installation.package / inside / "hpczero_kernels" / "__init__.py"
    assert Path(jobspecs) == installation.share / "jobspecs"
    assert Path(templates) == installation.share / "templates"
    assert (Path(jobspecs) / "quickstart.toml").read_bytes() == (
        CHECKOUT / "jobspecs" / "quickstart.toml"
    ).read_bytes()


@pytest.mark.parametrize("inside_checkout", [False, True], ids=["elsewhere", "in the checkout"])
@pytest.mark.few(2)
def test_the_verbs_for_login_nodes_work_without_torch_and_mpi4py(
    installation: Installation, checkout: Path, tmp_path: Path, inside_checkout: bool
) -> None:
    folder = checkout if inside_checkout else tmp_path
    assert run([installation.python, "-c", "import torch"], folder).returncode != 0
    assert run([installation.python, "-c", "import mpi4py"], folder).returncode != 0
    assert succeed(installation.run(["--version"], folder)).startswith("hpczero 0.")
    for verb in ("--help", "check --help", "run --help", "submit --help", "data build --help"):
        assert "usage: hpczero" in succeed(installation.run(verb.split(), folder))
    assert "quickstart" in succeed(
        installation.run(
            ["check", str(installation.share / "jobspecs" / "quickstart.toml")], folder
        )
    )
    assert "global_batch" in succeed(installation.run(["spec"], folder))
    assert "perlmutter/gpu" in succeed(installation.run(["site", "list"], folder))
    script = succeed(
        installation.run(
            ["render", str(installation.share / "jobspecs" / "example-slurm.toml")], folder
        )
    )
    assert "#SBATCH --nodes=2" in script.splitlines()
    mine = tmp_path / "mine.toml"
    succeed(installation.run(["init", str(mine)], folder))
    assert json.loads(succeed(installation.run(["check", str(mine), "--json"], folder)))


def test_data_is_built_and_shown_without_torch_and_mpi4py(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "text.md").write_text("To be, or not to be, that is the question.\n" * 200)
    succeed(installation.run(["data", "build", "-o", "corpus.h5", "text.md"], tmp_path))
    assert json.loads(succeed(installation.run(["data", "show", "corpus.h5", "--json"], tmp_path)))


def test_training_without_torch_says_what_to_install(
    installation: Installation, tmp_path: Path
) -> None:
    result = installation.run(
        ["run", str(installation.share / "jobspecs" / "quickstart.toml")], tmp_path
    )
    assert result.returncode == 1
    assert " -m pip install '" in result.stderr
    assert "[train]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_source_archive_holds_what_the_checkout_holds(
    checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    archive = build("build_sdist", checkout, tmp_path)
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    again = build("build_wheel", next((tmp_path / "unpacked").iterdir()), tmp_path)
    contents = [sorted(zipfile.ZipFile(path).namelist()) for path in (wheel, again)]
    assert contents[0] == contents[1]
    assert any(name.endswith("share/hpczero/jobspecs/quickstart.toml") for name in contents[0])
    assert any(name.endswith("LICENSE") for name in contents[0])


def test_the_folder_numba_cuda_does_not_hide_the_package_of_that_name(
    checkout: Path, requirements: Path, tmp_path: Path
) -> None:
    """With the checkout as the working directory, `import numba_cuda` is NVIDIA's package,
    wherever on the path that lies.
    """
    (tmp_path / "numba_cuda").mkdir()
    (tmp_path / "numba_cuda" / "__init__.py").write_text("maker = 'NVIDIA'\n")
    python = environment(tmp_path / "venv", requirements, tmp_path)
    code = (
        "import sys; assert sys.path[0] == ''; import hpczero, hpczero_kernels, numba_cuda; "
        "print(numba_cuda.maker)"
    )
    assert succeed(run([python, "-c", code], checkout)).strip() == "NVIDIA"


def fake_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel that holds nothing but its name and version."""
    information = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{information}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    files[f"{information}/RECORD"] = "".join(
        f"{file},,\n" for file in [*files, f"{information}/RECORD"]
    )
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def index(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages that pip could install: hpczero, and newer versions of all that hpczero[train]
    needs.
    """
    folder = tmp_path_factory.mktemp("index")
    shutil.copy(wheel, folder)
    for name in [
        *(Requirement(line).name for line in listed_requirements()),
        "torch",
        "mpi4py",
        "numba",
    ]:
        fake_wheel(folder, name, "99.0")
    return folder


def versions(python: Path, variables: dict[str, str]) -> tuple[str, str]:
    code = (
        "import torch, mpi4py, importlib.metadata as m; print(torch.__version__, "
        "mpi4py.__version__, m.version('hpczero'))"
    )
    torch, mpi4py, _ = succeed(run([python, "-c", code], python.parent, variables)).split()
    return torch, mpi4py


@pytest.mark.parametrize("upgrade", [[], ["--upgrade"]], ids=["install", "upgrade"])
@pytest.mark.parametrize("place", ["environment", "PYTHONPATH", "nowhere"])
@pytest.mark.few(1)
def test_a_sites_own_torch_and_mpi4py_stay(
    place: str, upgrade: list[str], index: Path, tmp_path: Path
) -> None:
    """They lie in the environment itself, or come from a module through PYTHONPATH; where
    there are none, pip takes the newest.
    """
    python = environment(tmp_path / "venv")
    site = [
        fake_wheel(tmp_path, "torch", "2.6.0a0+site"),
        fake_wheel(tmp_path, "mpi4py", "4.1.0+site"),
    ]
    variables = {}
    if place == "environment":
        pip_install(python, *site)
    elif place == "PYTHONPATH":
        pip_install(python, "--target", tmp_path / "module", *site)
        variables = {"PYTHONPATH": str(tmp_path / "module")}
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        "--find-links",
        index,
        *upgrade,
        "hpczero[train]",
    ]
    succeed(run(command, tmp_path, variables))
    assert versions(python, variables) == (
        ("99.0", "99.0") if place == "nowhere" else ("2.6.0a0+site", "4.1.0+site")
    )
