"""MANIFEST.json, the commit record of a checkpoint: which files belong to it, what they hold, and their checksums (docs/checkpoint-format.md).

A checkpoint exists if its manifest does. Its text is exactly what `text` makes of it, so that not a bit can change unseen.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from hpczero.checkpoint.shard_file import (
    PAGE,
    SLOTS,
    WIDTH,
    Damaged,
    Extent,
    Newer,
    not_read,
    open_plain,
    padded,
)
from hpczero.safe_files import sync, written_durably
from hpczero.text import printable

# What a checkpoint can hold (pure): asked before a run begins, by whoever writes, and by whoever reads what a stranger may have written.
DTYPES = (
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
)  # of buffers
MOST_DIMENSIONS = 32  # as HDF5 has it
MOST_TENSORS, MOST_BUFFERS = 250_000, 100_000  # what can be meant
LONGEST_TEXT = 16 << 20  # bytes of all names, as JSON
MOST_BYTES_OF_BUFFERS = 2 << 30  # they lie in the index, which is read whole
_LONGEST_NAME, _DEEPEST = 4096, 16  # bytes; groups in groups
_LONGEST_DIMENSION, _MOST_ELEMENTS = (
    1 << 48,
    1 << 60,
)  # of a dimension; of a tensor: what 64 bits count stays exact
_TAKEN = "__metadata__"  # safetensors has something else under this name

Shape = Sequence[int]


def problem(tensors: Mapping[str, Shape], buffers: Mapping[str, tuple[str, Shape]]) -> str:
    """Why a checkpoint cannot hold these, of whatever types the names and lengths are; empty if it can. Of buffers also the dtype (`dtype_of`)."""
    for kind, count, most in (
        ("tensors", len(tensors), MOST_TENSORS),
        ("buffers", len(buffers), MOST_BUFFERS),
    ):
        if count > most:
            return f"{count:,} {kind} are more than {most:,}"
    shapes = {name: shape for name, (_, shape) in buffers.items()}
    for kind, those in (("tensor", tensors), ("buffer", shapes)):
        for name, shape in those.items():
            if wrong := _of_name(name) or _of_shape(shape) or _of_groups(name, those):
                return f"{kind} {_shown(name)}: {wrong}"
    if twice := tensors.keys() & buffers.keys():
        return f"{_shown(min(twice))} is a tensor and a buffer"
    return _of_buffers(buffers) or _of_texts(tensors, buffers)


def _of_buffers(buffers: Mapping[str, tuple[str, Shape]]) -> str:
    for name, (dtype, _) in buffers.items():
        if dtype not in DTYPES:
            return f"buffer {_shown(name)}: numbers of type {dtype}"
    size = sum(prod(shape) * np.dtype(dtype).itemsize for dtype, shape in buffers.values())
    if size > MOST_BYTES_OF_BUFFERS:
        return f"its buffers have {size:,} bytes, more than {MOST_BYTES_OF_BUFFERS:,}"
    return ""


def _of_texts(*those: Collection[str]) -> str:
    size = max(len(json.dumps(list(names))) for names in those)
    if size > LONGEST_TEXT:
        return f"its names have {size:,} bytes as JSON, more than {LONGEST_TEXT:,}"
    return ""


def dtype_of(values: Any) -> str:
    """Return the dtype of an array, or of what has one like it, in the words of `DTYPES`.

    What is not in this machine's order of bytes is none of them.
    """
    return str(values.dtype.name if values.dtype.isnative else values.dtype.str)


def _shown(name: Any) -> str:
    return printable(str(name), 100)


def _of_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or name == _TAKEN:
        return "no name for a checkpoint: it has characters that cannot be seen, or means something else"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "no name for a checkpoint: it is empty, or is so between two /, or has . or .. there"
    if len(parts) > _DEEPEST or len(name.encode()) > _LONGEST_NAME:
        return f"no name for a checkpoint: it has more than {_LONGEST_NAME} bytes, or / more often than {_DEEPEST - 1} times"
    return ""


def _of_shape(shape: Any) -> str:
    if len(shape) > MOST_DIMENSIONS:
        return f"{len(shape)} dimensions, more than {MOST_DIMENSIONS}"
    if (
        not all(type(length) is int and 0 <= length < _LONGEST_DIMENSION for length in shape)
        or prod(shape) >= _MOST_ELEMENTS
    ):
        return f"it cannot have the shape {_shown(list(shape))}"
    return ""


def _of_groups(name: str, names: Collection[str]) -> str:
    """A name that is the beginning of another one would be a dataset and a group."""
    parts = name.split("/")
    outer = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return next((f"there cannot be {_shown(other)} too" for other in outer if other in names), "")


FORMAT = 2  # the newest that is read
NAME = "MANIFEST.json"
INDEX = "index.h5"
_LONGEST = 32 << 20  # bytes of a manifest: some 130,000 ranks, each with a file of its own
# signs of JSON in such a manifest, that of each rank and of each tensor that missed an update
_MOST_SIGNS = {b"{": 400_000, b"[": 400_000, b'"': 4_000_000, b",": 2_500_000}
LARGEST_INDEX = 4 << 30  # bytes: it is read whole; 70 million pieces, or buffers
_STRUCTURE = (
    1 << 20,
    64 << 10,
)  # bytes that HDF5's structure of a shard file has at most: in all, and for each rank

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RankData(_Part):
    """A rank's data in a shard file: elements of each slot, where the slots and their checksums begin."""

    rank: _Count
    elements: _Count
    data: Annotated[list[_Count], Field(min_length=len(SLOTS), max_length=len(SLOTS))]
    checksums: _Count

    @classmethod
    def of(cls, extent: Extent) -> "RankData":
        return cls(
            rank=extent.rank,
            elements=extent.elements,
            data=list(extent.data),
            checksums=extent.checksums,
        )

    @property
    def extent(self) -> Extent:
        return Extent(self.rank, self.elements, tuple(self.data), self.checksums)


