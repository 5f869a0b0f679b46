"""An index that a stranger made, with checksums that fit, is refused in one line: nothing outside
is opened, and no memory is taken for values that are not there.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpczero.cli import main
from tests.support.checkpoints import (
    seal,
)
from tests.support.crafted import (
    IN_OPEN,
    assert_refused,
    remake_view,
    replace,
    virtual,
    watch_opening,
)

pytestmark = pytest.mark.usefixtures("hdf5_in_this_process")


def test_the_watch_of_this_test_sees_what_is_opened(tmp_path: Path) -> None:
    watch = watch_opening(tmp_path)
    (tmp_path / "x").write_text("")
    assert struct.unpack_from("iI", os.read(watch, 4096))[1] & IN_OPEN
    os.close(watch)


def unlimited(file: h5py.File, source: str) -> None:
    """A view with the shape of its source: asking for its shape opens the source."""
    layout = h5py.VirtualLayout((30, 7), "<f4", maxshape=(None, 7))
    there = h5py.VirtualSource(source, "/rank-00000/model", (30, 7), "<f4", maxshape=(None, 7))
    layout[0 : h5py.h5s.UNLIMITED, :] = there[0 : h5py.h5s.UNLIMITED, :]
    del file["model/a"]
    file.create_virtual_dataset("model/a", layout)


def external(file: h5py.File, name: str, secret: Path) -> None:
    if name in file:
        del file[name]
    file[name] = h5py.ExternalLink(str(secret), "/rank-00000/model")


def stored_elsewhere(file: h5py.File, name: str, secret: Path) -> None:
    values = file[name][()]
    replace(
        file,
        name,
        shape=values.shape,
        dtype=values.dtype,
        external=[(str(secret), 0, values.nbytes)],
    )


LEADING_OUT: dict[str, Callable[[h5py.File, Path], Any]] = {
    "virtual source": lambda file, secret: virtual(file, "model/a", str(secret)),
    "relative virtual source": lambda file, secret: virtual(file, "model/a", "../secret.h5"),
    "view that asks its source": lambda file, secret: unlimited(file, str(secret)),
    "virtual piece table": lambda file, secret: virtual(
        file, "pieces/rank", str(secret), file["pieces/rank"].shape
    ),
    "external link to a tensor": lambda file, secret: external(file, "model/a", secret),
    "external link to a group": lambda file, secret: external(file, "optimizer", secret),
    "external link to the table": lambda file, secret: external(file, "pieces", secret),
    "external link to a column": lambda file, secret: external(file, "pieces/rank", secret),
    "external link to buffers": lambda file, secret: external(file, "buffers", secret),
    "external link to a buffer": lambda file, secret: external(file, "buffers/norm.mean", secret),
    "external storage of the table": lambda file, secret: stored_elsewhere(
        file, "pieces/rank", secret
    ),
    "view of something else": lambda file, secret: virtual(file, "model/more", str(secret)),
    "external link to something else": lambda file, secret: external(file, "model/more", secret),
    "external link in the root": lambda file, secret: external(file, "more", secret),
    "soft link to something else": lambda file, secret: file.__setitem__(
        "model/more", h5py.SoftLink("/model/a")
    ),
    "external storage of a buffer": lambda file, secret: stored_elsewhere(
        file, "buffers/norm.mean", secret
    ),
}


OF_THE_VIEW = {  # only `verify` looks at the view; hpczero reads by the table of pieces
    *("virtual source", "relative virtual source", "view that asks its source", "no view"),
    *("external link to a tensor", "view of something else", "external link to something else"),
    *("soft link to something else", "view of another shape", "view of other numbers"),
    *("something else", "another tensor", "a tensor under another name", "a group in itself"),
    *("view that shows zeros", "view that is none"),
}


@pytest.mark.parametrize("way", LEADING_OUT)
def test_an_index_that_leads_out_is_refused_and_nothing_there_is_opened(
    crafted: Path, secret: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    with h5py.File(crafted / "index.h5", "r+") as file:
        LEADING_OUT[way](file, secret)
    seal(crafted)
    assert_refused(crafted, capsys, "index.h5", is_read=way in OF_THE_VIEW)


def shapes(file: h5py.File, values: object) -> None:
    replace(file, "pieces/shapes", data=np.frombuffer(json.dumps(values).encode(), np.uint8))


def column(file: h5py.File, name: str, change: Callable[[np.ndarray[Any, Any]], Any]) -> None:
    values = file[f"pieces/{name}"][()]
    changed = change(values)
    replace(file, f"pieces/{name}", data=values if changed is None else changed)


def nothing(file: h5py.File, dimensions: int) -> None:
    """A table without pieces."""
    for name in ("tensor", "rank", "offset"):
        replace(file, f"pieces/{name}", shape=(0,), dtype="<u8")
    for name in ("start", "stop"):
        replace(file, f"pieces/{name}", shape=(0, dimensions), dtype="<u8")


def same_place(file: h5py.File) -> None:
    file["buffers/x"] = np.zeros(1 << 17)
    for number in range(200):
        file[f"buffers/x{number}"] = file["buffers/x"]


TRUTH = h5py.enum_dtype({"A": 0, "B": 1}, "i1")
WRONG: dict[str, Callable[[h5py.File], Any]] = {
    "huge shape": lambda file: shapes(file, [[1 << 40, 1 << 40], [11]]),
    "shape beyond all bits": lambda file: shapes(file, [[1 << 47] * 40, [11]]),
    "more lengths than dimensions can be": lambda file: shapes(file, [[1 << 47] * 200_000, [11]]),
    "table of too many dimensions": lambda file: [
        replace(file, f"pieces/{name}", shape=(0, 1 << 30), dtype="<u8")
        for name in ("start", "stop")
    ],
    "table of nothing": lambda file: nothing(file, 1 << 30),
    "other shape": lambda file: shapes(file, [[31, 7], [11]]),
    "shape that is text": lambda file: shapes(file, ["ab", [11]]),
    "shape that is negative": lambda file: shapes(file, [[-30, -7], [11]]),
    "shapes that are deep": lambda file: replace(
        file, "pieces/shapes", data=np.frombuffer(b"[" * 100_000, np.uint8)
    ),
    "names that are numbers": lambda file: replace(
        file, "pieces/names", data=np.frombuffer(b"[1, 2]", np.uint8)
    ),
    "the same name twice": lambda file: replace(
        file, "pieces/names", data=np.frombuffer(b'["a", "a"]', np.uint8)
    ),
    "a name for a terminal": lambda file: replace(
        file, "pieces/names", data=np.frombuffer(b'["\\u001b[2J", "b"]', np.uint8)
    ),
    "column of floats": lambda file: column(file, "rank", lambda values: values.astype(np.float64)),
    "column of text": lambda file: column(file, "rank", lambda values: values.astype("S")),
    "column of tables": lambda file: column(
        file, "rank", lambda values: values.astype([("x", "<u8")])
    ),
    "column too short": lambda file: column(file, "rank", lambda values: values[1:]),
    "column that is one number": lambda file: column(file, "rank", lambda values: values[0]),
    "rank that is none": lambda file: column(file, "rank", lambda values: values.__setitem__(0, 9)),
    "rank beyond all": lambda file: column(
        file, "rank", lambda values: values.__setitem__(0, (1 << 64) - 1)
    ),
    "tensor that is none": lambda file: column(
        file, "tensor", lambda values: values.__setitem__(-1, 9)
    ),
    "offset beyond": lambda file: column(
        file, "offset", lambda values: values.__setitem__(0, (1 << 64) - 4)
    ),
    "the same numbers twice": lambda file: column(
        file, "offset", lambda values: values.__setitem__(slice(None), 0)
    ),
    "empty piece": lambda file: column(file, "stop", lambda values: values.__setitem__(0, 0)),
    "piece outside of its tensor": lambda file: (
        column(file, "start", lambda v: v.__iadd__(1)),
        column(file, "stop", lambda v: v.__iadd__(1)),
    ),
    "table that is large and empty": lambda file: replace(
        file, "pieces/offset", shape=(1 << 39,), dtype="<u8"
    ),
    "table in chunks": lambda file: replace(
        file, "pieces/offset", shape=(1 << 39,), dtype="<u8", chunks=(1 << 20,), compression="gzip"
    ),
    "table that is a group": lambda file: (
        file.__delitem__("pieces/offset"),
        file.create_group("pieces/offset"),
    ),
    "soft link": lambda file: (
        file.__delitem__("pieces/offset"),
        file.__setitem__("pieces/offset", h5py.SoftLink("/pieces/rank")),
    ),
    "buffer that is large and empty": lambda file: file.create_dataset(
        "buffers/x", shape=(1 << 50,), dtype="<f8"
    ),
    "buffer of numbers that only some machines have": lambda file: file.create_dataset(
        "buffers/x", data=np.arange(4, dtype=np.longdouble)
    ),
    "buffer of another order of bytes": lambda file: file.create_dataset(
        "buffers/x", data=np.arange(4, dtype=">f4")
    ),
    "buffer with the name of a tensor": lambda file: file.create_dataset(
        "buffers/a", data=np.arange(4.0)
    ),
    "buffer with a name for a terminal": lambda file: file.create_dataset(
        "buffers/x\u001b[2J", data=np.arange(4.0)
    ),
    "buffer of an enumeration": lambda file: file.create_dataset(
        "buffers/x", data=[0, 1], dtype=TRUTH
    ),
    "buffers in the same place": same_place,
    "buffer of text": lambda file: file.create_dataset("buffers/x", data="text"),
    "buffers in themselves": lambda file: file.__setitem__("buffers/x", file["buffers"]),
    "view of another shape": lambda file: virtual(file, "model/a", "shard-00000.h5", (7, 30)),
    "view of other numbers": lambda file: virtual(file, "model/a", "shard-00001.h5"),
    "something else": lambda file: file.create_dataset("more", data=[1]),
    "another tensor": lambda file: file.create_dataset("model/c", data=[1]),
    "a tensor under another name": lambda file: file.__setitem__("model/c", file["model/a"]),
    "a group in itself": lambda file: file.__setitem__("model/c", file["model"]),
    "view that shows zeros": lambda file: remake_view(file, 0.0),
    "no view": lambda file: file.__delitem__("model/a"),
    "view that is none": lambda file: replace(file, "model/a", data=np.ones((30, 7), np.float32)),
}


@pytest.mark.parametrize("way", WRONG)
def test_an_index_that_cannot_be_is_refused(
    crafted: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    with h5py.File(crafted / "index.h5", "r+") as file:
        WRONG[way](file)
    seal(crafted)
    assert_refused(crafted, capsys, "index.h5", is_read=way in OF_THE_VIEW)


def with_user_block(path: Path) -> None:
    """The same file behind 512 bytes that are not HDF5's."""
    with (
        h5py.File(path.with_name("moved.h5"), "w", userblock_size=512, libver="earliest") as made,
        h5py.File(path) as file,
    ):
        for name in file:
            file.copy(name, made)
    path.with_name("moved.h5").replace(path)


def test_an_index_with_a_user_block_is_refused(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_user_block(crafted / "index.h5")
    seal(crafted)
    assert_refused(crafted, capsys, "no HDF5 file, or one that does not begin with its signature")


def test_a_view_that_is_made_again_as_it_was_is_good(crafted: Path) -> None:
    with h5py.File(crafted / "index.h5", "r+") as file:
        remake_view(file, np.nan)
    seal(crafted)
    assert main(["ckpt", "verify", str(crafted)]) == 0
