"""Needs of a spec's trackers: told on a login node, as a run goes on without."""

from importlib import util

from hpczero import env
from hpczero.spec.track import Track
from hpczero.text import toml_repr

# tracker -> the package that it imports, and what pip installs
_PACKAGES = {"wandb": ("wandb", "wandb"), "mlflow": ("mlflow", "mlflow-skinny")}


def missing(track: Track) -> list[str]:
    """Return what cannot be found here, in words; nothing is imported."""
    notes = []
    for name, (package, installed) in _PACKAGES.items():
        if name in track.to and not env.has_package(package):
            notes.append(
                f'track.to has "{name}", whose package is not installed here: pip install '
                f'{installed}, or "hpczero[track]"; a run without it says so, and goes on'
            )
    package = track.callback.partition(":")[0].partition(".")[0]
    if package and util.find_spec(package) is None:
        notes.append(
            f"track.callback = {toml_repr(track.callback)}: {package} is not found here; is it "
            "installed, or in PYTHONPATH? A run without it says so, and goes on"
        )
    return notes
