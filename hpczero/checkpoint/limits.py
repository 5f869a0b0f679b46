"""Limits of what a checkpoint can hold (pure).

Asked before a run begins, by whoever writes, and by whoever reads what a stranger may have made.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from hpczero.text import printable

_SIZES = {"float": (64, 32, 16), "int": (64, 32, 16, 8), "uint": (64, 32, 16, 8)}
DTYPES = (*(f"{kind}{bits}" for kind in _SIZES for bits in _SIZES[kind]), "bool")  # of buffers
MOST_DIMENSIONS = 32  # as HDF5 has it
MOST_TENSORS = 250_000  # more than any model has
MOST_BUFFERS = 100_000
MOST_SLOTS = 4096
MOST_PLACES = 500_000  # slots of all ranks: each is a number in the manifest
SLOT = r"^(model|(optimizer|replica_(0|[1-9][0-9]{0,5}))/[A-Za-z_][A-Za-z0-9_]{0,63})$"
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


def slots_problem(slots: Sequence[str], ranks: int = 1) -> str:
    """Return why a checkpoint of so many ranks cannot have these slots; empty if it can."""
    if len(slots) * ranks > MOST_PLACES:
        return (
            f"{len(slots)} tensors of each parameter on {ranks} ranks are more than {MOST_PLACES}"
        )
    if len(slots) > MOST_SLOTS:
        return f"{len(slots)} tensors of each parameter are more than {MOST_SLOTS}"
    odd = next((slot for slot in slots if not re.fullmatch(SLOT, slot)), None)
    return f"a state of the optimizer has no name for a checkpoint: {_shown(odd)}" if odd else ""


def replicas_problem(slots: Sequence[str]) -> str:
    """Return what is wrong with the slots of replicas; empty if each has the same, from 0 on."""
    names: dict[str, set[str]] = {}
    for slot in slots:
        of, _, name = slot.partition("/")
        if of.startswith("replica_"):
            names.setdefault(of, set()).add(name)
    if sorted(names) != sorted(f"replica_{number}" for number in range(len(names))):
        return f"its replicas are not numbered from 0 to {len(names) - 1}"
    if any(own != names["replica_0"] for own in names.values()):
        return "its replicas have slots of different names"
    return ""


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
