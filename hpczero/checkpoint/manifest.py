"""MANIFEST.json, the commit record of a checkpoint: its files, what they hold, their checksums.

A checkpoint exists if its manifest does. Its text is exactly what `text` makes of it, so that not a
bit can change unseen. What a checkpoint can hold at all is here too (`problem`).
(docs/checkpoint-format.md)
"""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_serializer

from hpczero import env
from hpczero.checkpoint import shard_file
from hpczero.checkpoint.shard_file import SLOTS, Damaged, Extent, Newer, open_plain, reading
from hpczero.safe_files import sync, written_durably
from hpczero.text import printable

# -- what a checkpoint can hold (pure) -----------------------------------------------------------
# Asked before a run begins, by whoever writes, and by whoever reads what a stranger may have made.

_SIZES = {"float": (64, 32, 16), "int": (64, 32, 16, 8), "uint": (64, 32, 16, 8)}
DTYPES = (*(f"{kind}{bits}" for kind in _SIZES for bits in _SIZES[kind]), "bool")  # of buffers
MOST_DIMENSIONS = 32  # as HDF5 has it
MOST_TENSORS = 250_000  # more than any model has
MOST_BUFFERS = 100_000
LONGEST_TEXT = 16 << 20  # bytes of all names, as JSON
MOST_BYTES_OF_BUFFERS = 2 << 30  # they lie in the index, which is read whole
_LONGEST_NAME = 4096  # bytes
_DEEPEST = 16  # groups in groups
_LONGEST_DIMENSION = 1 << 48
_MOST_ELEMENTS = 1 << 60  # of a tensor: what 64 bits count stays exact
_TAKEN = "__metadata__"  # safetensors has something else under this name

Shape = Sequence[int]


def problem(tensors: Mapping[str, Shape], buffers: Mapping[str, tuple[str, Shape]]) -> str:
    """Return why a checkpoint cannot hold these; empty if it can.

    The names and lengths may be of any type. A buffer has its dtype (`dtype_of`) beside its shape.
    """
    most = {"tensors": (len(tensors), MOST_TENSORS), "buffers": (len(buffers), MOST_BUFFERS)}
    for kind, (count, limit) in most.items():
        if count > limit:
            return f"{count:,} {kind} are more than {limit:,}"
    buffer_shapes = {name: shape for name, (_, shape) in buffers.items()}
    for kind, shapes in (("tensor", tensors), ("buffer", buffer_shapes)):
        for name, shape in shapes.items():
            if (
                wrong := _name_problem(name)
                or _shape_problem(shape)
                or _group_problem(name, shapes)
            ):
                return f"{kind} {_shown(name)}: {wrong}"
    if twice := tensors.keys() & buffers.keys():
        return f"{_shown(min(twice))} is a tensor and a buffer"
    return _buffers_problem(buffers) or _names_problem(tensors, buffers)


def _buffers_problem(buffers: Mapping[str, tuple[str, Shape]]) -> str:
    for name, (dtype, _) in buffers.items():
        if dtype not in DTYPES:
            return f"buffer {_shown(name)}: numbers of type {dtype}"
    size = sum(prod(shape) * np.dtype(dtype).itemsize for dtype, shape in buffers.values())
    if size > MOST_BYTES_OF_BUFFERS:
        return f"its buffers have {size:,} bytes, more than {MOST_BYTES_OF_BUFFERS:,}"
    return ""


def _names_problem(*groups: Collection[str]) -> str:
    size = max(len(json.dumps(list(names))) for names in groups)
    if size > LONGEST_TEXT:
        return f"its names have {size:,} bytes as JSON, more than {LONGEST_TEXT:,}"
    return ""


def dtype_of(values: Any) -> str:
    """Return the dtype of an array, or of what has one like it, in the words of `DTYPES`.

    Numbers that are not in this machine's order of bytes have none of them.
    """
    return str(values.dtype.name if values.dtype.isnative else values.dtype.str)


def _shown(name: Any) -> str:
    return printable(str(name), 100)


def _name_problem(name: Any) -> str:
    wrong = ""
    if not isinstance(name, str) or not name.isprintable() or name == _TAKEN:
        wrong = "it has characters that cannot be seen, or means something else"
    elif any(part in ("", ".", "..") for part in name.split("/")):
        wrong = "it is empty, or is so between two /, or has . or .. there"
    elif name.count("/") >= _DEEPEST or len(name.encode()) > _LONGEST_NAME:
        wrong = f"it has more than {_LONGEST_NAME} bytes, or / more often than {_DEEPEST - 1} times"
    return f"no name for a checkpoint: {wrong}" if wrong else ""


