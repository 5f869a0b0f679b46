"""A layout: a value for each key that says how a job lies on its ranks (pure)."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from hpczero.spec.schema import Spec

# key -> its table in the spec
TABLES = {
    **dict.fromkeys(
        ("tensor", "pipeline", "sequence_parallel", "schedule", "chunks", "order"), "parallel"
    ),
    **dict.fromkeys(("stage", "shard_ranks", "node_shared", "offload"), "zero"),
    "micro_batch": "train",
    **dict.fromkeys(
        (
            "recompute",
            "recompute_every",
            "partition_activations",
            "offload_activations",
            "loss_chunk",
        ),
        "memory",
    ),
}


class Layout(NamedTuple):
    """A value for each key of `TABLES`."""

    tensor: int
    pipeline: int
    sequence_parallel: bool
    schedule: str
    chunks: int
    order: str
    stage: int
    shard_ranks: str | int
    node_shared: str | bool
    offload: str
    micro_batch: int
    recompute: str
    recompute_every: int
    partition_activations: bool
    offload_activations: str
    loss_chunk: int | str

    @classmethod
    def of(cls, spec: Spec) -> "Layout":
        return cls(**{key: getattr(getattr(spec, table), key) for key, table in TABLES.items()})

    def differences(self, other: "Layout") -> dict[str, Any]:
        """Return the keys whose values differ, with its own ones."""
        pairs = zip(self._asdict().items(), other, strict=True)
        return {key: value for (key, value), theirs in pairs if value != theirs}


def _sections() -> Iterator[tuple[str, int, int]]:
    """Yield each table, and where its keys begin and end in a layout."""
    first = 0
    for table, keys in groupby(TABLES.values()):
        last = first + len(list(keys))
        yield table, first, last
        first = last


SECTIONS = tuple(_sections())
