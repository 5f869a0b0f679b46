"""The profile of a site: its file, and the layer of a spec that it makes.

A profile is a TOML file `<site>.toml` in one of `folders()`. It has facts for
`hpczero.batch.sites`, and under [spec] and [partitions.<name>.spec] values for keys whose role is
`site`. They hold where the spec itself says nothing. The first partition is the default one.
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
from hpczero.spec.keys import entries, full_name, keys
from hpczero.spec.toml import Layer, read_file, read_limited
from hpczero.text import join_words, printable

_LOCAL = Path("sites")  # in the current folder


def folders() -> list[Path]:
    """Return the folders of profiles; the first that has a site's profile wins."""
    return [_LOCAL, env.config_folder() / "sites", *env.site_folders(), env.shared_folder("sites")]


def profiles() -> dict[str, Path]:
    """Return site -> its file.

    A folder that cannot be read, as a home that is not mounted here, has none (see `unusable`).
    """
    return _search()[0]


def unusable() -> list[str]:
    """Return the folders and profiles that are not used, and why."""
    return [
        f"no profile of a site is taken from {path}: {problem}"
        for path, problem in _search()[1].items()
    ]


def _search() -> tuple[dict[str, Path], dict[Path, str]]:
    files: dict[str, Path] = {}
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
                files.setdefault(path.stem, path)
    return dict(sorted(files.items())), problems


def _another_users(path: Path) -> str:
    """Return why a profile in ./sites is not trusted; "" if it is.

    Jobs carry out what it says, and another user may have put it where this one happens to work.
    Other folders were chosen by this user.
    """
    try:
        if _LOCAL not in path.parents or _LOCAL.samefile(env.shared_folder("sites")):
            return ""
        chain = [path, *(parent for parent in path.parents if parent.is_relative_to(_LOCAL))]
        owner = next(filter(None, map(safe_files.owner_if_another, chain)), "")
    except OSError as error:
        return error.strerror or str(error)
    way_out = "to trust it, name its folder in $HPCZERO_SITES"
    if not owner:
        return ""
    return f"it belongs to {owner}, and jobs would carry out what it says; {way_out}"


def template(path: Path) -> str:
    """Return the text of a template beside a profile; InputError if it is not trusted."""
    if problem := _another_users(path):
        raise InputError(f"{printable(str(path))} is not taken: {problem}")
    return read_limited(str(path), "template").decode(errors="replace")


def read_profile(name: str) -> tuple[str, str, Layer]:
    """Return the site, the partition and the file for "site" or "site/partition"."""
    site, _, partition = name.partition("/")
    known = profiles()
    if site not in known:
        missing = f'there is no site "{printable(site, 100)}"'
        others = f"there are {join_words(list(known))}; hpczero site new makes one"
        raise InputError("; ".join([missing, others, *unusable()]))
    layer = read_file(str(known[site]))
    partitions = layer.tree.get("partitions")
    if not isinstance(partitions, dict):
        partitions = {}
    if not partitions or not all(isinstance(table, dict) for table in partitions.values()):
        raise InputError(
            f"{layer.file}: a site's profile needs a table [partitions.<name>] at least"
        )
    partition = partition or next(iter(partitions))
    if partition not in partitions:
        raise InputError(
            f'the site "{site}" has no partition "{printable(partition, 100)}"; '
            f"it has {join_words(list(partitions))} ({layer.file})"
        )
    return site, partition, layer


def current_site() -> str | None:
    """Return this computer's site, by the host name or a variable that the site sets."""
    host = socket.gethostname()
    for name, path in profiles().items():
        tree = _tables(path, path.stat().st_mtime_ns)
        hosts = tree.get("hosts")
        by_name = isinstance(hosts, list) and any(
            fnmatch.fnmatchcase(host, str(pattern)) for pattern in hosts
        )
        variables = tree.get("variables")
        by_variable = isinstance(variables, dict) and any(
            env.variable(variable) == value for variable, value in variables.items()
        )
        if by_name or by_variable:
            return name
    return None


@functools.cache
def _tables(path: Path, changed: int) -> dict[str, Any]:
    """Return the tables of a profile without their lines, which is quick.

    `changed` is the time of the file's last change, for the cache. What is not TOML raises
    InputError, as any file does.
    """
    try:
        return tomllib.loads(read_limited(str(path)).decode())
    except (InputError, ValueError):
        return read_file(str(path)).tree


def layers(of_spec: Sequence[Layer]) -> list[Layer]:
    """Return the layers of the site's profile, which go below those of a spec.

    There are none if the spec has every key, as the copy in a run's directory does.
    """
    given = {name for layer in of_spec for name in _names(layer.tree) if "." in name}
    if {name for name in keys() if "." in name} <= given:
        return []
    named = [
        layer.tree["batch"]["site"]
        for layer in of_spec
        if isinstance(layer.tree.get("batch"), dict) and "site" in layer.tree["batch"]
    ]
    name = named[-1] if named else "auto"
    if name == "auto":
        name = current_site()
    if not isinstance(name, str) or not name:  # the schema refuses what is not a text
        return []
    site, partition, profile = read_profile(name)
    chosen = Layer(
        {"batch": {"site": f"{site}/{partition}"}}, name=f"the host name ({profile.file})"
    )
    partitions = profile.tree["partitions"]
    of_site = _spec_in(profile, profile.tree, ("spec",))
    of_partition = _spec_in(profile, partitions[partition], ("partitions", partition, "spec"))
    return [chosen, of_site, of_partition]


def _spec_in(profile: Layer, tree: Mapping[str, Any], path: tuple[str, ...]) -> Layer:
    """Return the table [spec] of a part of the profile as a layer."""
    values = tree.get("spec", {})
    if not isinstance(values, dict):
        raise InputError(f"{profile.file}: [{'.'.join(path)}] must be a table")
    if wrong := next((name for name in _names(values) if not _may_set(name)), ""):
        rule = "a profile gives keys whose role is site (hpczero spec)"
        raise InputError(f"{profile.file}: [{'.'.join(path)}] says {printable(wrong, 100)}: {rule}")
    lines = {
        key[len(path) :]: line
        for key, line in profile.lines.items()
        if key[: len(path)] == path and len(key) > len(path)
    }
    return Layer(values, profile.file, lines)


def _names(tree: Mapping[str, Any]) -> list[str]:
    """Return the full names of the keys in a tree."""
    return [full_name(table, leaf) for table, leaf, _ in entries(tree)]


def _may_set(name: str) -> bool:
    key = keys().get(name)
    return key is not None and key.role == "site" and name != "batch.site"
