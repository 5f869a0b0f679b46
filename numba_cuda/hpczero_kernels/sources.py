"""Names under which numba keeps compiled kernels. They have a hash of this package's sources: numba
itself looks only at the file that a kernel is in, not at functions of other files.

numba is not imported here: where it keeps kernels is chosen by their hash, before it is.
"""

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def sources_hash() -> str:
    """Return the hash of this package's sources."""
    return hash_of(Path(__file__).parent)


def hash_of(folder: Path) -> str:
    facts = blake2b(digest_size=8)
    for source in sorted(folder.rglob("*.py")):
        facts.update(source.read_bytes())
    return facts.hexdigest()


def named_by_sources(function: Function) -> Function:
    """Add the hash of the sources to a kernel's name; applied before numba's caching decorator."""
    if not function.__qualname__.endswith(sources_hash()):
        function.__qualname__ += f"_{sources_hash()}"
    return function
