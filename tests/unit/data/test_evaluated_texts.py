"""The texts that `hpczero eval` reads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpczero.commands.evaluate import _open_texts
from hpczero.errors import InputError
from tests.support.token_files import spec_of


def test_the_model_must_have_room_for_every_token_that_is_evaluated(path: Path) -> None:
    """The end of a document, token 256, is the largest."""
    world: Any = SimpleNamespace(rank=0, run_on_all=lambda work: work())
    checkpoint: Any = SimpleNamespace(identity={})
    assert len(_open_texts(world, checkpoint, spec_of(path, vocab=257), [])) == 1
    with pytest.raises(InputError, match=r"holds token 256, and the model has 256 \(model\.vocab"):
        _open_texts(world, checkpoint, spec_of(path, vocab=256), [])