def _shape_problem(shape: Any) -> str:
    if len(shape) > MOST_DIMENSIONS:
        return f"{len(shape)} dimensions, more than {MOST_DIMENSIONS}"
    are_lengths = all(type(length) is int and 0 <= length < _LONGEST_DIMENSION for length in shape)
    if not are_lengths or prod(shape) >= _MOST_ELEMENTS:
        return f"it cannot have the shape {_shown(list(shape))}"
    return ""


def _group_problem(name: str, names: Collection[str]) -> str:
    """Refuse a name that begins with another one and a /: that would be a dataset and a group."""
    parts = name.split("/")
    outer = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return next((f"there cannot be {_shown(other)} too" for other in outer if other in names), "")


# -- the manifest --------------------------------------------------------------------------------

FORMAT = 3  # the newest that is read
MOST_SLOTS = 16
NAME = "MANIFEST.json"
INDEX = "index.h5"
LARGEST_INDEX = 4 << 30  # bytes: it is read whole; 70 million pieces, or buffers
_LONGEST = 32 << 20  # bytes of a manifest: some 130,000 ranks, each with a file of its own
# signs of JSON in such a manifest, that of each rank and of each tensor that missed an update
_MOST_SIGNS = {b"{": 400_000, b"[": 400_000, b'"': 4_000_000, b",": 2_500_000}
_STRUCTURE = 1 << 20  # bytes that HDF5's structure of a shard file has at most
_STRUCTURE_OF_RANK = 64 << 10  # more of them for each rank

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Slot = Annotated[str, Field(pattern=r"^(model|optimizer/[a-z][a-z0-9_]{0,63})$")]
_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RankData(_Part):
    """A rank's data in a shard file: elements of each slot, where slots and checksums begin."""

    rank: _Count
    elements: _Count
    data: Annotated[list[_Count], Field(min_length=1, max_length=MOST_SLOTS)]
    checksums: _Count

    @classmethod
    def of(cls, extent: Extent) -> "RankData":
        data = list(extent.data)
        return cls(
            rank=extent.rank, elements=extent.elements, data=data, checksums=extent.checksums
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

    @classmethod
    def of(
        cls, name: str, extents: Sequence[Extent], size: int = 0, rest: str = "0" * 16
    ) -> "ShardFile":
        return cls(file=name, size=size, rest=rest, ranks=list(map(RankData.of, extents)))

    @classmethod
    def sealed(cls, path: Path, name: str, extents: Sequence[Extent]) -> "ShardFile":
        """Bring a file whose data is written to the disk, and describe it under its final name."""
        return cls.of(name, extents, *shard_file.sealed(path, cls.of(name, extents).ranges()))

    def ranges(self) -> list[shard_file.Range]:
        """Return where the slots of all ranks lie."""
        return [place for data in self.ranks for place in data.extent.ranges()]


class IndexFile(_Part):
    size: Annotated[int, Field(ge=0, le=LARGEST_INDEX)]
    checksum: _Checksum

    @classmethod
    def sealed(cls, path: Path) -> "IndexFile":
        """Bring an index to the disk and describe it."""
        size, checksum = shard_file.sealed(path)
        return cls(size=size, checksum=checksum)


class TrainingState(_Part):
    """The state of training besides tensors.

    `step`: so many steps are done. `updates`: of the weights; a step that overflows has none.
    """

    step: _Count
    updates: _Count
    loss_scale: Annotated[float, Field(gt=0, lt=1e30)]
    good_steps: _Count
    missed: dict[str, _Count] = Field(default_factory=dict)  # tensor -> updates that left it out
    # of which tensors are kept, where they are not those of AdamW
    slots: Annotated[list[_Slot], Field(max_length=MOST_SLOTS)] = Field(default_factory=list)

    @property
    def format(self) -> int:
        """Return the oldest format that can hold this state."""
        if self.slots:
            return 3
        return 2 if self.missed else 1

    @model_serializer(mode="wrap")
    def _as_its_format(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Leave out what format 1 does not have."""
        return {name: value for name, value in serialize(self).items() if value not in ({}, [])}


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
    def slots(self) -> Sequence[str]:
        """The names of what is kept of each tensor, the weights first."""
        return self.state.slots or SLOTS

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.index.size + sum(shard.size for shard in self.shards)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.h5"


def text(content: Content) -> str:
    inner = content.model_dump(mode="json")
    whole = {"content": inner, "checksum": _checksum(inner)}
    return json.dumps(whole, indent=1, sort_keys=True) + "\n"


def commit(
    folder: Path,
    state: TrainingState,
    spec: Mapping[str, Any],
    grid: Mapping[str, int],
    index: IndexFile,
    shards: Sequence[ShardFile],
) -> Content:
    """Make a checkpoint of what the folder has under final names; return its manifest."""
    content = Content(
        format=state.format,
        hpczero=env.VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        state=state,
        spec=dict(spec),
        grid=dict(grid),
        ranks=sum(len(shard.ranks) for shard in shards),
        index=index,
        shards=list(shards),
    )
    write(folder, content)
    return content


def write(folder: Path, content: Content) -> None:
    sync(folder)
    with written_durably(folder / NAME) as file:
        file.write(text(content).encode())


def read(folder: Path) -> Content:
    """Read a manifest.

    Damaged: it is not what was written. Newer: this version does not know its format. Unreadable:
    the file cannot be read.
    """
    path = folder / NAME
    raw = _bytes_of(path)
    try:
        content = _parsed(raw)
        if content.format != content.state.format or text(content).encode() != raw:
            raise Damaged("it is damaged: its checksum does not fit")
        if wrong := _content_problem(content):
            raise Damaged(wrong)
    except ValidationError as error:
        first = error.errors()[0]
        key = printable(".".join(map(str, first["loc"])))
        raise Damaged(f"{path}: it is damaged: {key}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: it is damaged, being no JSON of a manifest") from error
    except (Damaged, Newer) as error:
        raise type(error)(f"{path}: {error}") from error
    return content


def _bytes_of(path: Path) -> bytes:
    with reading(path, open_plain(path)) as file:
        if (length := os.fstat(file).st_size) > _LONGEST:
            raise Damaged(f"{path}: {length:,} bytes are too many for a manifest")
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read()


def _parsed(raw: bytes) -> Content:
    if not raw.isascii() or any(raw.count(sign) > most for sign, most in _MOST_SIGNS.items()):
        raise Damaged("it has more in it than a manifest can have")
    whole = json.loads(raw, object_pairs_hook=_bounded)
    if not isinstance(whole, dict) or not isinstance(inner := whole.get("content"), dict):
        raise Damaged("it is no manifest of a checkpoint")
    version = inner.get("format")
    is_newer = isinstance(version, int) and version > FORMAT
    if is_newer and whole.get("checksum") == _checksum(inner):
        raise Newer(
            f"format {version} was written by a newer hpczero;"
            f" this one reads up to format {FORMAT}: update hpczero"
        )
    return Content.model_validate(inner)


def _bounded(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a table with more keys than any of a manifest has: each would get a message."""
    if len(pairs) > MOST_TENSORS:
        raise ValueError("a table with too many keys")
    return dict(pairs)


def _checksum(inner: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(inner, sort_keys=True).encode())


def _content_problem(content: Content) -> str:
    """Return what does not fit together."""
    updates = content.state.updates
    if any(not 0 < missed <= updates for missed in content.state.missed.values()):
        return f"a tensor has missed none, or more than all, of its {updates} updates"
    if content.slots[0] != SLOTS[0] or len(set(content.slots)) < len(content.slots):
        return "its slots do not begin with the weights, or one is there twice"
    places = {len(data.data) for shard in content.shards for data in shard.ranks}
    if places - {len(content.slots)}:
        return f"it has {len(content.slots)} slots, and a rank has another number of places"
    if len({shard.file for shard in content.shards}) != len(content.shards):
        return "a shard file is named twice"
    ranks = sorted(data.rank for shard in content.shards for data in shard.ranks)
    if len(ranks) != content.ranks or any(rank != number for number, rank in enumerate(ranks)):
        expected = f"ranks 0 to {content.ranks - 1}"
        return f"its shards have the data of {len(ranks)} ranks, not of {expected}"
    wrong = ((shard.file, _shard_problem(shard)) for shard in content.shards)
    return next((f"{name}: {what}" for name, what in wrong if what), "")


def _shard_problem(shard: ShardFile) -> str:
    ranges = shard.ranges()
    most = _STRUCTURE
    most += sum(_STRUCTURE_OF_RANK + data.extent.checksums_length for data in shard.ranks)
    if (other := shard.size - sum(end - begin for begin, end in ranges)) > most:
        return f"{other:,} bytes besides its data, where {most:,} are the most that can be"
    ranges += [
        (data.checksums, data.checksums + data.extent.checksums_length)
        for data in shard.ranks
        if data.extent.blocks
    ]
    ranges.sort()
    if any(begin % shard_file.PAGE for data in shard.ranks if data.elements for begin in data.data):
        return f"data that does not begin at a multiple of {shard_file.PAGE} bytes"
    if any(end > shard.size for _, end in ranges):
        return f"data beyond its {shard.size} bytes"
    if any(before[1] > after[0] for before, after in pairwise(ranges)):
        return "data that overlaps"
    return ""


def elements_of_ranks(shards: Sequence[ShardFile]) -> list[int]:
    """Return the elements of a slot of each rank, in the order of the ranks."""
    ranks = (data for shard in shards for data in shard.ranks)
    return [data.elements for data in sorted(ranks, key=lambda data: data.rank)]


def slot_elements(data: RankData) -> int:
    """Return the elements of a rank's datasets in the file, the padding included."""
    return data.extent.length // shard_file.WIDTH