class ShardFile(_Part):
    """`rest`: the checksum of every byte that is not a slot of a rank."""

    file: Annotated[str, Field(pattern=r"^shard-[0-9]{5,9}\.h5$")]
    size: _Count
    rest: _Checksum
    ranks: Annotated[list[RankData], FailFast()]


class IndexFile(_Part):
    size: Annotated[int, Field(ge=0, le=LARGEST_INDEX)]
    checksum: _Checksum


class TrainingState(_Part):
    """What there is besides tensors. `step`: so many steps are done; `updates`: of the weights, which a step with an overflow does not change."""

    step: _Count
    updates: _Count
    loss_scale: Annotated[float, Field(gt=0, lt=1e30)]
    good_steps: _Count
    missed: dict[str, _Count] = Field(default_factory=dict)  # tensor -> updates that left it out

    @property
    def format(self) -> int:
        """Return the oldest format that can hold this state."""
        return 2 if self.missed else 1

    @model_serializer(mode="wrap")
    def _as_its_format(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what format 1 does not have."""
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value != {}}


class Content(_Part):
    format: int
    hpczero: str
    created: str
    state: TrainingState
    spec: dict[str, Any]
    grid: dict[str, int]  # axis -> ranks
    ranks: _Count
    index: IndexFile
    shards: Annotated[list[ShardFile], FailFast()]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.index.size + sum(shard.size for shard in self.shards)


def text(content: Content) -> str:
    inner = content.model_dump(mode="json")
    return (
        json.dumps({"content": inner, "checksum": _checksum(inner)}, indent=1, sort_keys=True)
        + "\n"
    )


def write(folder: Path, content: Content) -> None:
    """The commit: what the folder has under final names becomes a checkpoint."""
    sync(folder)
    with written_durably(folder / NAME) as file:
        file.write(text(content).encode())


def read(folder: Path) -> Content:
    """Damaged: the manifest is not what was written; Newer: it is of a format that this version does not know."""
    path = folder / NAME
    raw = _bytes_of(path)
    try:
        content = _parsed(raw)
        if content.format != content.state.format or text(content).encode() != raw:
            raise Damaged("it is damaged: its checksum does not fit")
        if problem := _problem(content):
            raise Damaged(problem)
    except ValidationError as error:
        first = error.errors()[0]
        raise Damaged(
            f"{path}: it is damaged: {printable('.'.join(map(str, first['loc'])))}: {first['msg']}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: it is damaged, being no JSON of a manifest") from error
    except (Damaged, Newer) as error:
        raise type(error)(f"{path}: {error}") from error
    return content


def _bytes_of(path: Path) -> bytes:
    file = open_plain(path)
    with os.fdopen(file, "rb") as opened:
        if (length := os.fstat(file).st_size) > _LONGEST:
            raise Damaged(f"{path}: {length:,} bytes are too many for a manifest")
        try:
            return opened.read()
        except OSError as error:
            raise not_read(path, error) from error


def _parsed(raw: bytes) -> Content:
    if not raw.isascii() or any(raw.count(sign) > most for sign, most in _MOST_SIGNS.items()):
        raise Damaged("it has more in it than a manifest can have")
    whole = json.loads(raw, object_pairs_hook=_bounded)
    if not isinstance(whole, dict) or not isinstance(whole.get("content"), dict):
        raise Damaged("it is no manifest of a checkpoint")
    found = whole["content"].get("format")
    if (
        isinstance(found, int)
        and found > FORMAT
        and whole.get("checksum") == _checksum(whole["content"])
    ):
        raise Newer(
            f"format {found} was written by a newer hpczero; this one reads up to format {FORMAT}: update hpczero"
        )
    return Content.model_validate(whole["content"])


def _bounded(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a table with more keys than any of a manifest has: each would get a message."""
    if len(pairs) > MOST_TENSORS:
        raise ValueError("a table with too many keys")
    return dict(pairs)


def _checksum(inner: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(inner, sort_keys=True).encode())


def _problem(content: Content) -> str:
    """What does not fit together."""
    if any(not 0 < missed <= content.state.updates for missed in content.state.missed.values()):
        return f"a tensor has missed none, or more than all, of its {content.state.updates} updates"
    if len({shard.file for shard in content.shards}) != len(content.shards):
        return "a shard file is named twice"
    ranks = sorted(data.rank for shard in content.shards for data in shard.ranks)
    if len(ranks) != content.ranks or any(rank != number for number, rank in enumerate(ranks)):
        return (
            f"its shards have the data of {len(ranks)} ranks, not of ranks 0 to {content.ranks - 1}"
        )
    return next(
        (f"{shard.file}: {problem}" for shard in content.shards if (problem := _of_shard(shard))),
        "",
    )


def _of_shard(shard: ShardFile) -> str:
    ranges = [place for data in shard.ranks for place in data.extent.ranges()]
    of_file, of_rank = _STRUCTURE
    most = of_file + sum(of_rank + 8 * len(SLOTS) * data.extent.blocks for data in shard.ranks)
    if (other := shard.size - sum(end - begin for begin, end in ranges)) > most:
        return f"{other:,} bytes besides its data, where {most:,} are the most that can be"
    ranges += [
        (data.checksums, data.checksums + 8 * len(SLOTS) * data.extent.blocks)
        for data in shard.ranks
        if data.extent.blocks
    ]
    ranges.sort()
    if any(begin % PAGE for data in shard.ranks if data.elements for begin in data.data):
        return f"data that does not begin at a multiple of {PAGE} bytes"
    if any(end > shard.size for _, end in ranges):
        return f"data beyond its {shard.size} bytes"
    if any(before[1] > after[0] for before, after in pairwise(ranges)):
        return "data that overlaps"
    return ""


def elements_of_ranks(shards: Sequence[ShardFile]) -> list[int]:
    """In the order of the ranks."""
    return [
        data.elements
        for data in sorted(
            (data for shard in shards for data in shard.ranks), key=lambda data: data.rank
        )
    ]


def slot_elements(data: RankData) -> int:
    """Of a rank's datasets in the file: with the padding."""
    return padded(data.elements * WIDTH) // WIDTH
