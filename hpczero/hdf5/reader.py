"""Untrusted HDF5 files, which a stranger may have made, read without the HDF5 library.

That library trusts what a file says about itself: a crafted file makes it write over the memory
of the process. hpczero needs little of the format: groups, datasets that lie in one piece in the
file, and attributes, in the structures that HDF5 writes by default ("earliest"). They are read
here, each number checked against the file's size before it is used. What has another structure is
`NotPlain`. (HDF5 File Format Specification 3.0, sections II to IV; superblocks 0 and 1, symbol
tables, object headers of version 1.)
"""

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hpczero.safe_files import read_at

# Datatype and dataspace messages of an HDF5 file, turned into numpy's dtypes and shapes (pure).
#
# Only what hpczero writes is known: whole numbers, IEEE floats, bool as h5py stores it, and text of
# attributes. Anything else is `NotPlain`.
_FLOATS = {2: (10, 5, 15), 4: (23, 8, 127), 8: (52, 11, 1023)}  # mantissa, exponent, bias
_INTEGER, _FLOAT, _TEXT, _ENUM, _VARIABLE = 0, 1, 3, 8, 9  # classes of datatypes
_MOST_DIMENSIONS = 64  # dimensions that a shape may have


class NotPlain(ValueError):
    """The file does not have the structure that hpczero gives its files."""


def unpacked(layout: str, raw: bytes, offset: int = 0) -> tuple[Any, ...]:
    """Unpack numbers as `struct` does. NotPlain: there are too few bytes."""
    try:
        return struct.unpack_from(layout, raw, offset)
    except struct.error as error:
        raise NotPlain(f"a structure that ends too soon: {error}") from error


@dataclass(frozen=True)
class Kind:
    """A datatype. `dtype` is None for text, of fixed length or (`is_variable`) stored elsewhere."""

    dtype: np.dtype | None
    size: int
    is_variable: bool = False


def shape_of(raw: bytes) -> tuple[int, ...]:
    """Return the dimensions in a dataspace message; () for a single value."""
    version, rank, _, sort = unpacked("<BBBB", raw)
    if version not in (1, 2) or rank > _MOST_DIMENSIONS or (version == 2 and sort > 1):
        raise NotPlain(f"a dataspace of version {version} with {rank} dimensions")
    return unpacked(f"<{rank}Q", raw, 8 if version == 1 else 4)


def kind_of(raw: bytes) -> Kind:
    """Return the kind that a datatype message describes."""
    first, *bits, size = unpacked("<B3BI", raw)
    version, sort = first >> 4, first & 15
    if version not in (1, 2, 3, 4, 5):
        raise NotPlain(f"a datatype of version {version}")
    if sort == _TEXT:
        return Kind(None, size)
    if sort == _VARIABLE and bits[0] & 15 == 1:
        return Kind(None, size, is_variable=True)
    order = ">" if bits[0] & 1 else "<"
    if sort == _INTEGER:
        return Kind(np.dtype(_integer(raw, order, "i" if bits[0] & 8 else "u", size)), size)
    if sort == _FLOAT and not bits[0] & 64:
        return Kind(np.dtype(_float(raw, order, size)), size)
    if sort == _ENUM and _is_bool(raw, bits[0] | bits[1] << 8, version):
        return Kind(np.dtype(bool), 1)
    raise NotPlain(f"values of class {sort} and {size} bytes, which are no numbers")


def _integer(raw: bytes, order: str, sign: str, size: int) -> str:
    offset, precision = unpacked("<HH", raw, 8)
    if size not in (1, 2, 4, 8) or offset or precision != 8 * size:
        raise NotPlain(f"whole numbers of {precision} bits in {size} bytes")
    return f"{order}{sign}{size}"


def _float(raw: bytes, order: str, size: int) -> str:
    described = unpacked("<HHBBBBI", raw, 8)
    mantissa, exponent, bias = _FLOATS.get(size, (0, 0, 0))
    sign = raw[2]
    if size not in _FLOATS or sign != 8 * size - 1:
        raise NotPlain(f"floats of {size} bytes")
    if described != (0, 8 * size, mantissa, exponent, 0, mantissa, bias):
        raise NotPlain(f"floats of {size} bytes that are not IEEE's")
    return f"{order}f{size}"


