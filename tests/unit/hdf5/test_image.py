"""HDF5 files that are made in memory and written in one go."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpczero.hdf5.image import hdf5_image


def test_a_disk_that_takes_a_part_of_each_write_gets_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    values = np.arange(50_000)
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:999], at))
    with hdf5_image(tmp_path / "values.h5") as file:
        file["values"] = values
    with h5py.File(tmp_path / "values.h5") as file:
        assert np.array_equal(file["values"][()], values)
