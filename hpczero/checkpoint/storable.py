"""What a checkpoint can hold (pure): asked before a run begins, by whoever writes, and by whoever reads what a stranger may have written."""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from hpczero.spec.show import printable

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")  # of buffers
MOST_DIMENSIONS = 32  # as HDF5 has it
_LONGEST_NAME, _DEEPEST, _MOST_BUFFERS = 4096, 16, 100_000  # bytes; groups in groups; what can be meant
_LONGEST, _MOST_ELEMENTS = 1 << 48, 1 << 60  # of a dimension; of a tensor: what 64 bits count stays exact
_TAKEN = "__metadata__"  # safetensors has something else under this name

Shape = Sequence[int]


def problem(tensors: Mapping[str, Shape], buffers: Mapping[str, tuple[str, Shape]]) -> str:
    """Why a checkpoint cannot hold these, of whatever types the names and lengths are; empty if it can. Of buffers also the dtype (`dtype_of`)."""
    if len(buffers) > _MOST_BUFFERS:
        return f"{len(buffers):,} buffers are more than {_MOST_BUFFERS:,}"
    shapes = {name: shape for name, (_, shape) in buffers.items()}
    for kind, those in (("tensor", tensors), ("buffer", shapes)):
        for name, shape in those.items():
            if wrong := _of_name(name) or _of_shape(shape) or _of_groups(name, those):
                return f"{kind} {_shown(name)}: {wrong}"
    if twice := tensors.keys() & buffers.keys():
        return f"{_shown(min(twice))} is a tensor and a buffer"
    return next((f"buffer {_shown(name)}: numbers of type {dtype}" for name, (dtype, _) in buffers.items() if dtype not in DTYPES), "")


def dtype_of(values: np.ndarray[Any, Any]) -> str:
    """In the words of `DTYPES`; what is not in this machine's order of bytes is none of them."""
    return values.dtype.name if values.dtype.isnative else values.dtype.str


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
