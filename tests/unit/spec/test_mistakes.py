"""Which key an unknown one was meant to be."""

import pytest

from hpczero.spec.keys import unknown


@pytest.mark.parametrize(
    ("table", "leaf", "meant"),
    [
        ("optimizer", "learning_rate", "did you mean optimizer.lr?"),
        ("train", "learning-rate", "did you mean optimizer.lr (under [optimizer])?"),
        ("", "learning_rate", "did you mean optimizer.lr (under [optimizer])?"),
        ("train", "stesp", "did you mean train.steps?"),
    ],
)
def test_initials_count_as_the_word(table: str, leaf: str, meant: str) -> None:
    assert meant in unknown(table, leaf, 3)
