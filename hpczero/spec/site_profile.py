"""Where the profile of a site lies, and the layer of a spec that it makes.

A profile is a TOML file `<site>.toml` in one of `folders()`: facts for `hpczero.batch.sites`, and under [spec] and [partitions.<name>.spec] values
for the keys of a spec whose role is `site`. They hold where the spec itself says nothing. The first partition is the default one.
"""

import fnmatch
import functools
import socket
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpczero import env, safe_files
from hpczero.errors import InputError
from hpczero.spec.keys import keys
from hpczero.spec.toml import Layer, read_file, read_limited
from hpczero.text import listed, printable

_HERE = Path("sites")


def folders() -> list[Path]:
    """The first that has a site's profile wins."""
    return [_HERE, env.config_folder() / "sites", *env.site_folders(), env.shared_folder("sites")]


def profiles() -> dict[str, Path]:
    """Site -> its file. A folder that cannot be looked into, as a home that is not mounted here, has none (`left_out`)."""
    return _looked_for()[0]


def left_out() -> list[str]:
    """Folders of profiles that cannot be looked into, and why."""
    return [
        f"no profile of a site is taken from {folder}: {problem}"
        for folder, problem in _looked_for()[1].items()
    ]


def _looked_for() -> tuple[dict[str, Path], dict[Path, str]]:
    found: dict[str, Path] = {}
    problems: dict[Path, str] = {}
    for folder in folders():
        try:
            names = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".toml")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems[folder] = error.strerror or str(error)
            continue
        for path in [folder / name for name in names]:
            if problem := _another_users(path):
                problems[path] = problem
            else:
                found.setdefault(path.stem, path)
    return dict(sorted(found.items())), problems


def _another_users(path: Path) -> str:
    """Return why a profile in ./sites is not trusted: jobs carry out what it says, and another user
    may have put it where this one happens to work. Other folders were chosen by this user.
    """
    try:
        if _HERE not in path.parents or _HERE.samefile(env.shared_folder("sites")):
            return ""
        way = [path, *(parent for parent in path.parents if parent.is_relative_to(_HERE))]
        owner = next(filter(None, map(safe_files.owner_if_another, way)), "")
    except OSError as error:
        return error.strerror or str(error)
    ways = "to trust it, name its folder in $HPCZERO_SITES"
    return f"it belongs to {owner}, and jobs would carry out what it says; {ways}" if owner else ""


def template(path: Path) -> str:
    """Return the text of a template beside a profile. InputError: it is no file, or not trusted."""
    if problem := _another_users(path):
        raise InputError(f"{printable(str(path))} is not taken: {problem}")
    return read_limited(str(path), "template").decode(errors="replace")


def read(name: str) -> tuple[str, str, Layer]:
    """Of "site" or "site/partition": the site, the partition, the file."""
    site, _, partition = name.partition("/")
    known = profiles()
    if site not in known:
        there = f"there are {listed(list(known))}; hpczero site new makes one"
        raise InputError(
            "; ".join([f'there is no site "{printable(site, 100)}"', there, *left_out()])
        )
    layer = read_file(str(known[site]))
    partitions = layer.tree.get("partitions")
    if (
        not isinstance(partitions, dict)
        or not partitions
        or not all(isinstance(part, dict) for part in partitions.values())
    ):
        raise InputError(
            f"{layer.file}: a site's profile needs a table [partitions.<name>] at least"
        )
    partition = partition or next(iter(partitions))
    if partition not in partitions:
        raise InputError(
            f'the site "{site}" has no partition "{printable(partition, 100)}"; it has {listed(list(partitions))} ({layer.file})'
        )
    return site, partition, layer


def here() -> str | None:
    """The site that this computer belongs to, by its name or a variable that the site sets."""
    host = socket.gethostname()
    for name, path in profiles().items():
        tree = _quickly(path, path.stat().st_mtime_ns)
        hosts, variables = tree.get("hosts", []), tree.get("variables", {})
        if isinstance(hosts, list) and any(
            fnmatch.fnmatchcase(host, str(pattern)) for pattern in hosts
        ):
            return name
        if isinstance(variables, dict) and any(
            env.variable(variable) == value for variable, value in variables.items()
        ):
            return name
    return None


@functools.cache
def _quickly(path: Path, changed: int) -> dict[str, Any]:
    """The tables of a profile (as it was last changed) without their lines; what is wrong with it is said as for any file."""
    try:
        return tomllib.loads(read_limited(str(path)).decode())
    except (InputError, ValueError):
        return read_file(str(path)).tree


def layers(of_spec: Sequence[Layer]) -> list[Layer]:
    """What the site's profile says, below the layers of a spec. None where the spec leaves nothing open, as the copy in a run's directory does."""
    given = {
        f"{table}.{leaf}"
        for layer in of_spec
        for table, inner in layer.tree.items()
        if isinstance(inner, dict)
        for leaf in inner
    }
    if {name for name in keys() if "." in name} <= given:
        return []
    named = [
        layer.tree["batch"]["site"]
        for layer in of_spec
        if isinstance(layer.tree.get("batch"), dict) and "site" in layer.tree["batch"]
    ]
    name = named[-1] if named else "auto"
    if name == "auto":
        name = here()
    if not isinstance(name, str) or not name:  # not a text: said by the schema
        return []
    site, partition, profile = read(name)
    chosen = Layer(
        {"batch": {"site": f"{site}/{partition}"}}, name=f"the host name ({profile.file})"
    )
    of_site = _part(profile, profile.tree, ("spec",))
    of_partition = _part(
        profile, profile.tree["partitions"][partition], ("partitions", partition, "spec")
    )
    return [chosen, of_site, of_partition]


def _part(profile: Layer, tree: Mapping[str, Any], path: tuple[str, ...]) -> Layer:
    values = tree.get("spec", {})
    if not isinstance(values, dict):
        raise InputError(f"{profile.file}: [{'.'.join(path)}] must be a table")
    named = [name for name, inner in values.items() if not isinstance(inner, dict)]
    named += [
        f"{table}.{leaf}"
        for table, inner in values.items()
        if isinstance(inner, dict)
        for leaf in inner
    ]
    if wrong := next((name for name in named if not _may_say(name)), ""):
        may = "a profile gives keys whose role is site (hpczero spec)"
        raise InputError(f"{profile.file}: [{'.'.join(path)}] says {printable(wrong, 100)}: {may}")
    lines = {
        place[len(path) :]: line
        for place, line in profile.lines.items()
        if place[: len(path)] == path and len(place) > len(path)
    }
    return Layer(values, profile.file, lines)


def _may_say(name: str) -> bool:
    key = keys().get(name)
    return key is not None and key.role == "site" and name != "batch.site"
