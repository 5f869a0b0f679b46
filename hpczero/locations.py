"""Where the files that belong to hpczero lie: in the checkout, or in the installation's share folder.

The checkout comes first: what runs from a checkout (or an editable install of it) uses the checkout's kernels,
templates and job specs, whatever else is installed.
"""

import json
import shlex
import site
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpczero.errors import HpczeroError

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def in_checkout() -> bool:
    return (_CHECKOUT / "setup.cfg").is_file() and (_CHECKOUT / "numba_cuda" / "hpczero_kernels").is_dir()


def install(extra: str) -> str:
    """The command that adds an extra to this hpczero."""
    return install_command(sys.executable, source(), extra)


def install_command(executable: str, source: str, extra: str) -> str:
    """From its source, as no package index has it; of an unknown one ("") the reader knows the folder."""
    wanted = shlex.quote(f"{source or '.'}[{extra}]")
    return f"{shlex.quote(executable)} -m pip install {wanted}" + ("" if source else ", in the folder of hpczero's source")


def source() -> str:
    """The checkout, or the folder or file that pip was given, if it is still there; else "". """
    if in_checkout():
        return str(_CHECKOUT)
    try:
        record = metadata.distribution("hpczero").read_text("direct_url.json")
        url = urlsplit(json.loads(record or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return ""
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).exists() else ""


def make_kernels_importable() -> None:
    """In a checkout the package `hpczero_kernels` lies under numba_cuda/, which is not on the path by itself."""
    folder = str(_CHECKOUT / "numba_cuda")
    if in_checkout() and folder not in sys.path:
        sys.path.insert(0, folder)


def shared_folder(name: str) -> Path:
    """The folder `templates`, `sites` or `jobspecs`."""
    roots = [Path(sysconfig.get_path("data")), Path(site.getuserbase()), _PACKAGE.parent]
    candidates = [root / "share" / "hpczero" / name for root in roots]
    if in_checkout():
        candidates.insert(0, _CHECKOUT / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise HpczeroError(f"hpczero's folder '{name}' is missing; looked in {', '.join(map(str, candidates))}: install hpczero again")
