"""Profiles and templates in ./sites that another user, or nobody in his senses, has put there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpczero.batch.job import SubmitHost, plan
from hpczero.batch.render import render
from hpczero.errors import InputError
from hpczero.spec import site_profile
from hpczero.spec.load import load

DAEMON = 1
PROFILE = """
description = "somebody else's"
hosts = ["*"]
template = "own.sh.j2"
[spec.batch]
scheduler = "slurm"
setup = ["touch /tmp/carried-out"]
[partitions.all]
"""
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "evil.toml").write_text(PROFILE)
    (tmp_path / "sites" / "own.sh.j2").write_text('{% extends "slurm.sh.j2" %}')
    (tmp_path / "spec.toml").write_text("")
    return tmp_path / "sites"


def give_away(path: Path) -> None:
    os.chown(path, DAEMON, DAEMON, follow_symlinks=False)


def rendered() -> str:
    return render(plan(load("spec.toml").spec, SubmitHost(".", "/env", ()), ("run", "spec.toml")))


@AS_ROOT
@pytest.mark.parametrize("whose", ["", "evil.toml"])
def test_what_belongs_to_another_user_is_left_out_and_said(sites: Path, whose: str) -> None:
    assert load("spec.toml").spec.batch.setup
    give_away(sites / whose)
    spec = load("spec.toml").spec
    assert spec.batch.setup == ()
    assert "evil" not in site_profile.profiles()
    words = r"evil\.toml: it belongs to daemon \(user 1\).*HPCZERO_SITES"
    with pytest.raises(InputError, match=words):
        load("spec.toml", ["batch.site=evil"])
    assert any("belongs to daemon" in line for line in site_profile.unusable())


@AS_ROOT
def test_a_link_to_anothers_profile_is_left_out(sites: Path, tmp_path: Path) -> None:
    (sites / "evil.toml").rename(tmp_path / "theirs.toml")
    (sites / "evil.toml").symlink_to(tmp_path / "theirs.toml")
    assert "evil" in site_profile.profiles()
    give_away(tmp_path / "theirs.toml")
    assert "evil" not in site_profile.profiles()


@AS_ROOT
def test_a_template_of_another_user_is_refused(sites: Path) -> None:
    assert "touch /tmp/carried-out" in rendered()
    give_away(sites / "own.sh.j2")
    with pytest.raises(InputError, match=r"own\.sh\.j2 is not taken: it belongs to daemon"):
        rendered()


@AS_ROOT
def test_a_folder_that_was_chosen_is_trusted(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(sites)
    monkeypatch.setenv("HPCZERO_SITES", str(sites))
    assert "evil" in site_profile.profiles()


def _in_time(*words: str) -> subprocess.CompletedProcess[str]:
    """A command that hangs fails here."""
    command = [sys.executable, "-m", "hpczero", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["evil.toml", "own.sh.j2"])
@pytest.mark.few(2)
def test_a_pipe_or_a_device_does_not_hang(sites: Path, name: str, kind: str) -> None:
    (sites / name).unlink()
    if kind == "pipe":
        os.mkfifo(sites / name)
    else:
        (sites / name).symlink_to("/dev/zero")
    done = _in_time("render", "spec.toml")
    assert done.returncode == 2, done.stderr
    assert f"sites/{name}" in done.stderr
    assert "no plain file" in done.stderr or "not a regular file" in done.stderr


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDLESS = {
    "a long file": "x" * 200_000,
    "a loop that writes": f"{LOOP}xxxxxxxxx{{% endfor %}}{{% endfor %}}",
    "a loop": f"{LOOP}{{% endfor %}}{{% endfor %}}",
    "a product": '{% set a = "x" * 100000000000 %}',
    "a power": "{% set a = 9 ** 999999999 %}",
    "itself": '{% include "own.sh.j2" %}',
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.few(2)
def test_an_endless_template_is_one_error(
    sites: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.batch.render._LONGEST", 1.0)
    (sites / "own.sh.j2").write_text(ENDLESS[name])
    with pytest.raises(InputError, match=r"own\.sh\.j2"):
        rendered()
