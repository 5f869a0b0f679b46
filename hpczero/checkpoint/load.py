"""Reading a checkpoint, whatever grid wrote it: any rectangle of any tensor, by the piece table.

`Statistics` and `Difference` say what the numbers of tensors are like, in one pass over them.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from math import inf, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from hpczero.checkpoint import index, manifest, shard_file
from hpczero.checkpoint.index import Index
from hpczero.checkpoint.manifest import INDEX, Content
from hpczero.checkpoint.piece_table import Tensor
from hpczero.checkpoint.shard_file import WIDTH, Array, Damaged, open_plain, reading
from hpczero.checkpoint.shards import Shards
from hpczero.errors import InputError
from hpczero.parallel.layout import Slices, rectangles
from hpczero.spec.model import Model
from hpczero.text import printable

LOOP = ".loop/"  # buffers that are none of the model's: no name of a module begins with a point
STRETCH = (32 << 20) // WIDTH  # elements at a time of a tensor that may be larger than memory

Wanted = tuple[int, str, Slices]  # at which element of the output, of which tensor, what


@dataclass
class Run:
    """Wanted rectangles that are read at once.

    They follow each other in the output, from element `at` on, and in a rank's data, from element
    `first` on. A rectangle that lies in several places is a run by itself, of rank -1.
    """

    at: int
    size: int
    rank: int
    first: int
    rectangles: list[Wanted]


class Checkpoint(Mapping[str, "LazyTensor"]):
    """An open checkpoint.

    checkpoint["/model/blocks.0.attention.qkv.weight"][:10] reads what is asked for; `.numpy()`
    and `.torch()` read all of it.
    """

    def __init__(self, folder: Path, content: Content, index: Index) -> None:
        self.folder = folder
        self.content = content
        self.table = index.table
        self.buffers, self.loop = _apart(index.buffers)
        self.identity = index.identity
        self.slots = content.slots
        self.shards = Shards(folder, content)
        self._number = self.table.number

    @classmethod
    def open(cls, folder: str | Path, content: Content | None = None) -> "Checkpoint":
        """Open by the manifest (`content` if it was read already) and the index.

        Damaged: one of them is not what was written. Unreadable: that cannot be told. The view in
        the index is not looked at; `verify` does that.
        """
        folder = Path(folder)
        content = content or manifest.read(folder)
        read = _read_index(folder, content)
        if problem := read.table.problem(manifest.elements_of_ranks(content.shards)):
            raise Damaged(f"{folder / INDEX}: {problem}")
        return cls(folder, content, read)

    @property
    def step(self) -> int:
        return self.content.state.step

    def model(self) -> Model:
        """Return the run's [model]; InputError: this version cannot read it."""
        try:
            return Model.model_validate_json(json.dumps(self.content.spec.get("model")))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(("model", *map(str, first["loc"])))
            raise InputError(
                f"{printable(str(self.folder))}: this version cannot read its [model]: "
                f"{printable(key)}: {first['msg']}; use the version of hpczero that made it"
            ) from error

    def said_by_loop(self) -> dict[str, Any]:
        """Return what a loop of one's own has saved as JSON; {} if none has.

        Damaged: it is none.
        """
        if f"{LOOP}state" not in self.loop:
            return {}
        try:
            return dict(json.loads(self.loop[f"{LOOP}state"].tobytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise Damaged(f"{self.folder}: the state of its loop is no JSON: {error}") from error

    def read(self, slot: int, name: str, wanted: Slices, out: Array | None = None) -> Array:
        """Read a rectangle of a tensor, into `out` if given."""
        number = self._number[name]
        filled = 0
        shape = [cut.stop - cut.start for cut in wanted]
        out = np.empty(shape, np.float32) if out is None else out.reshape(shape)
        for part in self.table.overlaps(number, wanted):
            first, last = _hull(part.shape, part.of_piece)
            target_box: Any = (*part.of_wanted, ...)
            target = out[target_box]
            if last - first == target.size and target.flags.c_contiguous:
                self.shards.read(part.rank, slot, part.offset + first, target.reshape(-1), name)
            else:
                data = np.empty(last - first, np.float32)
                self.shards.read(part.rank, slot, part.offset + first, data, name)
                target[...] = _box_of(data, part.shape, part.of_piece)
            filled += target.size
        if filled != out.size:
            missing = f"{filled} of {out.size} elements of {self.slots[slot]}/{name} are there"
            raise Damaged(f"{self.folder}: {missing}")
        return out

    def runs(self, wanted: Iterable[Wanted]) -> list[Run]:
        """Return how to read this in few goes; it is the same for all slots."""
        runs: list[Run] = []
        for at, name, box in wanted:
            size = _size(box)
            rank, first = self._in_one_place(name, box)
            last = runs[-1] if runs else None
            if (
                last
                and rank == last.rank >= 0
                and at == last.at + last.size
                and first == last.first + last.size
            ):
                last.size += size
                last.rectangles.append((at, name, box))
            else:
                runs.append(Run(at, size, rank, first, [(at, name, box)]))
        return runs

    def _in_one_place(self, name: str, box: Slices) -> tuple[int, int]:
        """Return the rank that has all of a rectangle without a gap, and the first element there.

        (-1, 0) if there is none.
        """
        if part := next(self.table.overlaps(self._number[name], box), None):
            first, last = _hull(part.shape, part.of_piece)
            if last - first == _size(part.of_piece) == _size(box):
                return part.rank, part.offset + first
        return -1, 0

    def read_runs(self, slot: int, runs: Sequence[Run], out: Array) -> None:
        """Read what is wanted into its places in `out`."""
        for run in runs:
            if run.rank >= 0:
                target = out[run.at : run.at + run.size]
                name = run.rectangles[0][1]
                with suppress(Damaged):
                    self.shards.read(run.rank, slot, run.first, target, name)
                    continue
            for at, name, box in run.rectangles:  # one by one, which says what of it is damaged
                self.read(slot, name, box, out[at : at + _size(box)])

    def __getitem__(self, name: str) -> "LazyTensor":
        for slot, prefix in enumerate(self.slots):
            tensor = name.strip("/").removeprefix(f"{prefix}/")
            if tensor in self._number and name.strip("/") != tensor:
                return LazyTensor(self, slot, self.table.tensors[self._number[tensor]])
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (f"/{slot}/{tensor.name}" for slot in self.slots for tensor in self.table.tensors)

    def __len__(self) -> int:
        return len(self.slots) * len(self.table.tensors)

    def close(self) -> None:
        self.shards.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _apart(buffers: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the buffers of the model, and those with the state of a loop of one's own."""
    loop = {name: values for name, values in buffers.items() if name.startswith(LOOP)}
    return {name: values for name, values in buffers.items() if name not in loop}, loop


class LazyTensor:
    """A whole tensor of a checkpoint, of which only what is asked for is read."""

    dtype = np.dtype(np.float32)

    def __init__(self, checkpoint: Checkpoint, slot: int, tensor: Tensor) -> None:
        self.name = tensor.name
        self.shape = tensor.shape
        self._checkpoint = checkpoint
        self._slot = slot

    def __getitem__(self, wanted: Any) -> Array:
        """Index as numpy does.

        Of single rows or ranges of step 1, only these rows are read; anything else reads all.
        """
        rows = wanted[0] if isinstance(wanted, tuple) and wanted else wanted
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self.shape:
            return self.numpy()[wanted]
        start, stop, _ = rows.indices(self.shape[0])
        values = self.read(start, max(start, stop))
        return values[(slice(None), *wanted[1:])] if isinstance(wanted, tuple) else values

    def read(self, start: int, stop: int) -> Array:
        """Read rows of the first dimension."""
        wanted = slice(start, stop), *(slice(0, length) for length in self.shape[1:])
        return self._checkpoint.read(self._slot, self.name, wanted)

    def stretches(
        self, length: int = STRETCH, first: int = 0, last: int | None = None
    ) -> Iterator[Array]:
        """Yield elements first .. last - 1 in memory order, flat, so many at a time.

        How they are cut does not depend on the grid that wrote them.
        """
        last = prod(self.shape) if last is None else last
        for start in range(first, last, length):
            stop = min(start + length, last)
            out = np.empty(stop - start, np.float32)
            filled = 0
            for box in rectangles(self.shape, start, stop):
                count = _size(box)
                self._checkpoint.read(self._slot, self.name, box, out[filled : filled + count])
                filled += count
            yield out

    def numpy(self) -> Array:
        wanted = tuple(slice(0, length) for length in self.shape)
        return self._checkpoint.read(self._slot, self.name, wanted)

    def torch(self) -> Any:
        return import_module("torch").from_numpy(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.numpy().astype(dtype or np.float32, copy=False)


def _read_index(folder: Path, content: Content) -> Index:
    """Read the index, if it is the one that was written."""
    path = folder / INDEX
    written = content.index
    with reading(path, open_plain(path)) as file:
        size = os.fstat(file).st_size
        if (
            size != written.size
            or shard_file.structure_checksum(file, size, ()) != written.checksum
        ):
            differ = f"its {size} bytes are not the {written.size} that were written"
            raise Damaged(f"{path}: it is damaged: {differ}")
        return index.read(path, file)


def _size(box: Slices) -> int:
    return prod(cut.stop - cut.start for cut in box)


def _hull(shape: tuple[int, ...], box: Slices) -> tuple[int, int]:
    """Return the first element of a box in a tensor in memory order, and the one after its last."""
    first = last = 0
    for length, cut in zip(shape, box, strict=True):
        first, last = first * length + cut.start, last * length + cut.stop - 1
    return first, last + 1


def _box_of(data: Array, shape: tuple[int, ...], box: Slices) -> Array:
    """View a box of a tensor of this shape; `data` begins with the box's first element."""
    strides = [data.itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    lengths = [cut.stop - cut.start for cut in box]
    return np.lib.stride_tricks.as_strided(data, lengths, strides, writeable=False)


# -- statistics, in bounded memory and with the same digits whatever grid wrote the tensor -------


@dataclass
class Statistics:
    """Statistics of the finite elements that were added; NaN and infinite ones are counted."""

    count: int = 0
    nan: int = 0
    infinite: int = 0
    minimum: float = inf
    maximum: float = -inf
    mean: float = 0.0
    deviations: float = 0.0  # sum of squares of the distances from the mean
    squares: float = 0.0

    def add(self, values: Array) -> None:
        """Add values, in double precision; parts combine as Chan, Golub and LeVeque (1979) do."""
        finite = np.isfinite(values)
        if not finite.all():
            self.nan += int(np.isnan(values).sum())
            self.infinite += int(np.isinf(values).sum())
            values = values[finite]
        if not len(values):
            return
        exact = values.astype(np.float64)
        mean = float(exact.mean())
        count = self.count + len(exact)
        self.squares += float(np.dot(exact, exact))
        exact -= mean
        distance = mean - self.mean
        between = distance**2 * self.count * len(exact) / count
        self.deviations += float(np.dot(exact, exact)) + between
        self.mean += distance * len(exact) / count
        self.count = count
        self.minimum = min(self.minimum, float(values.min()))
        self.maximum = max(self.maximum, float(values.max()))

    @property
    def norm(self) -> float:
        return sqrt(self.squares)

    @property
    def std(self) -> float:
        return sqrt(self.deviations / self.count) if self.count else 0.0

    def as_data(self) -> dict[str, Any]:
        """Return the figures by name; None where there are no finite elements."""
        named = {
            "norm": self.norm,
            "mean": self.mean,
            "std": self.std,
            "min": self.minimum,
            "max": self.maximum,
        }
        counts = {"nan": self.nan, "inf": self.infinite}
        return {name: value if self.count else None for name, value in named.items()} | counts


@dataclass
class Difference:
    """The difference of two tensors.

    NaN, or the same infinity, in both is no difference; where only one is finite, it is infinite.
    """

    largest: float = 0.0
    squares: float = 0.0
    reference: float = 0.0  # sum of squares of the second one
    differing: int = 0

    def add(self, values: Array, reference: Array) -> None:
        same = (values == reference) | (np.isnan(values) & np.isnan(reference))
        finite = np.where(np.isfinite(reference), reference, 0).astype(np.float64)
        self.reference += float(np.dot(finite, finite))
        if same.all():
            return
        with np.errstate(invalid="ignore"):
            distances = np.abs(values[~same].astype(np.float64) - reference[~same])
        distances[np.isnan(distances)] = inf
        self.differing += len(distances)
        self.largest = max(self.largest, float(distances.max()))
        self.squares += float(np.dot(distances, distances))

    @property
    def relative(self) -> float:
        """Norm of the difference, over that of the second tensor."""
        if not self.squares:
            return 0.0
        return sqrt(self.squares) / sqrt(self.reference) if self.reference else inf
