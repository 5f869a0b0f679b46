"""Figures that many layouts of one job share."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

_Counted = TypeVar("_Counted")


class Once:
    """A memory of what was counted: each figure is counted once for all layouts that share it."""

    def __init__(self) -> None:
        self._known: dict[object, Any] = {}

    def __call__(self, count: Callable[..., _Counted], key: object, *by: object) -> _Counted:
        """Return `count(*by)`, which depends on the key alone."""
        at = count.__qualname__, key
        if at not in self._known:
            self._known[at] = count(*by)
        return cast(_Counted, self._known[at])
