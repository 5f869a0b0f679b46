"""The weights of a checkpoint as safetensors: whole tensors, in one file or several with an index, never more in memory than a stretch of one."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from hpczero.checkpoint import manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.progress import Advance
from hpczero.checkpoint.safetensors import (
    Entry,
    SafetensorsFile,
    dtype_of,
    from_float32,
    placed,
    write,
)
from hpczero.checkpoint.shard_file import SLOTS, Array
from hpczero.errors import InputError
from hpczero.safe_files import written_durably
from hpczero.text import printable

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_SOURCE = "hpczero.checkpoint"
BUFFERS = "hpczero.buffers"  # in the metadata: which of the tensors are buffers
WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Export:
    """Of one checkpoint's weights in one dtype. `size`: bytes of data; `overflows`: weights that were finite and have become infinite."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.checkpoint, self.dtype = checkpoint, DTYPES[dtype]
        self.entries = [Entry(tensor.name, self.dtype, tensor.shape) for tensor in checkpoint.table.tensors]
        self.entries += [Entry(name, dtype_of(values), values.shape) for name, values in checkpoint.buffers.items()]
        self.size = sum(entry.end for entry in self.entries)
        self.overflows = 0

    def to_file(self, path: Path, advance: Advance) -> list[Path]:
        _refuse_existing([path])
        self._write(path, self.entries, advance)
        return [path]

    def to_folder(self, folder: Path, largest: int, advance: Advance) -> list[Path]:
        """Files of at most so many bytes of data (a tensor that has more is alone in one); the index comes last."""
        groups = _dealt(self.entries, largest)
        paths = [folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        _refuse_existing([folder / _INDEX])
        _refuse_existing([path for path in paths if not self._began(path)])
        for path, group in zip(paths, groups, strict=True):
            self._write(path, group, advance)
        where = {entry.name: path.name for path, group in zip(paths, groups, strict=True) for entry in group}
        with written_durably(folder / _INDEX) as file:
            file.write(json.dumps({"metadata": {"total_size": self.size}, "weight_map": where}, indent=2).encode() + b"\n")
        return [*paths, folder / _INDEX]

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
        """Return True if an export of this checkpoint to this dtype wrote the file. Without an index
        it was killed, and the same command writes all files anew.
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
        for values in self.checkpoint[f"/{SLOTS[0]}/{entry.name}"].stretches():
            made = from_float32(values, self.dtype)
            if self.dtype != "F32":
                self.overflows += int(np.isfinite(values).sum() - _finite(made, self.dtype))
            yield made


def _finite(values: Array, dtype: str) -> int:
    return int(((values & 0x7F80) != 0x7F80).sum() if dtype == "BF16" else np.isfinite(values).sum())


def _dealt(entries: Sequence[Entry], largest: int) -> list[list[Entry]]:
    """In order, a new file whenever the next tensor has no more room."""
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
            raise InputError(f"{printable(str(path))} exists already and is left as it is: name another one")
