"""Checkpoints that a stranger made, with checksums that fit: refused in one line, nothing
outside opened, no memory taken for what is not there.
"""

import ctypes
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpczero.checkpoint
from hpczero.checkpoint import Damaged
from hpczero.checkpoint.shard_file import structure_checksum
from hpczero.cli import main
from tests.support.checkpoints import (
    Grid,
    Wanted,
    look_without_a_process,
    make,
    memory_at_most,
    parameters,
    seal,
)

WANTED = Wanted(layers=parameters(a=(30, 7), b=(11,)), spec={"name": "crafted"})
_OPENED = 0x20  # inotify's IN_OPEN


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("whole"), Grid(data=2, per_file=1), WANTED)


@pytest.fixture
def crafted(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.fixture
def secret(whole: Path, tmp_path: Path) -> Iterator[Path]:
    """A file outside; it is an error if anybody opens it."""
    path = Path(shutil.copy(whole / "shard-00000.h5", tmp_path / "secret.h5"))
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, str(path).encode(), _OPENED) >= 0
    yield path
    try:
        opened = os.read(watch, 4096)
    except BlockingIOError:
        opened = b""
    os.close(watch)
    assert not opened, "the file outside was opened"


def test_the_watch_of_this_test_sees_what_is_opened(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(watch, str(tmp_path).encode(), _OPENED)
    (tmp_path / "x").write_text("")
    assert struct.unpack_from("iI", os.read(watch, 4096))[1] & _OPENED
    os.close(watch)


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    look_without_a_process(monkeypatch)


def refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    word: str,
    code: int = 1,
    is_read: bool = False,
) -> None:
    """By whatever reads it, in one line, with little memory. `is_read`: by `verify` alone."""
    with memory_at_most(100 << 20):
        for verb, *more in (
            ["stats", "--slot", "all"],
            ["show"],
            ["export", str(folder.parent / "out.safetensors")],
        ):
            assert main(["ckpt", verb, str(folder), *more]) == (0 if is_read else code), verb
            said = capsys.readouterr().err
            assert is_read or word in said, (verb, said)
            assert said.count("\n") == (not is_read)
        assert main(["ckpt", "verify", str(folder)]) == code
        listed = capsys.readouterr()
        assert word in listed.out
        assert listed.out.count("\n") <= 7
        assert not listed.err


def replace(file: h5py.File, name: str, **arguments: Any) -> None:
    del file[name]
    file.create_dataset(name, **arguments)


def virtual(file: h5py.File, name: str, source: str, shape: tuple[int, ...] = (30, 7)) -> None:
    layout = h5py.VirtualLayout(shape, "<f4")
    layout[:] = h5py.VirtualSource(source, "/rank-00000/model", shape, "<f4")
    if name in file:
        del file[name]
    file.create_virtual_dataset(name, layout)


def unlimited(file: h5py.File, source: str) -> None:
    """A view whose own shape is that of its source: asking for it opens the source."""
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


