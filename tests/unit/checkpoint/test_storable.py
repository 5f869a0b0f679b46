"""Values that the check lets pass are written and read back by any reader; what it refuses was
written and then read by none.
"""

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpczero.checkpoint import limits
from hpczero.checkpoint.export_safetensors import Export
from hpczero.checkpoint.limits import dtype_of, problem
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.safetensors import SafetensorsFile
from hpczero.checkpoint.verify import Verification
from tests.support.checkpoints import Grid, Wanted, make, parameters

NO_NAMES = [
    "",
    "x/",
    "/x",
    "x//y",
    "a/./b",
    "..",
    "x\ny",
    "x\u200by",
    "x\0y",
    "\ud800",
    "\u202ex",
    "__metadata__",
    "n" * 5000,
    "a/" * 20 + "a",
    7,
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_cannot_be_read_back_is_refused(name: str) -> None:
    assert "no name for a checkpoint" in problem({name: [1]}, {})
    assert "no name for a checkpoint" in problem({}, {name: ("float32", [1])})


@pytest.mark.parametrize(
    "shape",
    [[1] * 33, [1 << 47] * 200_000, [0, 1 << 70], [1 << 40, 1 << 40], [-1], [True], ["a"], [1.0]],
)
def test_a_shape_that_none_can_have_is_refused_in_a_few_words(shape: list[int]) -> None:
    assert 0 < len(problem({"x": shape}, {})) < 200
    assert 0 < len(problem({}, {"x": ("float32", shape)})) < 200


@pytest.mark.parametrize(
    "dtype",
    [
        "complex64",
        "float8_e4m3fn",
        dtype_of(np.zeros(1, np.longdouble)),
        dtype_of(np.zeros(1, ">f4")),
        "object",
        "str",
    ],
)
def test_numbers_that_other_programs_cannot_read_are_refused(dtype: str) -> None:
    assert dtype in problem({}, {"freqs": (dtype, [4])})


def test_names_that_are_in_each_other_s_way_are_refused() -> None:
    assert "there cannot be x too" in problem({"x/y/z": [], "x": []}, {})
    assert "there cannot be u too" in problem({}, {"u": ("int8", []), "u/v": ("int8", [])})
    assert "a tensor and a buffer" in problem({"x": []}, {"x": ("int8", [])})
    assert not problem({"x.y": [], "x": [], "u/v": []}, {"u": ("int8", []), "x/y": ("int8", [])})


def test_what_passes_is_read_back_by_all_readers(tmp_path: Path) -> None:
    names = [
        "x",
        "x.y",
        "a/b",
        "a/c/d",
        "w é中",
        "n" * 4000,
        "/".join("qrstuvwxyzabcdef"),
        "[1]",
        "a\\n",
        "%s",
        "deep",
    ]
    shapes = dict.fromkeys(names, (2, 3)) | {"deep": (1,) * 32, "nothing": (0, 5), "one": ()}
    buffers = {
        f"buffers/{dtype}": np.ones((1,) * 32 if dtype == "float16" else (3,), dtype)
        for dtype in limits.DTYPES
    }
    buffers |= {
        "b/empty": np.zeros((0, 3)),
        "b/one": np.array(3, np.uint8),
        "/".join("Qrstuvwxyzabcdef"): np.zeros(2),
    }
    assert not problem(
        shapes, {name: (dtype_of(values), values.shape) for name, values in buffers.items()}
    )
    wanted = Wanted(layers=parameters(**shapes), buffers=buffers)
    made = make(tmp_path, Grid(data=2), wanted)
    verification = Verification(made)
    assert not [
        damage
        for task in verification.tasks()
        for damage in verification.carry_out(task, lambda _: None)
    ]
    with Checkpoint.open(made) as checkpoint, h5py.File(made / "index.h5") as file:
        for name, values in wanted.values[1].items():
            assert np.array_equal(checkpoint[f"/optimizer/moment1/{name}"].numpy(), values)
            assert np.array_equal(
                file[f"optimizer/moment1/{name}"][()].reshape(values.shape), values
            )
        assert checkpoint.buffers.keys() == buffers.keys()
        assert all(
            np.array_equal(values, buffers[name]) and values.dtype == buffers[name].dtype
            for name, values in checkpoint.buffers.items()
        )
        Export(checkpoint, "fp32").to_file(tmp_path / "out.safetensors", lambda _: None)
    with SafetensorsFile(tmp_path / "out.safetensors") as exported:
        assert {entry.name for entry in exported.entries} == shapes.keys() | buffers.keys()


def test_what_is_refused_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no name for a checkpoint"):
        make(tmp_path, Grid(), Wanted(layers=parameters(**{"x//y": (2,)})))
    assert not list(tmp_path.iterdir())
