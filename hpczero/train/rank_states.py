"""The states that each rank has of its own, as text: random generators, and buffers that differ.

Generators are torch's, numpy's and Python's; nothing is pickled. Buffers differ where each rank's
module sees samples of its own, as the statistics of BatchNorm do.
"""

import base64
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hpczero.checkpoint.shard_file import Damaged
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.text import first_few, printable

Generators = Mapping[str, Any]  # by the user's names


def by_name(what: str, of_ranks: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return name -> the states of the ranks; InputError: not all ranks have the same names."""
    for rank, of_rank in enumerate(of_ranks):
        if other := of_ranks[0].keys() ^ of_rank.keys():
            names = first_few(sorted(map(str, other)))
            raise InputError(f"{what}: {names} is on rank 0 or on rank {rank}, not on both")
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


# -- random generators


def states_of(generators: Generators) -> dict[str, str]:
    """Return the state of each generator; InputError: one is of no kind that is known."""
    return {name: _state(name, generator) for name, generator in generators.items()}


def set_states(generators: Generators, states: Mapping[str, str]) -> None:
    """Set the state of each generator; Damaged: a text is no state of it."""
    for name, generator in generators.items():
        try:
            _set_state(generator, states[name])
        except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
            what = printable(f"{type(error).__name__}: {error}", 200)
            named = printable(repr(name), 100)
            raise Damaged(
                f"the state of the generator {named} is none of its kind: {what}"
            ) from error


def refuse_unknown(generators: Generators, saved: Mapping[str, object]) -> None:
    """Raise InputError unless a checkpoint has a state for each of these generators."""
    lacking = [repr(name) for name in generators if name not in saved]
    if lacking:
        there = first_few(list(map(repr, saved))) if saved else "none"
        raise InputError(
            f"the checkpoint has no state of the generator {first_few(lacking)}, and of others:"
            f" {there}; leave it out of `random`"
        )


def _state(name: str, generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    if isinstance(generator, np.random.Generator):
        return json.dumps(generator.bit_generator.state, default=_as_list)
    if generator is np.random or isinstance(generator, np.random.RandomState):
        return json.dumps(generator.get_state(legacy=False), default=_as_list)
    is_known = generator is random or isinstance(generator, random.Random)
    if is_known and not isinstance(generator, random.SystemRandom):
        return json.dumps(generator.getstate())
    raise InputError(
        f"random[{name!r}] is a {type(generator).__name__}: a generator is a torch.Generator (that"
        " of PyTorch's own numbers is torch.default_generator), a numpy.random.Generator or"
        " RandomState, numpy.random, a random.Random, or Python's module random"
    )


def _set_state(generator: Any, text: str) -> None:
    if isinstance(generator, torch.Generator):
        raw = bytearray(base64.b64decode(text, validate=True))
        generator.set_state(torch.frombuffer(raw, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = json.loads(text)
    elif generator is np.random or isinstance(generator, np.random.RandomState):
        generator.set_state(json.loads(text))
    else:
        version, numbers, gauss = json.loads(text)
        generator.setstate((version, tuple(numbers), gauss))


def _as_list(value: Any) -> Any:
    """Return numpy's arrays and numbers as JSON has them."""
    return value.tolist()


# -- buffers


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a checkpoint has, by name."""
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            persistent = name not in part._non_persistent_buffers_set
            if buffer is not None and persistent and not buffer.is_meta:
                yield f"{prefix}.{name}".lstrip("."), buffer


def buffers_that_differ(module: nn.Module, world: World) -> dict[str, str]:
    """Return this rank's values of the buffers that differ among the ranks. Collective."""
    raw = {name: _bytes_of(buffer) for name, buffer in persistent_buffers(module)}
    digests = {name: hashlib.sha256(values).hexdigest() for name, values in raw.items()}
    of_ranks = world.all_gather_objects(digests)
    for rank, of_rank in enumerate(of_ranks):
        if other := of_ranks[0].keys() ^ of_rank.keys():
            names = first_few(sorted(other))
            raise InputError(f"the buffers {names} are on rank 0 or on rank {rank}, not on both")
    alike = {name for name in raw if len({of_rank[name] for of_rank in of_ranks}) == 1}
    return {
        name: base64.b64encode(values).decode() for name, values in raw.items() if name not in alike
    }


def digest_of_buffers(module: nn.Module) -> bytes:
    """Return what differs where this rank's buffers do."""
    digest = hashlib.sha256()
    for name, buffer in persistent_buffers(module):
        digest.update(name.encode())
        digest.update(_bytes_of(buffer))
    return digest.digest()


def set_buffers(module: nn.Module, states: Mapping[str, str]) -> None:
    """Give buffers this rank's values; Damaged: a text is not one of a buffer's length."""
    for name, buffer in persistent_buffers(module):
        if name not in states:
            continue
        try:
            raw = base64.b64decode(states[name], validate=True)
        except ValueError as error:
            raise Damaged(f"the buffer {printable(name, 100)} of this rank: {error}") from error
        if len(raw) != buffer.nbytes:
            what = f"{len(raw):,} bytes, not {buffer.nbytes:,}"
            raise Damaged(f"the buffer {printable(name, 100)} of this rank has {what}")
        if raw:
            values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            buffer.copy_(values.view(buffer.dtype).view(buffer.shape))


def _bytes_of(buffer: torch.Tensor) -> bytes:
    values = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
    raw: bytes = values.numpy().tobytes()
    return raw