def _is_bool(raw: bytes, members: int, version: int) -> bool:
    """Return True for h5py's bool: an enumeration of FALSE = 0 and TRUE = 1 in int8."""
    base = raw[8:20]
    names = b"FALSE\0TRUE\0" if version > 2 else b"FALSE\0\0\0TRUE\0\0\0\0"
    if members != 2 or len(base) < 12 or base[0] & 15 != _INTEGER:
        return False
    is_int8 = kind_of(base).dtype == np.dtype("i1")
    return is_int8 and raw[20 : 20 + len(names) + 2] == names + b"\0\1"


_NOWHERE = (1 << 64) - 1  # the address of what is not stored
_MOST_STRUCTURE = 64 << 20  # bytes of structure that are looked at in a file
_DEEPEST, _LONGEST_NAME = 32, 4096  # groups in groups; bytes
_HARD = (0, 1)  # cache types of links that lead to an object; 2 is a soft link
_SPACE, _LINK_INFO, _TYPE, _LINK, _EXTERNAL, _LAYOUT = 0x1, 0x2, 0x3, 0x6, 0x7, 0x8
_FILTERS, _ATTRIBUTE, _CONTINUED, _SYMBOLS, _ATTRIBUTE_INFO = 0xB, 0xC, 0x10, 0x11, 0x15
_LINKS_OF_NEWER_GROUPS = (_LINK_INFO, _LINK)
_CONTIGUOUS = 1
_SHARED = 2  # flag of a message that lies elsewhere

Value = int | float | str
Message = tuple[int, bytes]  # type and content


