"""MANIFEST.json, the commit record of a checkpoint: its files, what they hold, their checksums.

A checkpoint exists if its manifest does. Its text is exactly what `text` makes of it, so that not a
bit can change unseen. (docs/checkpoint-format.md)
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_serializer

from hpczero import env
from hpczero.checkpoint import limits, shard_file
from hpczero.checkpoint.shard_file import SLOTS, Damaged, Extent, Newer, open_plain, reading
from hpczero.safe_files import sync, written_durably
from hpczero.text import printable

FORMAT = 4  # the newest that is read
NAME = "MANIFEST.json"
INDEX = "index.h5"
LARGEST_INDEX = 4 << 30  # bytes: it is read whole; 70 million pieces, or buffers
_LONGEST = 32 << 20  # bytes of a manifest: some 130,000 ranks, each with a file of its own
# signs of JSON in such a manifest, that of each rank and of each tensor that missed an update
_MOST_SIGNS = {b"{": 400_000, b"[": 400_000, b'"': 4_000_000, b",": 2_500_000}
_STRUCTURE = 1 << 20  # bytes that HDF5's structure of a shard file has at most
_STRUCTURE_OF_RANK = 64 << 10  # more of them for each rank
_STRUCTURE_OF_SLOT = 1 << 10  # and for each slot of a rank

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Number = Annotated[float, Field(ge=0, lt=1e30)]
_Name = Annotated[str, Field(pattern=r"^[a-z_]{1,64}$")]
_Slot = Annotated[str, Field(pattern=limits.SLOT)]
_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RankData(_Part):
    """A rank's data in a shard file: elements of each slot, where slots and checksums begin."""

    rank: _Count
    elements: _Count
    data: Annotated[list[_Count], Field(min_length=1, max_length=limits.MOST_SLOTS)]
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
    slots: Annotated[list[_Slot], Field(max_length=limits.MOST_SLOTS)] = Field(default_factory=list)
    # of the update, where replicas have states of their own
    update: Annotated[dict[_Name, _Number], Field(max_length=100)] = Field(default_factory=dict)

    @property
    def format(self) -> int:
        """Return the oldest format that can hold this state."""
        if self.update or any(slot.startswith("replica_") for slot in self.slots):
            return 4
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
    if len(pairs) > limits.MOST_TENSORS:
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
    if problem := limits.replicas_problem(content.slots):
        return problem
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
    most += sum(
        _STRUCTURE_OF_RANK + _STRUCTURE_OF_SLOT * len(data.data) + data.extent.checksums_length
        for data in shard.ranks
    )
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
