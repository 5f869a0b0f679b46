"""The folder of zero.offload, as the process that looks at it sees it; nothing is made there."""

import os
from pathlib import Path

from hpczero import env, machine, safe_files
from hpczero.errors import InputError
from hpczero.spec.schema import Zero
from hpczero.text import join_words, printable, toml_repr

_IN_MEMORY = ("tmpfs", "ramfs")


def problem(zero: Zero) -> str:
    """Return why files of states cannot be made in the folder; "" if they can."""
    given = f"zero.offload = {toml_repr(zero.offload)}"
    if unset := env.unset_variables(zero.offload):
        names = join_words([f"${name}" for name in unset])
        return f"{given}: {names} is not set: set it where the ranks start, or name a folder"
    folder = Path(zero.folder).absolute()
    nearest = safe_files.nearest_there(folder)
    shown = printable(str(nearest))
    try:
        if not nearest.is_dir():
            return f"{given}: {shown} is no folder: name another one"
        if nearest == folder:
            safe_files.make_own_folder(folder)  # it is there, and must be this user's
    except (OSError, InputError) as error:
        return f"{given}: {getattr(error, 'strerror', None) or error}"
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        missing = "" if nearest == folder else ", where it would have to be made"
        return f"{given}: nothing can be written in {shown}{missing}: name a folder of your own"
    return ""


def warning(zero: Zero, place: str) -> str:
    """Return what is said of a folder that saves no memory, as seen at this place; "" if none."""
    if not zero.folder or env.unset_variables(zero.offload):
        return ""
    folder = Path(zero.folder).absolute()
    kind = machine.file_system_type(folder)
    if kind not in _IN_MEMORY:
        return ""
    return (
        f"zero.offload: {printable(str(folder))} is in memory {place} ({kind}), so that nothing is"
        " saved: name a folder on storage"
    )
