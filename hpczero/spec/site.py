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

from hpczero import env, locations
from hpczero.errors import InputError
from hpczero.spec.keys import keys
from hpczero.spec.layers import Layer, read_file
from hpczero.spec.show import listed, printable


def folders() -> list[Path]:
    """The first that has a site's profile wins."""
    return [Path("sites"), env.config_folder() / "sites", *env.site_folders(), locations.shared_folder("sites")]


def profiles() -> dict[str, Path]:
    """Site -> its file."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def read(name: str) -> tuple[str, str, Layer]:
    """Of "site" or "site/partition": the site, the partition, the file."""
    site, _, partition = name.partition("/")
    known = profiles()
    if site not in known:
        raise InputError(f'there is no site "{printable(site, 100)}"; there are {listed(list(known))}; hpczero site new makes one')
    layer = read_file(str(known[site]))
    partitions = layer.tree.get("partitions")
    if not isinstance(partitions, dict) or not partitions or not all(isinstance(part, dict) for part in partitions.values()):
        raise InputError(f"{layer.file}: a site's profile needs a table [partitions.<name>] at least")
    partition = partition or next(iter(partitions))
    if partition not in partitions:
        raise InputError(f'the site "{site}" has no partition "{printable(partition, 100)}"; it has {listed(list(partitions))} ({layer.file})')
    return site, partition, layer


def here() -> str | None:
    """The site that this computer belongs to, by its name or a variable that the site sets."""
    host = socket.gethostname()
    for name, path in profiles().items():
        tree = _quickly(path, path.stat().st_mtime_ns)
        hosts, variables = tree.get("hosts", []), tree.get("variables", {})
        if isinstance(hosts, list) and any(fnmatch.fnmatchcase(host, str(pattern)) for pattern in hosts):
            return name
        if isinstance(variables, dict) and any(env.variable(variable) == value for variable, value in variables.items()):
            return name
    return None


@functools.cache
def _quickly(path: Path, changed: int) -> dict[str, Any]:
    """The tables of a profile (as it was last changed) without their lines; what is wrong with it is said as for any file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return read_file(str(path)).tree


def layers(of_spec: Sequence[Layer]) -> list[Layer]:
    """What the site's profile says, below the layers of a spec. None where the spec leaves nothing open, as the copy in a run's directory does."""
    given = {f"{table}.{leaf}" for layer in of_spec for table, inner in layer.tree.items() if isinstance(inner, dict) for leaf in inner}
    if {name for name in keys() if "." in name} <= given:
        return []
    named = [layer.tree["batch"]["site"] for layer in of_spec if isinstance(layer.tree.get("batch"), dict) and "site" in layer.tree["batch"]]
    name = named[-1] if named else "auto"
    if name == "auto":
        name = here()
    if not isinstance(name, str) or not name:  # not a text: said by the schema
        return []
    site, partition, profile = read(name)
    chosen = Layer({"batch": {"site": f"{site}/{partition}"}}, name=f"the host name ({profile.file})")
    of_site = _part(profile, profile.tree, ("spec",))
    of_partition = _part(profile, profile.tree["partitions"][partition], ("partitions", partition, "spec"))
    return [chosen, of_site, of_partition]


def _part(profile: Layer, tree: Mapping[str, Any], path: tuple[str, ...]) -> Layer:
    values = tree.get("spec", {})
    if not isinstance(values, dict):
        raise InputError(f"{profile.file}: [{'.'.join(path)}] must be a table")
    named = [name for name, inner in values.items() if not isinstance(inner, dict)]
    named += [f"{table}.{leaf}" for table, inner in values.items() if isinstance(inner, dict) for leaf in inner]
    if wrong := next((name for name in named if not _may_say(name)), ""):
        may = "a profile gives keys whose role is site (hpczero spec)"
        raise InputError(f"{profile.file}: [{'.'.join(path)}] says {printable(wrong, 100)}: {may}")
    lines = {place[len(path) :]: line for place, line in profile.lines.items() if place[: len(path)] == path and len(place) > len(path)}
    return Layer(values, profile.file, lines)


def _may_say(name: str) -> bool:
    key = keys().get(name)
    return key is not None and key.role == "site" and name != "batch.site"
