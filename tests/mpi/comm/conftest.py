"""Fixture: a world whose collectives go in many small pieces."""

from collections.abc import Iterator

import pytest

from hpczero.comm.progress import Limits
from hpczero.comm.world import World

SMALL = Limits(staging=100, message=7)  # bytes


@pytest.fixture
def narrow(world: World | None) -> Iterator[World | None]:
    """The same ranks with tiny limits."""
    part = world.part(range(world.size), limits=SMALL) if world else None
    yield part
    if part:
        part.close()
