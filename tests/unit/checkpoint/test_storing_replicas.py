"""Replicas share the units that a checkpoint stores: each unit once, and about as much each."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.checkpoint.piece_table import RankShard, Table, Tensor, stored_by_others
from hpczero.model.families import layers
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.spec.schema import Model

MODEL = Model(layers=3, hidden=24, heads=6, seq_len=33, vocab=257)

lengths = st.lists(st.integers(1, 100_000), min_size=1, max_size=30)


def units_of(sizes: list[int], shards: int) -> list[UnitLayout]:
    return [
        unit_layout(Layer(f"unit{number}", (Parameter(f"unit{number}.w", (size,), ZEROS),)), shards)
        for number, size in enumerate(sizes)
    ]


@given(lengths, st.integers(1, 4), st.integers(1, 9))
def test_every_unit_is_stored_once(sizes: list[int], shards: int, replicas: int) -> None:
    units = units_of(sizes, shards)
    names = {unit.name for unit in units}
    stored = [names - stored_by_others(units, replicas, number) for number in range(replicas)]
    assert sorted(name for of_replica in stored for name in of_replica) == sorted(names)


@given(lengths, st.integers(1, 4), st.integers(1, 9))
def test_each_stores_about_as_much(sizes: list[int], shards: int, replicas: int) -> None:
    """No one more than another by more than the largest unit."""
    units = units_of(sizes, shards)
    loads = []
    for number in range(replicas):
        others = stored_by_others(units, replicas, number)
        loads.append(sum(unit.shard_size for unit in units if unit.name not in others))
    assert sum(loads) == sum(unit.shard_size for unit in units)
    assert max(loads) - min(loads) <= max(unit.shard_size for unit in units)


@pytest.mark.parametrize(
    ("shards", "replicas", "tensor"), list(product((1, 2, 3), (1, 2, 5), (1, 2)))
)
def test_together_the_ranks_store_all_of_the_model(shards: int, replicas: int, tensor: int) -> None:
    """The table that a checkpoint would have is whole: no element is missing or there twice."""
    held = [layer for layer in layers(MODEL) if layer.parameters]
    tensors = [Tensor(p.name, p.shape) for layer in held for p in layer.parameters]
    ranks = list(product(range(replicas), range(shards), range(tensor)))

    def holding(rank: int) -> RankShard:
        replica, shard, tensor_rank = ranks[rank]
        units = [unit_layout(layer, shards, tensor, tensor_rank) for layer in held]
        return RankShard(units, shard, tensor_rank, stored_by_others(units, replicas, replica))

    table = Table.of(tensors, len(ranks), holding)
    elements = table.elements(len(ranks))
    assert sum(elements) == sum(tensor.size for tensor in tensors)
    assert table.problem(elements) == ""
