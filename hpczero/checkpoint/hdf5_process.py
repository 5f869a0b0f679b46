"""The HDF5 library's view of a checkpoint's files, compared in a process that may die.

hpczero itself reads by the manifest and the piece table, without that library. Other programs read
the whole-tensor view of index.h5 and the datasets of shard files. `verify` has these compared here.
A stranger could make a view that leads elsewhere. A crafted file can make the library write over
its own memory, run for ever or ask for any amount of memory. So the process that asks has limits
of processor time and memory.

    python -m hpczero.checkpoint.hdf5_process FOLDER
        prints "ready"; then for each line on stdin, the number of a shard file or -1 for the index,
        a line of JSON: the list of what is wrong with that file
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero import env
from hpczero.checkpoint import index, manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import INDEX, Content, RankData, ShardFile, slot_elements
from hpczero.checkpoint.piece_table import Table
from hpczero.checkpoint.shard_file import Array, Unreadable, group_of, not_read
from hpczero.errors import HpczeroError

_MOST_PROBLEMS = 20  # of the index; a shard file has its first one reported
_MEMORY = 160 << 20  # bytes beyond what the process has when it begins to look
_MEMORY_PER_BYTE = 16  # more bytes of memory for each byte of the file's structure
_SECONDS = 4.0  # of processor time
_SECONDS_PER_BYTE = 4e-6  # more for each byte of the file's structure
_START = 120.0  # seconds: Python's libraries may lie on a slow file system
_SLOWER = 20.0  # times the processor time: then the process is given up
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
_DEEPEST = 32  # groups in groups: more than any name of a checkpoint has
# the exceptions that h5py raises for a file with a wrong structure
_H5PY_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError)


# -- the process ---------------------------------------------------------------------------------


class Hdf5Process:
    """Asks a process about one checkpoint; it begins with the first question, and after a crash."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder = folder
        self.content = content
        self._process: subprocess.Popen[bytes] | None = None

    def problems(self, shard: int = -1) -> list[str]:
        """Return what is wrong with a shard file, or the index. Unreadable: nobody can tell."""
        process = self._running()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_ended` says why
            process.stdin.write(f"{shard}\n".encode())
            process.stdin.flush()
        reply = self._line(process, _SLOWER * _seconds(structure(self.content, shard)))
        if reply is not None:
            return list(map(str, json.loads(reply)))
        return [self._ended(process, shard)]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            python = env.python_command("hpczero.checkpoint.hdf5_process")
            command = [*python, str(self.folder.absolute())]
            pipe = subprocess.PIPE
            try:
                quiet = subprocess.DEVNULL
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet)
            except OSError as error:
                why = f"no process to look at {self.folder}: {error.strerror}"
                raise Unreadable(why) from error
            if self._line(self._process, _START) != b"ready\n":
                self.close()
                raise Unreadable(f"the process that looks at {self.folder} did not begin")
        return self._process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """Return the next line of its output; None if it ended or takes longer."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            return None
        line = process.stdout.readline()
        return line if line.endswith(b"\n") else None

    def _ended(self, process: subprocess.Popen[bytes], shard: int) -> str:
        """Return what the end of the process says about the file."""
        name = INDEX if shard < 0 else self.content.shards[shard].file
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU  # it waits for something that a file says
        self.close()
        if -code == signal.SIGXCPU:
            return "the HDF5 library does not come to an end with it"
        if -code in _CRASHES:
            return f"the HDF5 library crashes when it reads it ({signal.Signals(-code).name})"
        raise Unreadable(f"the process that looked at {self.folder / name} ended with code {code}")

    def close(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.communicate()


def _seconds(size: int) -> float:
    return _SECONDS + _SECONDS_PER_BYTE * size


def structure(content: Content, shard: int) -> int:
    """Return the bytes of a file that the HDF5 library looks at: all but the data."""
    if shard < 0:
        return content.index.size
    described = content.shards[shard]
    return described.size - sum(end - begin for begin, end in described.ranges())


def limited(size: int) -> None:
    """Limit this process to the time and memory that so many bytes of structure are worth."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + _seconds(size)) + 1
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    memory = data_pages * resource.getpagesize() + _MEMORY + _MEMORY_PER_BYTE * size
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (soft, hard))


def answer(folder: Path, content: Content, shard: int) -> list[str]:
    """Limit this process, then return what is wrong with a file."""
    if shard < 0:
        with Checkpoint.open(folder, content) as checkpoint:
            table = checkpoint.table
        problems = _index_problems(folder / INDEX, table, content)
        most = _MOST_PROBLEMS
    else:
        described = content.shards[shard]
        problems = _shard_problems(folder / described.file, described, content.slots)
        most = 1
    limited(structure(content, shard))
    return list(islice(problems, most))


# -- the comparison ------------------------------------------------------------------------------


def _index_problems(path: Path, table: Table, content: Content) -> Iterator[str]:
    """Yield what is in index.h5 that the piece table does not say."""
    file_of = {data.rank: shard.file for shard in content.shards for data in shard.ranks}
    missing = {
        f"{slot}/{tensor.name}": (slot, number)
        for slot in index.slots_in_view(table, content.slots)
        for number, tensor in enumerate(table.tensors)
    }
    try:
        with _opened(path) as file:
            if file.userblock_size:
                yield "it has a user block"
            yield from _table_problems(file, table)
            for name, dataset in _datasets_below(file):
                if expected := missing.pop(name, None):
                    if not _is_view(dataset, *expected, table, file_of):
                        yield f"/{name} is not a view of this tensor's pieces"
                elif name not in index.DATASETS and not name.startswith("buffers/"):
                    yield f"/{name} does not belong there"
    except _H5PY_ERRORS as error:
        yield f"its view cannot be read: {error}"
    else:
        yield from (f"/{name} is not there" for name in missing)


def _table_problems(file: h5py.File, table: Table) -> Iterator[str]:
    for column in index.COLUMNS:
        if not np.array_equal(_values(file, f"pieces/{column}"), getattr(table, column)):
            yield f"/pieces/{column} is another one for the HDF5 library"
    for name, expected in index.texts(table).items():
        if json.loads(_values(file, f"pieces/{name}", "u1", 1).tobytes()) != expected:
            yield f"/pieces/{name} is another one for the HDF5 library"


def _is_view(
    dataset: Any, slot: str, number: int, table: Table, file_of: Mapping[int, str]
) -> bool:
    """Return True if a dataset maps exactly the pieces of a tensor and shows NaN elsewhere."""
    tensor = table.tensors[number]
    fill = np.zeros(1, "<f4")
    try:
        properties = dataset.get_create_plist()
        properties.get_fill_value(fill)
        # the mappings first: asking for a view's shape could already open its sources
        if properties.get_layout() == h5py.h5d.VIRTUAL:
            count = properties.get_virtual_count()
            mapped = {_mapping_in_file(properties, position) for position in range(count)}
        else:
            mapped = {()} if prod(dataset.shape) else set()
        is_plain = dataset.shape == (tensor.shape or (1,)) and dataset.dtype == "<f4"
        expected = {_mapping(slot, piece, table, file_of) for piece in table.pieces(number)}
        return bool(is_plain and np.isnan(fill[0])) and mapped == expected
    except _H5PY_ERRORS:
        return False


def _mapping_in_file(properties: h5py.h5p.PropDCID, position: int) -> tuple[object, ...]:
    """Return source file, source dataset, and bounds and size of both selections of a mapping."""
    shown = properties.get_virtual_vspace(position)
    source = properties.get_virtual_srcspace(position)
    return (
        properties.get_virtual_filename(position),
        properties.get_virtual_dsetname(position),
        shown.get_select_bounds(),
        source.get_select_bounds(),
        shown.get_select_npoints(),
        source.get_select_npoints(),
    )


def _mapping(slot: str, piece: int, table: Table, file_of: Mapping[int, str]) -> tuple[object, ...]:
    """Return the mapping of a piece in the form of `_mapping_in_file`."""
    rank, offset, size, box = index.view_of_piece(table, piece)
    bounds = tuple(cut.start for cut in box), tuple(cut.stop - 1 for cut in box)
    source = (offset,), (offset + size - 1,)
    return file_of[rank], f"/{group_of(rank)}/{slot}", bounds, source, size, size


def _shard_problems(path: Path, shard: ShardFile, slots: Sequence[str]) -> Iterator[str]:
    """Yield where the datasets of a shard file are not those that its manifest describes."""
    expected = {
        f"{group_of(data.rank)}/{name}": (shape, dtype, offset)
        for data in shard.ranks
        for name, shape, dtype, offset in _datasets_of(data, slots)
    }
    try:
        with _opened(path) as file:
            if file.userblock_size:
                yield "it has a user block"
            names = (name for name, _ in _datasets_below(file))
            yield from (f"/{name} does not belong there" for name in names if name not in expected)
            for name, (shape, dtype, offset) in expected.items():
                dataset = _dataset(file, name)
                # a virtual dataset is not even asked for its shape: that could open its sources
                is_plain = _is_contiguous(dataset) and dataset.shape == shape
                if not is_plain or dataset.dtype != np.dtype(dtype):
                    what = f"{shape} {np.dtype(dtype).name} in this file"
                    yield f"/{name} is no plain dataset of {what}"
                elif dataset.size and dataset.id.get_offset() != offset:
                    yield f"/{name} is not at byte {offset}, as the manifest says"
    except _H5PY_ERRORS as error:
        yield f"it is no HDF5 file of a checkpoint: {error}"


def _datasets_of(
    data: RankData, names: Sequence[str]
) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Return name, shape, dtype and offset in the file of a rank's datasets."""
    elements = slot_elements(data)
    slots = [(slot, (elements,), "<f4", at) for slot, at in zip(names, data.data, strict=True)]
    return [*slots, ("checksums", (len(names), data.extent.blocks), "<u8", data.checksums)]


# -- reading by the HDF5 library -----------------------------------------------------------------
# Only what lies in the file itself is taken, and no more than the file has bytes.


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Open a file to look into; Unreadable if that fails for a reason other than its content."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except OSError as error:
        if error.errno is None:
            raise
        raise not_read(path, error) from error


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset, reached without a link that leads on, in this file or elsewhere.

    Such a link is not even looked along.
    """
    node: Any = _root(file)
    for part in name.encode().split(b"/"):
        if not isinstance(node, h5py.h5g.GroupID) or not node.links.exists(part):
            raise ValueError(f"/{name} is not in this file itself")
        _refuse_link(node, part, name)
        node = h5py.h5o.open(node, part)
    if not isinstance(node, h5py.h5d.DatasetID):
        raise ValueError(f"/{name} is no dataset")
    return h5py.Dataset(node)


def _root(file: h5py.File) -> h5py.h5g.GroupID:
    return h5py.h5g.open(file.id, b"/")


def _refuse_link(group: h5py.h5g.GroupID, part: bytes, path: str) -> None:
    if group.links.get_info(part).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"/{path} is not in this file itself")


def _is_contiguous(dataset: h5py.Dataset) -> bool:
    return not dataset.is_virtual and not dataset.external and dataset.chunks is None


def _values(file: h5py.File, name: str, dtype: str = "", dims: int | None = None) -> Array:
    """Read all values of a dataset of numbers."""
    dataset = _dataset(file, name)
    if not _is_contiguous(dataset):
        raise ValueError(f"/{name} is no plain dataset")
    kind = dataset.dtype
    if dataset.shape is None or kind.kind not in "fiub" or kind.names or kind.subdtype:
        raise ValueError(f"/{name} has no numbers")
    if (dtype and kind != np.dtype(dtype)) or (dims is not None and dataset.ndim != dims):
        raise ValueError(f"/{name} has {kind} {dataset.shape}")
    if dataset.nbytes > min(dataset.id.get_storage_size(), os.stat(file.filename).st_size):
        raise ValueError(f"/{name} says that it has {dataset.shape} and stores less")
    return np.asarray(dataset[()])


def _datasets_below(file: h5py.File) -> Iterator[tuple[str, Any]]:
    """Yield name and object of all that is no group, also in groups of groups.

    ValueError: there is a link that leads on, or a group twice.
    """
    stack = [("", _root(file))]
    seen = set()
    while stack:
        prefix, group = stack.pop()
        address = h5py.h5o.get_info(group).addr
        if address in seen or prefix.count("/") > _DEEPEST:
            raise ValueError(f"/{prefix} is too deep, or there twice")
        seen.add(address)
        for part in group:
            path = prefix + part.decode()
            _refuse_link(group, part, path)
            node = h5py.h5o.open(group, part)
            if isinstance(node, h5py.h5g.GroupID):
                stack.append((f"{path}/", node))
            else:
                yield path, node


def main() -> int:
    folder = Path(sys.argv[1])
    content = manifest.read(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(folder, content, int(line))), flush=True)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except HpczeroError:
        code = 1
    sys.stdout.flush()
    os._exit(code)  # what HDF5 has in memory may be no good any more
