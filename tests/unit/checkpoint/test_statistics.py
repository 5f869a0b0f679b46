"""Statistics of a tensor that is read in stretches."""

import numpy as np
import pytest

from hpczero.checkpoint.load import Difference, Statistics


def test_stretches_add_up_to_the_statistics_of_the_whole() -> None:
    """Also where their means differ more than their values do."""
    random = np.random.default_rng(5)
    stretches = [
        random.normal(mean, 0.5, length).astype(np.float32)
        for mean, length in ((-3.0, 1000), (0.1, 7), (40.0, 300), (39.0, 1))
    ]
    found, whole = Statistics(), np.concatenate(stretches).astype(np.float64)
    for stretch in stretches:
        found.add(stretch)
    assert (found.count, found.minimum, found.maximum) == (1308, whole.min(), whole.max())
    assert found.mean == pytest.approx(whole.mean(), rel=1e-12)
    assert found.std == pytest.approx(whole.std(), rel=1e-12)
    assert found.norm == pytest.approx(np.linalg.norm(whole), rel=1e-12)


def test_what_is_nan_in_one_alone_is_further_away_than_any_tolerance() -> None:
    found = Difference()
    found.add(np.array([1, np.nan, np.nan], np.float32), np.array([1, 2, np.nan], np.float32))
    assert (found.differing, found.largest, found.relative) == (1, np.inf, np.inf)
