"""The export of a checkpoint's weights to safetensors files.

Whole tensors, under hpczero's names or others' (`views.py`), in one file or in several with an
index; never more in memory than a stretch, or than the one tensor that is transposed.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from hpczero.checkpoint import manifest
from hpczero.checkpoint.load import STRETCH, Checkpoint, LazyTensor
from hpczero.checkpoint.safetensors import (
    BUFFERS,
    INDEX_NAME,
    WHOLE_NAME,
    Entry,
    SafetensorsFile,
    dtype_of,
    from_float32,
    placed,
    write,
)
from hpczero.checkpoint.shard_file import SLOTS, Advance, Array
from hpczero.checkpoint.views import View, as_they_are, transposed
from hpczero.errors import InputError
from hpczero.safe_files import written_durably
from hpczero.text import printable

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_SOURCE = "hpczero.checkpoint"


class Export:
    """The export of one checkpoint's weights in one dtype.

    `views`: what the files hold; None: the parameters as they are. `size`: bytes of data.
    `overflows`: weights that were finite and have become infinite.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, views: Sequence[View] | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = DTYPES[dtype]
        shapes = {tensor.name: tensor.shape for tensor in checkpoint.table.tensors}
        self._views = {view.name: view for view in views or as_they_are(shapes)}
        self.entries = [Entry(view.name, self.dtype, view.shape) for view in self._views.values()]
        self.entries += [
            Entry(name, dtype_of(values), values.shape)
            for name, values in checkpoint.buffers.items()
        ]
        self.size = sum(entry.end for entry in self.entries)
        self.overflows = 0

    def to_file(self, path: Path, advance: Advance) -> list[Path]:
        in_folder = [path.with_name(INDEX_NAME)] if path.name == WHOLE_NAME else []
        _refuse_existing([path, *in_folder])
        self._write(path, self.entries, advance)
        return [path]

    def to_folder(self, folder: Path, largest: int, advance: Advance) -> list[Path]:
        """Write files of at most so many bytes of data; the index comes last.

        A tensor that has more bytes is alone in a file.
        """
        groups = _groups(self.entries, largest)
        count = len(groups)
        names = [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
        paths = [folder / name for name in names]
        _refuse_existing([folder / INDEX_NAME, folder / WHOLE_NAME])
        _refuse_existing([path for path in paths if not self._began(path)])
        for path, group in zip(paths, groups, strict=True):
            self._write(path, group, advance)
        file_of = {
            entry.name: name for name, group in zip(names, groups, strict=True) for entry in group
        }
        text = json.dumps({"metadata": {"total_size": self.size}, "weight_map": file_of}, indent=2)
        with written_durably(folder / INDEX_NAME) as file:
            file.write(text.encode() + b"\n")
        return [*paths, folder / INDEX_NAME]

    def _write(self, path: Path, group: Sequence[Entry], advance: Advance) -> None:
        buffers = [entry.name for entry in group if entry.name in self.checkpoint.buffers]
        metadata = {
            "format": "pt",
            "hpczero.step": str(self.checkpoint.step),
            _SOURCE: self._source,
            BUFFERS: json.dumps(buffers),
        }
        entries = placed(group)
        write(path, entries, metadata, self._data(entries, advance))

    @cached_property
    def _source(self) -> str:
        """The checkpoint's identity: of its step and all its checksums but those of the blocks."""
        return str(xxhash.xxh3_128_hexdigest(manifest.text(self.checkpoint.content).encode()))

    def _began(self, path: Path) -> bool:
        """Return True if an export of this checkpoint to this dtype wrote the file.

        Without an index it was killed, and the same command writes all files anew.
        """
        try:
            with SafetensorsFile(path) as file:
                dtypes = {e.dtype for e in file.entries if e.name not in self.checkpoint.buffers}
                return file.metadata.get(_SOURCE) == self._source and dtypes <= {self.dtype}
        except InputError:
            return False

    def _data(self, entries: Sequence[Entry], advance: Advance) -> Iterator[Array]:
        for entry in entries:
            for values in self._stretches(entry):
                yield values
                advance(values.nbytes)

    def _stretches(self, entry: Entry) -> Iterator[Array]:
        if entry.name in self.checkpoint.buffers:
            yield self.checkpoint.buffers[entry.name].reshape(-1)
            return
        for values in self._floats(self._views[entry.name]):
            rounded = from_float32(values, self.dtype)
            if self.dtype != "F32":
                self.overflows += int(np.isfinite(values).sum() - _finite(rounded, self.dtype))
            yield rounded

    def _floats(self, view: View) -> Iterator[Array]:
        if not view.transposed:
            for part in view.parts:
                yield from self._parameter(part.parameter).stretches(STRETCH, part.start, part.stop)
            return
        (part,) = view.parts
        rows, columns = view.shape
        yield from transposed(
            self._parameter(part.parameter).numpy().reshape(columns, rows), STRETCH
        )

    def _parameter(self, name: str) -> LazyTensor:
        return self.checkpoint[f"/{SLOTS[0]}/{name}"]


def _finite(values: Array, dtype: str) -> int:
    is_finite = (values & 0x7F80) != 0x7F80 if dtype == "BF16" else np.isfinite(values)
    return int(is_finite.sum())


def _groups(entries: Sequence[Entry], largest: int) -> list[list[Entry]]:
    """Deal entries to files in order; a new file begins when the next tensor has no more room."""
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = entry.end - entry.begin
        if groups[-1] and filled + size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    return groups


def _refuse_existing(paths: Sequence[Path]) -> None:
    for path in paths:
        if os.path.lexists(path):
            name = printable(str(path))
            raise InputError(f"{name} exists already and is left as it is: name another one")