OF_THE_VIEW = {  # which hpczero does not read by: only `verify` looks
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
    refused(crafted, capsys, "index.h5", is_read=way in OF_THE_VIEW)


@pytest.mark.parametrize("name", ["shard-00000.h5", "index.h5", "MANIFEST.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_file_that_is_no_plain_file_is_refused(
    crafted: Path, secret: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    (crafted / name).unlink()
    {"link": lambda path: path.symlink_to(secret), "pipe": os.mkfifo, "folder": os.mkdir}[kind](
        crafted / name
    )
    with pytest.raises(Damaged, match=name):
        hpczero.checkpoint.load.Checkpoint.open(crafted)["/model/a"].numpy()
    assert main(["ckpt", "verify", str(crafted)]) == 1
    assert main(["ckpt", "ls", str(crafted.parent)]) == 0
    assert "damaged" in capsys.readouterr().out or name == "shard-00000.h5"


def shapes(file: h5py.File, values: object) -> None:
    replace(file, "pieces/shapes", data=np.frombuffer(json.dumps(values).encode(), np.uint8))


def column(file: h5py.File, name: str, change: Callable[[np.ndarray[Any, Any]], Any]) -> None:
    values = file[f"pieces/{name}"][()]
    changed = change(values)
    replace(file, f"pieces/{name}", data=values if changed is None else changed)


def elsewhere(file: h5py.File, name: str) -> None:
    """The same dataset at another place."""
    values = file[name][()]
    del file[name]
    file["in its place"] = values
    file[name] = values
    del file["in its place"]


def nothing(file: h5py.File, dimensions: int) -> None:
    """A table without pieces."""
    for name in ("tensor", "rank", "offset"):
        replace(file, f"pieces/{name}", shape=(0,), dtype="<u8")
    for name in ("start", "stop"):
        replace(file, f"pieces/{name}", shape=(0, dimensions), dtype="<u8")


def remade(file: h5py.File, fill: float) -> None:
    """The view of b."""
    layout = h5py.VirtualLayout((11,), "<f4")
    for mapping in file["model/b"].virtual_sources():
        (first,), (last,) = mapping.vspace.get_select_bounds()
        (begin,), (end,) = mapping.src_space.get_select_bounds()
        source = h5py.VirtualSource(
            mapping.file_name, mapping.dset_name, mapping.src_space.get_simple_extent_dims(), "<f4"
        )
        layout[first : last + 1] = source[begin : end + 1]
    del file["model/b"]
    file.create_virtual_dataset("model/b", layout, fillvalue=fill)


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
    "view that shows zeros": lambda file: remade(file, 0.0),
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
    refused(crafted, capsys, "index.h5", is_read=way in OF_THE_VIEW)


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
    refused(crafted, capsys, "no HDF5 file, or one that does not begin with its signature")


def shard(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["shards"][0]
    return found


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "path out": lambda content: shard(content).update(file="../secret.h5"),
    "the same name elsewhere": lambda content: shard(content).update(file="../shard-00000.h5"),
    "absolute path": lambda content: shard(content).update(file="/etc/passwd"),
    "hidden end": lambda content: shard(content).update(file="shard-00000.h5\n"),
    "size beyond": lambda content: shard(content).update(size=1 << 80),
    "huge elements": lambda content: shard(content)["ranks"][0].update(elements=1 << 61),
    "place that is not aligned": lambda content: shard(content)["ranks"][0].update(data=[1, 2, 3]),
    "slots over each other": lambda content: shard(content)["ranks"][0].update(data=[4096] * 3),
    "negative place": lambda content: shard(content)["ranks"][0].update(checksums=-8),
    "too few slots": lambda content: shard(content)["ranks"][0].update(data=[]),
    "many ranks": lambda content: content.update(ranks=1 << 61),
    "rank twice": lambda content: shard(content)["ranks"].append(shard(content)["ranks"][0]),
    "file twice": lambda content: content["shards"].append({**shard(content), "ranks": []}),
    "no shards": lambda content: content.update(shards=[]),
    "another key": lambda content: content.update(more=1),
    "text for a number": lambda content: content.update(ranks="2"),
    "infinite scale": lambda content: content["state"].update(loss_scale=float("inf")),
    "step that is NaN": lambda content: content["state"].update(step=float("nan")),
    "format 0": lambda content: content.update(format=0),
}


@pytest.mark.parametrize("way", MANIFESTS)
def test_a_manifest_that_cannot_be_is_refused(
    crafted: Path, secret: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    seal(crafted, MANIFESTS[way])
    refused(crafted, capsys, "MANIFEST.json")


def test_a_shard_that_is_not_as_large_as_the_manifest_says_is_refused(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(crafted, lambda content: shard(content).update(size=123_456))
    for verb in ("stats", "verify"):
        assert main(["ckpt", verb, str(crafted)]) == 1
    assert "123,456 were written" in capsys.readouterr().out


def test_a_view_that_is_made_again_as_it_was_is_good(crafted: Path) -> None:
    with h5py.File(crafted / "index.h5", "r+") as file:
        remade(file, np.nan)
    seal(crafted)
    assert main(["ckpt", "verify", str(crafted)]) == 0


def test_a_shard_that_is_mostly_a_hole_is_refused_at_once(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(crafted / "shard-00000.h5", 1 << 43)
    seal(crafted, lambda content: shard(content).update(size=1 << 43))
    refused(crafted, capsys, "bytes besides its data")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda file: file.create_dataset("more", data=[1]), "/more does not belong there"),
        (
            lambda file: file.__setitem__("rank-00000/more", h5py.ExternalLink("secret.h5", "/")),
            "/rank-00000/more is not in this file",
        ),
        (
            lambda file: elsewhere(file, "rank-00000/checksums"),
            "/rank-00000/checksums is not at byte",
        ),
        (
            lambda file: replace(file, "rank-00000/checksums", data=np.zeros((3, 2), "<u8")),
            "/rank-00000/checksums is no plain dataset",
        ),
    ],
)
def test_a_shard_with_other_datasets_is_found(
    crafted: Path,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[h5py.File], Any],
    word: str,
) -> None:
    path = crafted / "shard-00000.h5"
    with h5py.File(path, "r+") as file:
        change(file)

    def sealed(content: dict[str, Any]) -> None:
        data = [(begin, begin + 4096) for begin in shard(content)["ranks"][0]["data"]]
        with path.open("rb") as file:
            shard(content).update(
                size=path.stat().st_size,
                rest=structure_checksum(file.fileno(), path.stat().st_size, data),
            )

    seal(crafted, sealed)
    assert main(["ckpt", "verify", str(crafted)]) == 1
    assert word in capsys.readouterr().out


def test_a_newer_format_is_refused_with_a_clear_word(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(crafted, lambda content: content.update(format=3, shards={"in": "another way"}))
    refused(
        crafted,
        capsys,
        "format 3 was written by a newer hpczero; this one reads up to format 2",
        code=2,
    )


NONE = [
    "",
    "{",
    "[]",
    '{"content": 3}',
    '{"content": {}}',
    "[" * 200_000,
    '{"content": {"format": ' + "9" * 5000 + "}}",
    "\ud800",
]


@pytest.mark.parametrize("text", NONE)
def test_a_manifest_that_is_none_is_refused(
    crafted: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (crafted / "MANIFEST.json").write_bytes(text.encode(errors="surrogatepass"))
    refused(crafted, capsys, "MANIFEST.json")


def test_a_manifest_that_is_too_long_is_refused_unread(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(crafted / "MANIFEST.json", (64 << 20) + 1)
    refused(crafted, capsys, "67,108,865 bytes are too many for a manifest")


@pytest.mark.parametrize("depth", [200, 500, 900, 990])
def test_a_deep_spec_is_refused_or_read_but_never_a_traceback(
    crafted: Path, capsys: pytest.CaptureFixture[str], depth: int
) -> None:
    content = (
        (crafted / "MANIFEST.json")
        .read_text()
        .replace('"name": "crafted"', '"name": ' + '{"d": ' * depth + "1" + "}" * depth)
    )
    (crafted / "MANIFEST.json").write_text(content)
    refused(crafted, capsys, "MANIFEST.json")


def test_a_shard_whose_datasets_lie_elsewhere_than_the_manifest_says_is_found(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(crafted, lambda content: shard(content)["ranks"][0]["data"].reverse())
    assert main(["ckpt", "verify", str(crafted)]) == 1
    assert "not at byte" in capsys.readouterr().out
