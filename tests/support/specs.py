"""Spec files for tests, and the message with which a wrong one is refused."""

from collections.abc import Callable

import pytest

from hpczero.errors import InputError
from hpczero.spec.load import load

Write = Callable[..., str]


def refusal(path: str, *overrides: str) -> str:
    """The message with which a spec is refused."""
    with pytest.raises(InputError) as caught:
        load(path, overrides)
    return str(caught.value)
