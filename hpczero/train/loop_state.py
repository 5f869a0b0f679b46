"""The state of a loop of one's own, as buffers of a checkpoint: values, tensors, ranks' states.

    .loop/state         uint8: JSON text
    .loop/tensors/<n>   tensor n of the values, in its own type (bfloat16 as float32)
    .loop/ranks/<n>     uint8 [ranks, bytes]: state n of each rank (`rank_states`), as ASCII

Nothing is pickled: what JSON cannot say, and is no tensor, is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpczero.checkpoint.load import LOOP
from hpczero.checkpoint.shard_file import Array, Damaged
from hpczero.errors import InputError
from hpczero.text import printable

_STATE = f"{LOOP}state"
_DEEPEST = 50  # tables in tables
_WIDENED = {"bfloat16": "float32"}
_KINDS = "iufb"  # of numpy's numbers: what a checkpoint's buffers can be

Keys = tuple[str | int, ...]  # the way to a value in tables and lists


@dataclass(frozen=True)
class Position:
    """The place where a loop goes on: after so many steps, with what was saved as `extra`.

    `path`: the checkpoint; None: there is none, and the loop begins.
    """

    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


@dataclass(frozen=True)
class LoopState:
    """The part of a checkpoint that is a loop's.

    `extra`: the user's values. `generators`, `buffers`: name -> its state on each rank
    (`rank_states`). `optimizer`: what an optimizer keeps besides its tensors.
    """

    extra: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, list[str]] = field(default_factory=dict)
    buffers: dict[str, list[str]] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    def packed(self) -> dict[str, Array]:
        """Return the buffers that hold it; InputError where that cannot be."""
        tensors: list[tuple[Keys, Any]] = []
        values = _without_tensors(self.extra, (), tensors)
        described = []
        found: dict[str, Array] = {}
        for number, (keys, tensor) in enumerate(tensors):
            found[f"{LOOP}tensors/{number}"], kind = _stored(tensor, keys)
            described.append([list(keys), *kind])
        of_ranks = [*self.generators.values(), *self.buffers.values()]
        for number, states in enumerate(of_ranks):
            found[f"{LOOP}ranks/{number}"] = _padded(states)
        state = {
            "extra": values,
            "tensors": described,
            "generators": list(self.generators),
            "buffers": list(self.buffers),
            "optimizer": self.optimizer,
        }
        try:
            text = json.dumps(state)
        except ValueError as error:  # a whole number of thousands of digits
            raise InputError(f"extra cannot be written as text: {error}") from error
        found[_STATE] = np.frombuffer(text.encode(), np.uint8)
        return found

    @classmethod
    def of(cls, buffers: Mapping[str, Array], where: str) -> "LoopState":
        """Return what these buffers hold; nothing where a checkpoint is no loop's.

        Damaged: they do not fit together, as a stranger may have made them.
        """
        if _STATE not in buffers:
            return cls()
        try:
            state = json.loads(buffers[_STATE].tobytes())
            extra = state["extra"]
            for number, (keys, dtype, is_numpy) in enumerate(state["tensors"]):
                stored = buffers[f"{LOOP}tensors/{number}"]
                _put(extra, keys, _restored(stored, dtype, is_numpy))
            names = [*state["generators"], *state["buffers"]]
            of_ranks = [
                [row.tobytes().decode("ascii").rstrip() for row in buffers[f"{LOOP}ranks/{number}"]]
                for number in range(len(names))
            ]
            generators = dict(zip(state["generators"], of_ranks, strict=False))
            of_buffers = of_ranks[len(generators) :]
            own_buffers = dict(zip(state["buffers"], of_buffers, strict=True))
            return cls(dict(extra), generators, own_buffers, dict(state["optimizer"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            what = printable(f"{type(error).__name__}: {error}", 200)
            raise Damaged(
                f"{where}: the state of its loop does not fit together: {what}"
            ) from error


# -- values and tensors ----------------------------------------------------------------------------


def _without_tensors(value: Any, keys: Keys, tensors: list[tuple[Keys, Any]]) -> Any:
    """Return the value as JSON has it; tensors are taken out of it, and leave None."""
    if isinstance(value, torch.Tensor | np.ndarray):
        tensors.append((keys, value))
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        return value.item()
    if len(keys) >= _DEEPEST:
        raise InputError(f"extra{_shown(keys)}: more than {_DEEPEST} tables in each other")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(
                    f"extra{_shown(keys)} has the key {key!r}: a checkpoint's keys are text "
                    "(str(key) when it is saved, and back when it is loaded)"
                )
        return {key: _without_tensors(item, (*keys, key), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, (*keys, at), tensors) for at, item in enumerate(value)]
    raise InputError(
        f"extra{_shown(keys)} is a {type(value).__name__}: a checkpoint takes numbers, text, None, "
        "tensors, and lists and tables of them (nothing is pickled); save what it is made of"
    )


def _stored(tensor: Any, keys: Keys) -> tuple[Array, tuple[str, bool]]:
    """Return a tensor as a buffer, and what `_restored` needs: its dtype, and if it is numpy's."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind not in _KINDS or not tensor.dtype.isnative:
            raise InputError(f"extra{_shown(keys)} has numbers of type {tensor.dtype}")
        if isinstance(tensor, np.ma.MaskedArray):
            raise InputError(f"extra{_shown(keys)} has a mask: save numbers and mask apart")
        return np.array(tensor, order="C"), (tensor.dtype.name, True)  # as it is now
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "a tensor that is sparse, quantized or on meta: save a dense one"
        raise InputError(f"extra{_shown(keys)} is {what}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    on_host = tensor.detach().cpu()
    if dtype in _WIDENED:
        on_host = on_host.float()
    try:
        values = on_host.contiguous().numpy().copy()
    except TypeError:
        values = np.empty(0, np.complex64)
    if values.dtype.kind not in _KINDS:
        raise InputError(
            f"extra{_shown(keys)} has numbers of type {dtype}, which no checkpoint has"
        )
    return values, (dtype, False)


def _restored(stored: Array, dtype: str, is_numpy: bool) -> Any:
    if stored.dtype.name != _WIDENED.get(dtype, dtype):
        raise ValueError(f"a tensor of {stored.dtype} in place of {dtype}")
    if is_numpy:
        return stored
    values = torch.from_numpy(stored)
    return values.bfloat16() if dtype == "bfloat16" else values


def _put(extra: Any, keys: list[str | int], tensor: Any) -> None:
    """Put a tensor in its place, which is None now."""
    *outer, last = keys
    for key in outer:
        extra = extra[key]
    if extra[last] is not None:
        raise ValueError("a tensor in the place of another value")
    extra[last] = tensor


def _padded(states: Sequence[str]) -> Array:
    """Return the states of the ranks [ranks, bytes], as ASCII with spaces behind."""
    longest = max(map(len, states))
    rows = [np.frombuffer(state.ljust(longest).encode("ascii"), np.uint8) for state in states]
    return np.stack(rows)


def _shown(keys: Keys) -> str:
    return "".join(f"[{key!r}]" for key in keys)
