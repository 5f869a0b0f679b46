"""What a checkpoint can hold (pure): asked before a run begins, by whoever writes, and by whoever reads what a stranger may have written."""

import json
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from hpczero.text import printable

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")  # of buffers
MOST_DIMENSIONS = 32  # as HDF5 has it
MOST_TENSORS, MOST_BUFFERS = 250_000, 100_000  # what can be meant
LONGEST_TEXT = 16 << 20  # bytes of all names, as JSON
MOST_BYTES_OF_BUFFERS = 2 << 30  # they lie in the index, which is read whole
_LONGEST_NAME, _DEEPEST = 4096, 16  # bytes; groups in groups
_LONGEST, _MOST_ELEMENTS = 1 << 48, 1 << 60  # of a dimension; of a tensor: what 64 bits count stays exact
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
    if not all(type(length) is int and 0 <= length < _LONGEST for length in shape) or prod(shape) >= _MOST_ELEMENTS:
        return f"it cannot have the shape {_shown(list(shape))}"
    return ""


def _of_groups(name: str, names: Collection[str]) -> str:
    """A name that is the beginning of another one would be a dataset and a group."""
    parts = name.split("/")
    outer = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return next((f"there cannot be {_shown(other)} too" for other in outer if other in names), "")
