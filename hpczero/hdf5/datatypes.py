"""Datatype and dataspace messages of an HDF5 file, turned into numpy's dtypes and shapes (pure).

Only what hpczero writes is known: whole numbers, IEEE floats, bool as h5py stores it, and text of
attributes. Anything else is `NotPlain`.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

_FLOATS = {2: (10, 5, 15), 4: (23, 8, 127), 8: (52, 11, 1023)}  # mantissa, exponent, bias
_INTEGER, _FLOAT, _TEXT, _ENUM, _VARIABLE = 0, 1, 3, 8, 9  # classes of datatypes
_DEEPEST = 64  # dimensions that a shape may have


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
    if version not in (1, 2) or rank > _DEEPEST or (version == 2 and sort > 1):
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
