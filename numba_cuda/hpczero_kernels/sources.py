"""The names under which numba keeps compiled kernels: with a hash of this package's sources, as numba itself looks only at the file that a kernel
is in, not at what it calls from others.
"""

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def stamp() -> str:
    return hash_of(Path(__file__).parent)


def hash_of(folder: Path) -> str:
    facts = blake2b(digest_size=8)
    for source in sorted(folder.rglob("*.py")):
        facts.update(source.read_bytes())
    return facts.hexdigest()


def named_by_sources(function: Function) -> Function:
    """To be applied before numba's decorator with cache=True."""
    if not function.__qualname__.endswith(stamp()):
        function.__qualname__ += f"_{stamp()}"
    return function
