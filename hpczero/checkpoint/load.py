"""Reading a checkpoint, whatever grid wrote it: any rectangle of any tensor, through the piece table."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from math import inf, prod, sqrt
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hpczero.checkpoint import index, manifest, shard_file
from hpczero.checkpoint.index import Index
from hpczero.checkpoint.manifest import INDEX, Content
from hpczero.checkpoint.piece_table import Tensor
from hpczero.checkpoint.shard_file import SLOTS, WIDTH, Array, Damaged, not_read, open_plain
from hpczero.checkpoint.shards import Shards
from hpczero.parallel.layout import Slices, rectangles

STRETCH = (
    32 << 20
) // WIDTH  # elements that are taken at a time of a tensor that may be larger than memory

Wanted = tuple[int, str, Slices]  # from which element on, of which tensor, what


@dataclass
class Run:
    """Rectangles of tensors that follow each other where they are wanted, from element `at` on, and in a rank's data, from element `first` on; or one
    that lies in several places (rank -1). Each with where it is wanted.
    """

    at: int
    size: int
    rank: int
    first: int
    rectangles: list[Wanted]


class Checkpoint(Mapping[str, "Lazy"]):
    """An open checkpoint; Damaged if what is always read of it (all but the data) is not what was written, Unreadable if that cannot be told.

    checkpoint["/model/blocks.0.attention.query.weight"][:10] reads what is asked for; `.numpy()` and `.torch()` all of it.
    """

    def __init__(self, folder: Path, content: Content, found: Index) -> None:
        self.folder, self.content = folder, content
        self.table, self.buffers, self.identity = found.table, found.buffers, found.identity
        self.shards = Shards(folder, content)
        self._number = self.table.number

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """By the manifest and the piece table alone; `verify` also looks at the view."""
        folder = Path(folder)
        content = manifest.read(folder)
        found = _index(folder, content)
        if problem := found.table.problem(manifest.elements_of_ranks(content.shards)):
            raise Damaged(f"{folder / INDEX}: {problem}")
        return cls(folder, content, found)

    @property
    def step(self) -> int:
        return self.content.state.step

    def read(self, slot: int, name: str, wanted: Slices, out: Array | None = None) -> Array:
        """A rectangle of a tensor, in `out` if given."""
        number, found = self._number[name], 0
        shape = [cut.stop - cut.start for cut in wanted]
        out = np.empty(shape, np.float32) if out is None else out.reshape(shape)
        for part in self.table.parts(number, wanted):
            there: Any = (*part.of_wanted, ...)
            (first, last), target = _hull(part.shape, part.of_piece), out[there]
            if last - first == target.size and target.flags.c_contiguous:
                self.shards.read(part.rank, slot, part.offset + first, target.reshape(-1), name)
            else:
                data = np.empty(last - first, np.float32)
                self.shards.read(part.rank, slot, part.offset + first, data, name)
                target[...] = _cut(data, part.shape, part.of_piece, first)
            found += target.size
        if found != out.size:
            raise Damaged(
                f"{self.folder}: {found} of {out.size} elements of {SLOTS[slot]}/{name} are there"
            )
        return out

    def runs(self, wanted: Iterable[Wanted]) -> list[Run]:
        """How this is read in few goes; the same for all slots."""
        found: list[Run] = []
        for at, name, box in wanted:
            size = _size(box)
            rank, first = self._in_one_place(name, box)
            last = found[-1] if found else None
            if (
                last
                and rank >= 0
                and (at, rank, first) == (last.at + last.size, last.rank, last.first + last.size)
            ):
                last.size += size
                last.rectangles.append((at, name, box))
            else:
                found.append(Run(at, size, rank, first, [(at, name, box)]))
        return found

    def _in_one_place(self, name: str, box: Slices) -> tuple[int, int]:
        """Rank and first element, if one rank has all of it without a gap."""
        if part := next(self.table.parts(self._number[name], box), None):
            first, last = _hull(part.shape, part.of_piece)
            if last - first == _size(part.of_piece) == _size(box):
                return part.rank, part.offset + first
        return -1, 0

    def read_runs(self, slot: int, runs: Sequence[Run], out: Array) -> None:
        """What is wanted, at its places in `out`."""
        for run in runs:
            if run.rank >= 0:
                with suppress(Damaged):
                    self.shards.read(
                        run.rank,
                        slot,
                        run.first,
                        out[run.at : run.at + run.size],
                        run.rectangles[0][1],
                    )
                    continue
            for at, name, box in run.rectangles:  # one by one, which says what of it is damaged
                self.read(slot, name, box, out[at : at + _size(box)])

    def __getitem__(self, name: str) -> "Lazy":
        for slot, prefix in enumerate(SLOTS):
            tensor = name.strip("/").removeprefix(f"{prefix}/")
            if tensor in self._number and name.strip("/") != tensor:
                return Lazy(self, slot, self.table.tensors[self._number[tensor]])
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (f"/{slot}/{tensor.name}" for slot in SLOTS for tensor in self.table.tensors)

    def __len__(self) -> int:
        return len(SLOTS) * len(self.table.tensors)

    def close(self) -> None:
        self.shards.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Lazy:
    """A whole tensor of a checkpoint, of which only what is asked for is read."""

    dtype = np.dtype(np.float32)

    def __init__(self, checkpoint: Checkpoint, slot: int, tensor: Tensor) -> None:
        self._checkpoint, self._slot, self.name, self.shape = (
            checkpoint,
            slot,
            tensor.name,
            tensor.shape,
        )

    def __getitem__(self, wanted: Any) -> Array:
        """As numpy's; rows, or stretches of step 1, are read alone, anything else is taken from the whole rows."""
        rows = wanted[0] if isinstance(wanted, tuple) and wanted else wanted
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self.shape:
            return self.numpy()[wanted]
        start, stop, _ = rows.indices(self.shape[0])
        part = self.read(start, max(start, stop))
        return part[(slice(None), *wanted[1:])] if isinstance(wanted, tuple) else part

    def read(self, start: int, stop: int) -> Array:
        """Rows of the first dimension."""
        wanted = slice(start, stop), *(slice(0, length) for length in self.shape[1:])
        return self._checkpoint.read(self._slot, self.name, wanted)

    def stretches(self, length: int = STRETCH) -> Iterator[Array]:
        """All elements in memory order, flat, so many at a time: how they are cut does not depend on the grid that wrote them."""
        size = prod(self.shape)
        for start in range(0, size, length):
            stop = min(start + length, size)
            out, filled = np.empty(stop - start, np.float32), 0
            for box in rectangles(self.shape, start, stop):
                count = prod(cut.stop - cut.start for cut in box)
                self._checkpoint.read(self._slot, self.name, box, out[filled : filled + count])
                filled += count
            yield out

    def numpy(self) -> Array:
        return self._checkpoint.read(
            self._slot, self.name, tuple(slice(0, length) for length in self.shape)
        )

    def torch(self) -> Any:
        return import_module("torch").from_numpy(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.numpy().astype(dtype or np.float32, copy=False)


def _index(folder: Path, content: Content) -> Index:
    """Read the index, if it is the one that was written."""
    path = folder / INDEX
    file = open_plain(path)
    try:
        size = os.fstat(file).st_size
        if size != content.index.size or shard_file.rest(file, size, ()) != content.index.checksum:
            written = content.index.size
            raise Damaged(
                f"{path}: it is damaged: its {size} bytes are not the {written} that were written"
            )
        return index.read(path, file)
    except OSError as error:
        raise not_read(path, error) from error
    finally:
        os.close(file)


def _size(box: Slices) -> int:
    return prod(cut.stop - cut.start for cut in box)


def _hull(shape: tuple[int, ...], box: Slices) -> tuple[int, int]:
    """The first element of a box in a tensor in memory order, and the one behind its last."""
    first = last = 0
    for length, cut in zip(shape, box, strict=True):
        first, last = first * length + cut.start, last * length + cut.stop - 1
    return first, last + 1


def _cut(data: Array, shape: tuple[int, ...], box: Slices, first: int) -> Array:
    """The box, from the elements of the tensor from `first` on."""
    strides = [data.itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return np.lib.stride_tricks.as_strided(
        data, [cut.stop - cut.start for cut in box], strides, writeable=False
    )


# What the numbers of a tensor are like, in one pass over it: bounded memory, and the same digits whatever grid wrote it.
@dataclass
class Statistics:
    """Of the finite elements that were added; NaN and infinite ones are counted."""

    count: int = 0
    nan: int = 0
    infinite: int = 0
    minimum: float = inf
    maximum: float = -inf
    mean: float = 0.0
    deviations: float = 0.0  # sum of squares of the distances from the mean
    squares: float = 0.0

    def add(self, values: Array) -> None:
        """Sums in double precision; those of parts are put together as Chan, Golub and LeVeque (1979) do."""
        finite = np.isfinite(values)
        if not finite.all():
            self.nan += int(np.isnan(values).sum())
            self.infinite += int(np.isinf(values).sum())
            values = values[finite]
        if not len(values):
            return
        exact = values.astype(np.float64)
        mean, count = float(exact.mean()), self.count + len(exact)
        self.squares += float(np.dot(exact, exact))
        exact -= mean
        distance = mean - self.mean
        self.deviations += (
            float(np.dot(exact, exact)) + distance**2 * self.count * len(exact) / count
        )
        self.mean += distance * len(exact) / count
        self.count = count
        self.minimum, self.maximum = (
            min(self.minimum, float(values.min())),
            max(self.maximum, float(values.max())),
        )

    @property
    def norm(self) -> float:
        return sqrt(self.squares)

    @property
    def std(self) -> float:
        return sqrt(self.deviations / self.count) if self.count else 0.0

    def as_data(self) -> dict[str, Any]:
        """None: of nothing finite there is no mean."""
        named = {
            "norm": self.norm,
            "mean": self.mean,
            "std": self.std,
            "min": self.minimum,
            "max": self.maximum,
        }
        return {name: value if self.count else None for name, value in named.items()} | {
            "nan": self.nan,
            "inf": self.infinite,
        }


@dataclass
class Difference:
    """Of two tensors. What is NaN, or the same infinity, in both is no difference; where only one is finite, it is infinite."""

    largest: float = 0.0
    squares: float = 0.0
    reference: float = 0.0  # sum of squares of the second one
    differing: int = 0

    def add(self, values: Array, reference: Array) -> None:
        same = (values == reference) | (np.isnan(values) & np.isnan(reference))
        self.reference += float(
            np.dot(
                clean := np.where(np.isfinite(reference), reference, 0).astype(np.float64), clean
            )
        )
        if same.all():
            return
        with np.errstate(invalid="ignore"):
            apart = np.abs(values[~same].astype(np.float64) - reference[~same])
        apart[np.isnan(apart)] = inf
        self.differing += len(apart)
        self.largest = max(self.largest, float(apart.max()))
        self.squares += float(np.dot(apart, apart))

    @property
    def relative(self) -> float:
        """Norm of the difference, over that of the second tensor."""
        if not self.squares:
            return 0.0
        return sqrt(self.squares) / sqrt(self.reference) if self.reference else inf