@dataclass(frozen=True)
class Dataset:
    """A place in the file where values lie in one piece."""

    dtype: np.dtype
    shape: tuple[int, ...]
    place: int
    name: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class UntrustedFile:
    """An open file; the descriptor stays the caller's. NotPlain: it cannot be one of hpczero's.

    OSError: it cannot be read.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._left, self._values_left = _MOST_STRUCTURE, self.size
        head = self._read(0, 96, "superblock")
        if head[:8] != b"\x89HDF\r\n\x1a\n":
            raise NotPlain("no HDF5 file, or one that does not begin with its signature")
        if head[8] > 1 or head[13:15] != b"\x08\x08":
            raise NotPlain(f"a superblock of version {head[8]}: h5py's default libver writes 0")
        places = 24 if head[8] == 0 else 28
        base, _, end, _, _, self._root = unpacked("<6Q", head, places)
        if base:
            raise NotPlain(f"an HDF5 file that begins at byte {base:,} of the file")
        if end > self.size:
            raise NotPlain(f"it ends at byte {self.size:,}, and should at {end:,}")

    # -- what there is -----------------------------------------------------------------------------

    def names(self, path: str = "") -> list[str]:
        """Return the names in a group; [] if there is no group of that name."""
        try:
            return list(self._links(self._address(path, "group"), path))
        except _Missing:
            return []

    def dataset(self, path: str) -> Dataset:
        return _dataset(self._messages(self._address(path, "dataset")), path, self.size)

    def datasets_below(self, path: str) -> Iterator[tuple[str, Dataset]]:
        """Yield all in a group and in groups in it, by their names below it."""
        try:
            stack = [("", self._address(path, "group"))]
        except _Missing:
            return
        seen = set()
        while stack:
            prefix, address = stack.pop()
            if address in seen or prefix.count("/") > _DEEPEST:
                raise NotPlain(f"/{path}/{prefix} is too deep, or there twice")
            seen.add(address)
            for name, inner in self._links(address, path).items():
                messages = self._messages(inner)
                if any(kind == _LAYOUT for kind, _ in messages):
                    yield prefix + name, _dataset(messages, f"{path}/{prefix}{name}", self.size)
                else:
                    stack.append((f"{prefix}{name}/", inner))

    def values(self, dataset: Dataset) -> np.ndarray:
        """Read a dataset into new memory; all calls together read no more than the file has."""
        self._values_left -= dataset.nbytes
        if self._values_left < 0:
            raise NotPlain(f"/{dataset.name} lies where other values lie")
        values = np.empty(dataset.shape, dataset.dtype)
        room = values.reshape(-1).view(np.uint8).data
        count = read_at(self._descriptor, room, dataset.place)
        if count < values.nbytes:
            raise NotPlain(f"/{dataset.name} ends at byte {dataset.place + count:,}")
        if values.dtype == bool and values.size and values.view(np.uint8).max() > 1:
            raise NotPlain(f"/{dataset.name} has values that are neither true nor false")
        return values

    @cached_property
    def attributes(self) -> dict[str, Value | None]:
        """The attributes of the root; None for anything but a single number or text."""
        attributes: dict[str, Value | None] = {}
        for kind, content in self._messages(self._root):
            if kind == _ATTRIBUTE:
                name, value = self._attribute(content)
                attributes[name] = value
            if kind == _ATTRIBUTE_INFO:
                raise NotPlain("attributes in a heap of their own: h5py's default libver does not")
        return attributes

    # -- structure ---------------------------------------------------------------------------------

    def _read(self, offset: int, length: int, what: str) -> bytes:
        """Read bytes of the structure. Their sum is limited: a file may refer to the same often."""
        self._left -= length
        if not 0 <= offset <= offset + length <= self.size:
            raise NotPlain(f"a {what} at bytes {offset:,} to {offset + length:,} of {self.size:,}")
        if self._left < 0:
            raise NotPlain(f"more than {_MOST_STRUCTURE:,} bytes of structure")
        raw = os.pread(self._descriptor, length, offset)
        if len(raw) < length:
            raise NotPlain(f"a {what} that ends at byte {offset + len(raw):,}")
        return raw

    def _address(self, path: str, wanted: str) -> int:
        """Return where the object header of a group or dataset lies."""
        address, done = self._root, ""
        for part in path.split("/") if path else ():
            links = self._links(address, done)
            done = f"{done}/{part}".lstrip("/")
            if part not in links:
                raise _Missing(f"/{done} is missing, or not a {wanted} of this file")
            address = links[part]
        return address

    def _links(self, address: int, path: str) -> dict[str, int]:
        """Return the names in a group, and their object headers."""
        messages = dict(self._messages(address))
        if _SYMBOLS not in messages:
            newer = any(kind in messages for kind in _LINKS_OF_NEWER_GROUPS)
            why = ": its links are not hpczero's" if newer else ""
            raise _Missing(f"/{path} is missing, or not a group of this file{why}")
        tree, heap = unpacked("<QQ", messages[_SYMBOLS])
        signature, length, _, begin = unpacked("<8s3Q", self._read(heap, 32, "local heap"))
        if signature[:5] != b"HEAP\0":
            raise NotPlain(f"/{path} has no local heap")
        names, length_left = self._read(begin, length, "local heap"), length
        headers: dict[str, int] = {}
        for offset, header, cached in self._entries(tree, path):
            end = names.find(b"\0", offset, offset + _LONGEST_NAME + 1) if offset < length else -1
            name = names[offset:end].decode(errors="replace")
            length_left -= end - offset
            if end <= offset or length_left < 0 or "/" in name or name in headers:
                raise NotPlain(f"/{path} has a link without a name of its own")
            if cached not in _HARD:
                raise NotPlain(f"/{path}/{name} is a link that leads on".replace("//", "/"))
            headers[name] = header
        return headers

    def _entries(self, tree: int, path: str) -> Iterator[tuple[int, int, int]]:
        """Yield the entries of a group's symbol table.

        Of each, where its name lies in the heap, its object header and its cache type.
        """
        stack, seen = [tree], {tree}
        while stack:
            offset = stack.pop()
            signature, kind, _, used = unpacked("<4s2BH", self._read(offset, 8, "group"))
            if signature == b"SNOD":
                raw = self._read(offset + 8, 40 * used, "symbol table")
                yield from (
                    (entry[0], entry[1], entry[2]) for entry in struct.iter_unpack("<2QI20x", raw)
                )
                continue
            if signature != b"TREE" or kind:
                raise NotPlain(f"/{path} is no group: its tree cannot be read")
            raw = self._read(offset + 24, 16 * used + 8, "tree of a group")
            children = unpacked(f"<{2 * used + 1}Q", raw)[1::2]
            if seen.intersection(children) or len(set(children)) < used:
                raise NotPlain(f"/{path} has parts of its tree twice")
            seen.update(children)
            stack += reversed(children)

    def _messages(self, address: int) -> list[Message]:
        """Return all messages of an object header."""
        version, _, count, _, length = unpacked("<BBHII", self._read(address, 16, "object header"))
        if version != 1:
            raise NotPlain(f"an object header at byte {address:,} that is not of version 1")
        messages: list[Message] = []
        chunks, seen = [(address + 16, length)], set()
        while chunks and len(messages) < count:
            offset, length = chunks.pop(0)
            if offset in seen:
                raise NotPlain(f"an object header at byte {address:,} that has itself inside")
            seen.add(offset)
            for kind, content in self._chunk(offset, length):
                if kind == _CONTINUED:
                    chunks.append(unpacked("<QQ", content))
                messages.append((kind, content))
        return messages

    def _chunk(self, offset: int, length: int) -> Iterator[Message]:
        raw, at = self._read(offset, length, "object header"), 0
        while at + 8 <= length:
            kind, size, flags = unpacked("<HHB", raw, at)
            content = raw[at + 8 : at + 8 + size]
            if len(content) < size or (flags & _SHARED and kind in (_SPACE, _TYPE, _ATTRIBUTE)):
                raise NotPlain(f"a message at byte {offset + at:,} that cannot be read")
            if kind:
                yield kind, content
            at += 8 + size

    def _attribute(self, raw: bytes) -> tuple[str, Value | None]:
        version, flags, name_size, type_size, space_size = unpacked("<BBHHH", raw)
        if version not in (1, 2, 3) or (version > 1 and flags):
            raise NotPlain(f"an attribute of version {version}")
        step, at = (8 if version == 1 else 1), (9 if version == 3 else 8)
        parts = []
        for size in (name_size, type_size, space_size):
            parts.append(raw[at : at + size])
            at += -(-size // step) * step
        name = parts[0].partition(b"\0")[0].decode(errors="replace")
        try:
            kind, shape = kind_of(parts[1]), shape_of(parts[2])
        except NotPlain:
            return name, None
        return name, self._value(kind, raw[at : at + kind.size]) if shape == () else None

    def _value(self, kind: Kind, raw: bytes) -> Value | None:
        if len(raw) < kind.size:
            return None
        if kind.dtype is not None:
            number = np.frombuffer(raw, kind.dtype)[0].item()
            return number if isinstance(number, int | float) else None
        text = self._elsewhere(raw) if kind.is_variable else raw
        return text.partition(b"\0")[0].decode(errors="replace")

    def _elsewhere(self, raw: bytes) -> bytes:
        """Return the text of an attribute that lies in a global heap."""
        length, heap, wanted = unpacked("<IQI", raw)
        if heap in (0, _NOWHERE) or not length:
            return b""
        signature, size = unpacked("<8sQ", self._read(heap, 16, "global heap"))
        if signature[:5] != b"GCOL\1":
            raise NotPlain(f"no global heap at byte {heap:,}")
        objects, at = self._read(heap, size, "global heap"), 16
        while at + 16 <= size:
            number, _, count = unpacked("<HH4xQ", objects, at)
            if number == wanted and length <= count <= size - at - 16:
                return objects[at + 16 : at + 16 + length]
            if not number:
                break
            at += 16 + -(-count // 8) * 8
        raise NotPlain(f"a text that is not in the global heap at byte {heap:,}")


class _Missing(NotPlain):
    """There is no such group or dataset."""


def _dataset(messages: list[Message], path: str, file_size: int) -> Dataset:
    content = dict(messages)
    if not {_SPACE, _TYPE, _LAYOUT} <= content.keys():
        raise _Missing(f"/{path} is missing, or not a dataset of this file")
    layout = content[_LAYOUT]
    version, sort = unpacked("<BB", layout)
    contiguous = version in (3, 4) and sort == _CONTIGUOUS
    if not contiguous or _EXTERNAL in content or _FILTERS in content:
        raise NotPlain(f"/{path} is not stored as one piece inside this file")
    kind, shape = kind_of(content[_TYPE]), shape_of(content[_SPACE])
    offset, stored = unpacked("<QQ", layout, 2)
    if kind.dtype is None:
        raise NotPlain(f"/{path} has no numbers")
    dataset = Dataset(kind.dtype, shape, 0 if offset == _NOWHERE else offset, path)
    if not dataset.size:
        return dataset
    end = dataset.place + dataset.nbytes
    if offset == _NOWHERE or end > file_size or dataset.nbytes > stored:
        held = "nowhere" if offset == _NOWHERE else f"in {stored} bytes"
        raise NotPlain(
            f"/{path} has {shape_text(shape)} values and would end at byte {end} of {file_size}: "
            f"it lies {held}"
        )
    return dataset


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as "3 x 4", in few characters."""
    return " x ".join(map(str, shape[:8])) + (" x …" if len(shape) > 8 else "") or "1"
